"""Every known field of ``adapter_config.json`` as peft 0.21 writes it, in one table.

PEFT drops unknown fields, coerces types and fills in what is missing, all silently; some fields
import modules or read files, and some change the base. So each field is served, without effect
here, fixed to its default, or forbidden, and any other name is refused. A reader gives the value
as it is served, or raises ``ValueRefusedError``; nothing is coerced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from registry_service.domain import limits
from registry_service.domain.findings import Code

ALL_LINEAR: Final = "all-linear"

TASK_TYPES: Final = (
    "CAUSAL_LM",
    "SEQ_2_SEQ_LM",
    "SEQ_CLS",
    "TOKEN_CLS",
    "QUESTION_ANS",
    "FEATURE_EXTRACTION",
)

# A pattern of these characters cannot blow up, and the only thing left to read two ways is the
# dot: it is matched here. Anything else is an expression, matched in a process of its own.
PLAIN_PATTERN: Final = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)+")

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_LAYERS_NAME: Final = re.compile(r"[A-Za-z0-9_]+")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+@_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Expression:
    """A regular expression of a config. What it matches is found outside of the domain."""

    text: str


Targets = tuple[str, ...] | Literal["all-linear"] | Expression | None
Reader = Callable[[Any], Any]


class ValueRefusedError(Exception):
    """A value that is not served: what was expected, and what stands there."""

    def __init__(self, code: Code, expected: str, value: Any) -> None:
        super().__init__(expected)
        self.code = code
        self.expected = expected
        self.value = value


def _value(expected: str, value: Any) -> ValueRefusedError:
    return ValueRefusedError(Code.CONFIG_VALUE, expected, value)


def _unsupported(expected: str, value: Any) -> ValueRefusedError:
    return ValueRefusedError(Code.CONFIG_OPTION_UNSUPPORTED, expected, value)


def _peft_type(value: Any) -> str:
    if value == "LORA":
        return "LORA"
    known = OTHER_PEFT_TYPES.get(value) if isinstance(value, str) else None
    needed = f"{value} would need {known}" if known else f"another would need {_RULE}"
    raise ValueRefusedError(Code.PEFT_TYPE_UNSUPPORTED, f"'LORA'; {needed}", value)


def _task_type(value: Any) -> str | None:
    if value is not None and value not in TASK_TYPES:
        raise _unsupported(f"null or one of {', '.join(TASK_TYPES)}", value)
    return None if value is None else str(value)


def _init(value: Any) -> bool:
    # pissa, olora, corda, loftq and lora_ga change the base's weights when PEFT loads them, mica
    # brings a forward of its own. The others only say how training started.
    if not isinstance(value, bool) and value != "gaussian":
        expected = (
            "true, false or 'gaussian': save with PEFT's path_initial_model_for_weight_conversion "
            "where the start changed the base, then write true"
        )
        raise _unsupported(expected, value)
    return isinstance(value, bool)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _value("true or false", value)
    return value


def _rank(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= limits.RANK:
        raise _value(f"an integer from 1 to {limits.RANK}", value)
    return value


def _alpha(value: Any) -> float:
    # json_parse has refused NaN and Infinity.
    if type(value) not in (int, float) or not 0 < value <= limits.ALPHA:
        raise _value(f"a number over 0, at most {limits.ALPHA}", value)
    return float(value)


def _dropout(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise _value("a number from 0 to below 1", value)
    return float(value)


def _text_or_null(value: Any) -> None:
    if value is not None and not (
        isinstance(value, str) and len(value) <= 1024 and value.isprintable()
    ):
        raise _value("null or up to 1024 printable characters", value)


def _version_or_null(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _VERSION.fullmatch(value):
        raise _value("null or a version", value)
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > limits.TARGETS:
        raise _value(f"a list of up to {limits.TARGETS} names", value)
    for name in value:
        if (
            not isinstance(name, str)
            or len(name) > limits.TENSOR_NAME_CHARS
            or not _NAME.fullmatch(name)
        ):
            raise _value("names: A-Z a-z 0-9 _ - in parts joined by single dots", name)
    if len(set(value)) != len(value):
        raise _value("each name once", value)
    return tuple(sorted(value))


def _names_or_null(value: Any) -> tuple[str, ...]:
    return () if value is None else _names(value)


def _expression(value: str) -> Expression:
    if not value or len(value) > limits.EXPRESSION_CHARS or not value.isprintable():
        raise _value(f"an expression of 1 to {limits.EXPRESSION_CHARS} printable characters", value)
    return Expression(value)


def _targets(value: Any) -> Targets:
    if value is None or value == ALL_LINEAR:
        return value  # type: ignore[no-any-return]  # None or the literal
    if isinstance(value, str):
        if value.lower() == ALL_LINEAR:
            raise _value(f"'{ALL_LINEAR}' in small letters", value)
        return _expression(value)
    return _names(value)


def _excluded(value: Any) -> tuple[str, ...] | Expression:
    return _expression(value) if isinstance(value, str) else _names_or_null(value)


def _layers(value: Any) -> tuple[int, ...]:
    layers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(layer) is int and 0 <= layer <= limits.CATALOG_MODULES for layer in layers):
        raise _value("null, a layer number or a list of them", value)
    if len(set(layers)) != len(layers) or len(layers) > limits.TARGETS:
        raise _value(f"up to {limits.TARGETS} layer numbers, each once", value)
    return tuple(sorted(layers))


def _layers_pattern(value: Any) -> tuple[str, ...]:
    """Names of module lists, in the file's order: to PEFT the first that matches wins."""
    patterns = value if isinstance(value, list) else [] if value in (None, "") else [value]
    if len(patterns) > limits.TARGETS or not all(isinstance(item, str) for item in patterns):
        raise _value("null, the name of a module list or a list of such names", value)
    for pattern in patterns:
        if len(pattern) > limits.TENSOR_NAME_CHARS or not _LAYERS_NAME.fullmatch(pattern):
            raise _unsupported("plain names such as 'layers' or 'h'", pattern)
    return tuple(patterns)


