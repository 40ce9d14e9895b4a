"""A strict reader of ``adapter_config.json``: every known field of peft 0.21 stands in one table.

PEFT drops unknown fields, coerces types and fills in what is missing, all silently; some fields
import modules or read files, and some change the base. So each field is served, harmless, fixed to
its default, or forbidden, and any other name is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.text import shown

ALL_LINEAR: Final = "all-linear"
Targets = tuple[str, ...] | Literal["all-linear"]

# From this many names on, PEFT shortens the list, which changes what layers_to_transform selects.
_PEFT_SHORTENS_FROM: Final = 20
_WHERE: Final = "adapter_config.json"
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+@_-]{1,64}")
# A pattern is a regular expression to PEFT. Without quantifiers it cannot blow up, and the only
# thing left to read two ways is the dot; see expected_tensors.
_PATTERN: Final = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)+")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter's config says, as far as it is served.

    Patterns keep the file's order: to PEFT the first one that matches a module wins.
    """

    r: int
    lora_alpha: float
    target_modules: Targets
    exclude_modules: tuple[str, ...] = ()
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    layers_to_transform: tuple[int, ...] = ()
    peft_type: Literal["LORA"] = "LORA"


class _ValueRefusedError(Exception):
    def __init__(self, code: Code, expected: str, value: Any) -> None:
        super().__init__(expected)
        self.code = code
        self.expected = expected
        self.value = value


_Reader = Callable[[Any], Any]


def peft_config_parse(content: bytes) -> tuple[LoraConfig | None, tuple[Finding, ...]]:
    """Read the config; it is None exactly when there are findings."""
    try:
        document = json_parse(content, what=_WHERE, limit=limits.CONFIG_BYTES)
    except MalformedError as error:
        return None, (_finding(Code.CONFIG_MALFORMED, "", "strict JSON", error.message),)
    if not isinstance(document, dict):
        got = type(document).__name__
        return None, (_finding(Code.CONFIG_MALFORMED, "", "a JSON object", got),)
    findings = [*_unknown(document), *_fixed(document)]
    values: dict[str, Any] = {}
    for name, (reader, needed) in _READ.items():
        if name not in document:
            if needed:
                findings.append(_finding(Code.CONFIG_VALUE, name, "a value", "none"))
            continue
        try:
            values[name] = reader(document[name])
        except _ValueRefusedError as refusal:
            findings.append(_finding(refusal.code, name, refusal.expected, shown(refusal.value)))
    if findings:
        return None, tuple(findings)
    config = LoraConfig(**{name: values[name] for name in _SERVED if name in values})
    findings = _combination(config)
    return (None, tuple(findings)) if findings else (config, ())


def _unknown(document: Mapping[str, Any]) -> list[Finding]:
    known = _READ.keys() | _DEFAULTS.keys() | _FORBIDDEN.keys()
    return [
        _finding(Code.CONFIG_FIELD_UNKNOWN, name, "a field of peft 0.21's LoraConfig", "an unknown")
        for name in document
        if name not in known
    ]


def _fixed(document: Mapping[str, Any]) -> list[Finding]:
    findings = []
    for table, code in (
        (_DEFAULTS, Code.CONFIG_OPTION_UNSUPPORTED),
        (_FORBIDDEN, Code.CONFIG_FIELD_FORBIDDEN),
    ):
        for name, allowed in table.items():
            if name in document and not any(_same(document[name], value) for value in allowed):
                expected = " or ".join(repr(value) for value in allowed) or "no such field"
                findings.append(_finding(code, name, expected, shown(document[name])))
    return findings


def _same(value: Any, allowed: Any) -> bool:
    # JSON's 0 and false are equal in Python and not the same thing in a config.
    if isinstance(value, dict) and isinstance(allowed, dict):
        return value.keys() == allowed.keys() and all(_same(value[k], allowed[k]) for k in value)
    return type(value) is type(allowed) and bool(value == allowed)


def _combination(config: LoraConfig) -> list[Finding]:
    if not config.layers_to_transform:
        return []
    if config.target_modules == ALL_LINEAR:
        expected = "null with target_modules 'all-linear'"
        return [_finding(Code.CONFIG_VALUE, "layers_to_transform", expected, "a list")]
    if len(config.target_modules) >= _PEFT_SHORTENS_FROM:
        return [
            _finding(
                Code.CONFIG_OPTION_UNSUPPORTED,
                "layers_to_transform",
                f"fewer than {_PEFT_SHORTENS_FROM} names in target_modules beside it",
                f"{len(config.target_modules)} names",
            )
        ]
    return []


def _finding(code: Code, name: str, expected: str, got: str) -> Finding:
    where = f"{_WHERE}: {name}" if name else _WHERE
    return refuse(Check.PEFT_CONFIG, code, where, expected, got)


# Readers: the value as it is served, or _ValueRefusedError. Nothing is coerced.


def _value(expected: str, value: Any) -> _ValueRefusedError:
    return _ValueRefusedError(Code.CONFIG_VALUE, expected, value)


def _peft_type(value: Any) -> str:
    if value != "LORA":
        raise _ValueRefusedError(Code.PEFT_TYPE_UNSUPPORTED, "'LORA'", value)
    return "LORA"


