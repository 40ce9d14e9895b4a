"""Targets that mean something else to PEFT than they say: left out, or rewritten by it."""

from __future__ import annotations

from typing import Final

from registry_service.domain.catalog import Catalog
from registry_service.domain.default_targets import DEFAULT_TARGETS
from registry_service.domain.findings import Code, Finding
from registry_service.domain.peft_config import LoraConfig
from registry_service.domain.peft_fields import Expression
from registry_service.domain.selected import config_finding

# On these bases PEFT rewrites targets that meant single experts to the fused parameters.
REWRITTEN_TARGETS: Final = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}
REWRITTEN_TYPES: Final = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), "mixtral"),
    **dict.fromkeys(
        (
            *("afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
            *("dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite"),
            *("glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe"),
            *("qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_text"),
            *("qwen3_omni_moe_thinker", "sarvam_mla", "solar_open"),
        ),
        "qwen2_moe",
    ),
}


_FUSED: Final = frozenset({"gate_up_proj", "down_proj"})
# Classes that write no text: PEFT's wrappers of these tasks ask a model for its generation.
_NO_TEXT: Final = ("Classification", "QuestionAnswering")
_TEXT_TASKS: Final = frozenset({"CAUSAL_LM", "SEQ_2_SEQ_LM"})


def task_findings(catalog: Catalog, config: LoraConfig) -> list[Finding]:
    """A refusal of a task that PEFT does not take for the base's class."""
    if config.task_type not in _TEXT_TASKS or not catalog.model_class.endswith(_NO_TEXT):
        return []
    expected = f"the task of a {catalog.model_class}"
    return [config_finding(Code.CONFIG_VALUE, "task_type", expected, str(config.task_type))]


def default_finding(catalog: Catalog) -> Finding:
    """A refusal that shows which targets PEFT would fill in."""
    default = DEFAULT_TARGETS.get(catalog.model_type)
    if default is None:
        expected = "the names written out"
    else:
        written = repr(default) if isinstance(default, str) else str(list(default))
        expected = f"the names written out; PEFT's default for {catalog.model_type} is {written}"
    return config_finding(Code.TARGETS_MISSING, "target_modules", expected, "none")


def rewritten_findings(
    catalog: Catalog, config: LoraConfig, targets: frozenset[str]
) -> list[Finding]:
    """A refusal for each target that PEFT would rewrite, or read otherwise, on this base.

    ``targets`` are the names of a list, or what the expression matches among all names that it was
    asked about, ``probed_names`` too.
    """
    family = REWRITTEN_TYPES.get(catalog.model_type)
    if family is None:
        return []
    names = REWRITTEN_TARGETS[family]
    option = config.target_modules
    if isinstance(option, tuple):
        meant = [name for name in option if _last(name) in names]
    elif isinstance(option, Expression):
        meant = [option.text] if any(_last(name) in names for name in targets) else []
    else:
        meant = [str(option)]
    expected = (
        "attention and other modules here, and the experts in target_parameters "
        "(gate_up_proj, down_proj, gate.weight): PEFT rewrites this target for fused experts"
    )
    found = [config_finding(Code.TARGET_KIND, "target_modules", expected, name) for name in meant]
    if isinstance(option, Expression) and not meant:
        found += _widened(catalog, option, targets)
    return found


def _widened(catalog: Catalog, option: Expression, targets: frozenset[str]) -> list[Finding]:
    """PEFT takes an expression here as the last parts of the names that it matches."""
    lasts = {_last(name) for name in targets}
    wider = [m.name for m in catalog.modules if m.last_name in lasts and m.name not in targets]
    if not wider:
        return []
    expected = (
        f"a list: on this base PEFT reads the expression as {sorted(lasts)}, "
        f"which is also {wider[0]}"
    )
    return [config_finding(Code.TARGET_KIND, "target_modules", expected, option.text)]


def probed_names(catalog: Catalog) -> list[str]:
    """Names beside the modules' that PEFT tries an expression on, where it rewrites targets."""
    family = REWRITTEN_TYPES.get(catalog.model_type)
    if family is None:
        return []
    parameters = [f"{m.name}.{p}" for m in catalog.modules for p in m.parameters]
    fused = [m.name for m in catalog.modules if _FUSED & set(m.parameters)]
    return parameters + [f"{name}.{old}" for name in fused for old in REWRITTEN_TARGETS[family]]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