def _token_indices(value: Any) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
    """Rows by module name; None stands for the input embedding."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        return ((None, _rows(value)),)
    names = _names(list(value))
    if not names:
        raise _value("at least one module", value)
    return tuple((name, _rows(value[name])) for name in names)


def _rows(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= limits.TOKEN_INDICES:
        raise _value(f"a list of 1 to {limits.TOKEN_INDICES} token numbers", value)
    if not all(type(row) is int and row >= 0 for row in value) or len(set(value)) != len(value):
        raise _value("token numbers from 0 up, each once", value)
    return tuple(value)


def _pattern(read: Reader) -> Reader:
    def reader(value: Any) -> tuple[tuple[str | Expression, Any], ...]:
        # PEFT does not load a null here.
        if not isinstance(value, dict) or len(value) > limits.TARGETS:
            raise _value(f"an object of up to {limits.TARGETS} patterns", value)
        return tuple((_pattern_key(key), read(item)) for key, item in value.items())

    return reader


def _pattern_key(key: str) -> str | Expression:
    if len(key) <= limits.TENSOR_NAME_CHARS and PLAIN_PATTERN.fullmatch(key):
        return key
    return _expression(key)


# The table: field -> (reader, required). Served fields first, then those without effect here.
SERVED_FIELDS: Final[Mapping[str, tuple[Reader, bool]]] = {
    "peft_type": (_peft_type, True),
    "r": (_rank, True),
    "lora_alpha": (_alpha, True),
    "target_modules": (_targets, False),
    "exclude_modules": (_excluded, False),
    "rank_pattern": (_pattern(_rank), False),
    "alpha_pattern": (_pattern(_alpha), False),
    "use_rslora": (_bool, False),
    "use_dora": (_bool, False),
    "lora_bias": (_bool, False),
    "layers_to_transform": (_layers, False),
    "layers_pattern": (_layers_pattern, False),
    "target_parameters": (_names_or_null, False),
    "trainable_token_indices": (_token_indices, False),
    "modules_to_save": (_names_or_null, False),
    "task_type": (_task_type, False),
}
HARMLESS_FIELDS: Final[Mapping[str, Reader]] = {
    "init_lora_weights": _init,
    "lora_dropout": _dropout,
    "inference_mode": _bool,
    # PEFT sets it from the module's class itself, for Linear and Conv1D alike.
    "fan_in_fan_out": _bool,
    "base_model_name_or_path": _text_or_null,
    "revision": _text_or_null,
    "peft_version": _version_or_null,
}

# Not served: accepted only with one of these values, and named when refused.
DEFAULT_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    # lora_only and all put the base's own biases into the file.
    "bias": ("none",),
    "ensure_weight_tying": (False,),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "monteclora_config": (None,),
    "qalora_group_size": (16,),
    "runtime_config": (None, {"ephemeral_gpu_offload": False}),
    "use_bdlora": (None,),
    "use_qalora": (False,),
    "velora_config": (None,),
}

# These import modules or read files that the config names.
FORBIDDEN_FIELDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "auto_map": (),
    # PEFT writes it when task_type was not set: it names a module to import.
    "auto_mapping": (None,),
    "corda_config": (None,),
    "custom_modules": (None,),
    "eva_config": (None,),
    "loftq_config": (None, {}),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
    "megatron_core": (None, "megatron.core"),
}

_SCALES: Final = "the rule for its vectors' shapes and an engine that scales activations"
_PRODUCT: Final = "the rule for its factors' shapes and an engine that builds its product"
_ROTATION: Final = "the rule for its rotations' shapes and an engine that turns the base's weights"
_PROMPT: Final = "a rule for its virtual tokens and an engine that keeps them apart in the cache"
_SHARED: Final = "its shared projections to be named by digest, and an engine that applies them"
_RULE: Final = "the rule for its tensors' names and shapes, and an engine that applies it"
_CHANGED: Final = "the base's weights to stay as they are, which it does not leave them"

# What would be needed to serve the other types of peft 0.21.
OTHER_PEFT_TYPES: Final[Mapping[str, str]] = {
    "ADALORA": "ranks that do not change with the training step, so save it as LoRA",
    "ADAMSS": _RULE,
    "ADAPTION_PROMPT": _PROMPT,
    "BEFT": _RULE,
    "BOFT": _ROTATION,
    "C3A": _PRODUCT,
    "CARTRIDGE": _PROMPT,
    "CPT": _PROMPT,
    "DEFT": _RULE,
    "DELORA": _RULE,
    "FOURIERFT": _PRODUCT,
    "FROD": _RULE,
    "GLORA": _RULE,
    "GRALORA": _PRODUCT,
    "HIRA": _PRODUCT,
    "HRA": _ROTATION,
    "IA3": _SCALES,
    "LILY": _SHARED,
    "LN_TUNING": "norms to be replaced per request, which an engine with one base does not do",
    "LOHA": _PRODUCT,
    "LOKR": _PRODUCT,
    "MISS": _PRODUCT,
    "MULTITASK_PROMPT_TUNING": _PROMPT,
    "OFT": _ROTATION,
    "OSF": _CHANGED,
    "PEANUT": _RULE,
    "POLY": "a router over several adapters to be admitted as one",
    "PREFIX_TUNING": _PROMPT,
    "PROMPT_TUNING": _PROMPT,
    "PSOFT": _RULE,
    "PVERA": _SHARED,
    "P_TUNING": _PROMPT,
    "RANDLORA": _SHARED,
    "ROAD": _ROTATION,
    "SHADOW": _RULE,
    "SHIRA": "sparse changes of the base's weights to be applied per request",
    "SUPERTUNING": _RULE,
    "TINYLORA": _SHARED,
    "TRAINABLE_TOKENS": "LoRA beside it: use trainable_token_indices of a LoraConfig",
    "UNILORA": _SHARED,
    "VBLORA": _SHARED,
    "VERA": _SHARED,
    "WAVEFT": _PRODUCT,
    "XLORA": "a router over several adapters to be admitted as one",
}