def _task_type(value: Any) -> None:
    if value is not None and value != "CAUSAL_LM":
        raise _ValueRefusedError(Code.CONFIG_OPTION_UNSUPPORTED, "'CAUSAL_LM' or null", value)


def _init(value: Any) -> None:
    # pissa, olora and their kin change the base's weights when they are loaded.
    if not isinstance(value, bool) and value != "gaussian":
        expected = "true, false or 'gaussian'"
        raise _ValueRefusedError(Code.CONFIG_OPTION_UNSUPPORTED, expected, value)


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


def _dropout(value: Any) -> None:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise _value("a number from 0 to below 1", value)


def _text_or_null(value: Any) -> None:
    if value is not None and not (
        isinstance(value, str) and len(value) <= 1024 and value.isprintable()
    ):
        raise _value("null or up to 1024 printable characters", value)


def _version_or_null(value: Any) -> None:
    if value is not None and not (isinstance(value, str) and _VERSION.fullmatch(value)):
        raise _value("null or a version", value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > limits.TARGETS:
        raise _value(f"a list of up to {limits.TARGETS} module names", value)
    for name in value:
        if (
            not isinstance(name, str)
            or len(name) > limits.TENSOR_NAME_CHARS
            or not _NAME.fullmatch(name)
        ):
            raise _value("module names: A-Z a-z 0-9 _ - in parts joined by single dots", name)
    if len(set(value)) != len(value):
        raise _value("each module name once", value)
    return tuple(sorted(value))


def _targets(value: Any) -> Targets:
    if value == ALL_LINEAR:
        return ALL_LINEAR
    if isinstance(value, str):
        raise _ValueRefusedError(
            Code.CONFIG_OPTION_UNSUPPORTED,
            "a list of module names or 'all-linear' (regular expressions are not served yet)",
            value,
        )
    targets = _names(value)
    if not targets:
        raise _value("at least one module name", value)
    return targets


def _excluded(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise _ValueRefusedError(
            Code.CONFIG_OPTION_UNSUPPORTED,
            "a list of module names or null (regular expressions are not served yet)",
            value,
        )
    return () if value is None else _names(value)


def _layers(value: Any) -> tuple[int, ...]:
    layers = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(layer) is int and 0 <= layer <= limits.CATALOG_MODULES for layer in layers):
        raise _value("null, a layer number or a list of them", value)
    if len(set(layers)) != len(layers) or len(layers) > limits.TARGETS:
        raise _value(f"up to {limits.TARGETS} layer numbers, each once", value)
    return tuple(sorted(layers))


def _pattern(read: _Reader) -> _Reader:
    def reader(value: Any) -> tuple[tuple[str, Any], ...]:
        if value is None:
            return ()
        if not isinstance(value, dict) or len(value) > limits.TARGETS:
            raise _value(f"an object of up to {limits.TARGETS} patterns", value)
        for key in value:
            if len(key) > limits.TENSOR_NAME_CHARS or not _PATTERN.fullmatch(key):
                raise _ValueRefusedError(
                    Code.CONFIG_OPTION_UNSUPPORTED,
                    "keys of A-Z a-z 0-9 _ - . only (other regular expressions are not served yet)",
                    key,
                )
        return tuple((key, read(item)) for key, item in value.items())

    return reader


# The table: field -> (reader, required). Served fields first, then those without effect here.
_READ: Final[Mapping[str, tuple[_Reader, bool]]] = {
    "peft_type": (_peft_type, True),
    "r": (_rank, True),
    "lora_alpha": (_alpha, True),
    "target_modules": (_targets, True),
    "exclude_modules": (_excluded, False),
    "rank_pattern": (_pattern(_rank), False),
    "alpha_pattern": (_pattern(_alpha), False),
    "use_rslora": (_bool, False),
    "use_dora": (_bool, False),
    "layers_to_transform": (_layers, False),
    "task_type": (_task_type, False),
    "init_lora_weights": (_init, False),
    "lora_dropout": (_dropout, False),
    "inference_mode": (_bool, False),
    # PEFT sets it from the module's class itself, for Linear and Conv1D alike.
    "fan_in_fan_out": (_bool, False),
    "base_model_name_or_path": (_text_or_null, False),
    "revision": (_text_or_null, False),
    "peft_version": (_version_or_null, False),
}
_SERVED: Final = tuple(list(_READ)[:10])

# Not built yet: accepted only with one of these values, and named when refused.
_DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "ensure_weight_tying": (False,),
    "kasa_config": (None,),
    "layer_replication": (None,),
    "layers_pattern": (None, [], ""),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "monteclora_config": (None,),
    "qalora_group_size": (16,),
    "runtime_config": (None, {"ephemeral_gpu_offload": False}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
    "velora_config": (None,),
}

# These import modules or read files that the config names.
_FORBIDDEN: Final[Mapping[str, tuple[Any, ...]]] = {
    "auto_map": (),
    "auto_mapping": (None,),
    "corda_config": (None,),
    "custom_modules": (None,),
    "eva_config": (None,),
    "loftq_config": (None, {}),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
    "megatron_core": (None, "megatron.core"),
}
