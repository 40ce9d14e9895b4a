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


def default_finding(catalog: Catalog) -> Finding:
    """A refusal that shows which targets PEFT would fill in."""
    default = DEFAULT_TARGETS.get(catalog.model_type)
    if default is None:
        expected = "the names written out"
    else:
        written = repr(default) if isinstance(default, str) else str(list(default))
        expected = f"the names written out; PEFT's default for {catalog.model_type} is {written}"
    return config_finding(Code.TARGETS_MISSING, "target_modules", expected, "none")


def rewritten_findings(catalog: Catalog, config: LoraConfig) -> list[Finding]:
    """A refusal for each target that PEFT would rewrite on this base."""
    family = REWRITTEN_TYPES.get(catalog.model_type)
    if family is None:
        return []
    targets = config.target_modules
    if isinstance(targets, tuple):
        names = REWRITTEN_TARGETS[family]
        meant = [name for name in targets if name.rpartition(".")[2] in names]
    else:
        meant = [targets.text if isinstance(targets, Expression) else str(targets)]
    expected = (
        "a list of attention and other modules here, and the experts in target_parameters "
        "(gate_up_proj, down_proj, gate.weight): PEFT rewrites this target for fused experts"
    )
    return [config_finding(Code.TARGET_KIND, "target_modules", expected, name) for name in meant]
