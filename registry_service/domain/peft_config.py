"""A strict reader of ``adapter_config.json``; what each field may say stands in ``peft_fields``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.peft_fields import (
    ALL_LINEAR,
    DEFAULT_FIELDS,
    FORBIDDEN_FIELDS,
    HARMLESS_FIELDS,
    SERVED_FIELDS,
    Expression,
    Targets,
    ValueRefusedError,
)
from registry_service.domain.text import shown

# From this many names on, PEFT shortens the list. That changes what layers_to_transform selects
# and which embeddings are saved in full.
_PEFT_SHORTENS_FROM: Final = 20
_EMBEDDINGS: Final = frozenset({"embed_tokens", "lm_head"})
# Before 0.19 PEFT swapped A's and B's sides for target_parameters, silently where they coincide.
_PARAMETERS_SINCE: Final = (0, 19)
_WHERE: Final = "adapter_config.json"
_NUMBERS: Final = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)")

Rows = tuple[tuple[str | None, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter's config says, as far as it is served.

    Patterns keep the file's order: to PEFT the first one that matches a module wins.
    ``trainable_token_indices`` are rows by module name, None for the input embedding.
    ``target_modules`` is None where the file leaves them to the architecture's default.
    """

    r: int
    lora_alpha: float
    target_modules: Targets
    exclude_modules: tuple[str, ...] | Expression = ()
    rank_pattern: tuple[tuple[str | Expression, int], ...] = ()
    alpha_pattern: tuple[tuple[str | Expression, float], ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    trainable_token_indices: Rows = ()
    modules_to_save: tuple[str, ...] = ()
    task_type: str | None = None
    peft_type: Literal["LORA"] = "LORA"

    @property
    def declared_targets(self) -> tuple[str, ...] | str | None:
        """``target_modules`` as a declaration states them: an expression as its text."""
        targets = self.target_modules
        return targets.text if isinstance(targets, Expression) else targets


def peft_config_parse(content: bytes) -> tuple[LoraConfig | None, tuple[Finding, ...]]:
    """Read the config; it is None exactly when there are findings."""
    try:
        document = json_parse(content, what=_WHERE, limit=limits.CONFIG_BYTES)
    except MalformedError as error:
        return None, (_finding(Code.CONFIG_MALFORMED, "", "strict JSON", error.message),)
    if not isinstance(document, dict):
        got = type(document).__name__
        return None, (_finding(Code.CONFIG_MALFORMED, "", "a JSON object", got),)
    values, findings = _read(document)
    if any(finding.code is Code.PEFT_TYPE_UNSUPPORTED for finding in findings):
        # The fields of another type are unknown here, and saying so of each would hide the reason.
        return None, tuple(f for f in findings if f.code is Code.PEFT_TYPE_UNSUPPORTED)
    findings += [*_unknown(document), *_fixed(document)]
    if findings:
        return None, tuple(findings)
    config = LoraConfig(target_modules=values.pop("target_modules", None), **_served(values))
    findings = [_finding(*parts) for parts in _combinations(config, values)]
    return (None, tuple(findings)) if findings else (config, ())


def _served(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in SERVED_FIELDS}


def _read(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    values: dict[str, Any] = {}
    findings = []
    table = {**SERVED_FIELDS, **{name: (read, False) for name, read in HARMLESS_FIELDS.items()}}
    for name, (reader, needed) in table.items():
        if name not in document:
            if needed:
                code = Code.PEFT_TYPE_UNSUPPORTED if name == "peft_type" else Code.CONFIG_VALUE
                expected = "'LORA'" if name == "peft_type" else "a value"
                findings.append(_finding(code, name, expected, "none"))
            continue
        try:
            values[name] = reader(document[name])
        except ValueRefusedError as refusal:
            findings.append(_finding(refusal.code, name, refusal.expected, shown(refusal.value)))
    return values, findings


def _unknown(document: Mapping[str, Any]) -> list[Finding]:
    known = (
        SERVED_FIELDS.keys()
        | HARMLESS_FIELDS.keys()
        | DEFAULT_FIELDS.keys()
        | FORBIDDEN_FIELDS.keys()
    )
    return [
        _finding(Code.CONFIG_FIELD_UNKNOWN, name, "a field of peft 0.21's LoraConfig", "an unknown")
        for name in document
        if name not in known
    ]


def _fixed(document: Mapping[str, Any]) -> list[Finding]:
    findings = []
    for table, code in (
        (DEFAULT_FIELDS, Code.CONFIG_OPTION_UNSUPPORTED),
        (FORBIDDEN_FIELDS, Code.CONFIG_FIELD_FORBIDDEN),
    ):
        for name, allowed in table.items():
            if name in document and not any(_same(document[name], value) for value in allowed):
                expected = " or ".join(repr(value) for value in allowed) or "no such field"
                if name == "auto_mapping":
                    expected = "None (set task_type, and PEFT leaves it out)"
                findings.append(_finding(code, name, expected, shown(document[name])))
    return findings


def _same(value: Any, allowed: Any) -> bool:
    # JSON's 0 and false are equal in Python and not the same thing in a config.
    if isinstance(value, dict) and isinstance(allowed, dict):
        return value.keys() == allowed.keys() and all(_same(value[k], allowed[k]) for k in value)
    return type(value) is type(allowed) and bool(value == allowed)


_Parts = tuple[Code, str, str, str]


def _combinations(config: LoraConfig, values: Mapping[str, Any]) -> list[_Parts]:
    """Options that PEFT refuses beside each other, or reads in a way that nobody means."""
    return [
        *_layer_options(config),
        *_target_options(config),
        *_variant_options(config, values),
        *_parameter_options(config, values),
    ]


def _layer_options(config: LoraConfig) -> list[_Parts]:
    found: list[_Parts] = []
    targets = config.target_modules
    if config.layers_pattern and not config.layers_to_transform:
        expected = "layers_to_transform beside it"
        found.append((Code.CONFIG_VALUE, "layers_pattern", expected, "none"))
    if config.layers_to_transform and not isinstance(targets, tuple):
        expected = "null unless target_modules is a list"
        found.append((Code.CONFIG_VALUE, "layers_to_transform", expected, "a list"))
    return found


def _target_options(config: LoraConfig) -> list[_Parts]:
    targets = config.target_modules
    if not isinstance(targets, tuple):
        return []
    if not targets and not config.target_parameters:
        expected = "at least one module name, or target_parameters"
        return [(Code.CONFIG_VALUE, "target_modules", expected, "an empty list")]
    if len(targets) < _PEFT_SHORTENS_FROM:
        return []
    if config.layers_to_transform or not _EMBEDDINGS.isdisjoint(targets):
        expected = (
            f"fewer than {_PEFT_SHORTENS_FROM} names beside layers_to_transform or an embedding "
            "(PEFT would shorten the list)"
        )
        got = f"{len(targets)} names"
        return [(Code.CONFIG_OPTION_UNSUPPORTED, "target_modules", expected, got)]
    return []


def _variant_options(config: LoraConfig, values: Mapping[str, Any]) -> list[_Parts]:
    if not config.lora_bias:
        return []
    if config.use_dora:
        return [(Code.CONFIG_VALUE, "lora_bias", "false with use_dora", "true")]
    if not values.get("init_lora_weights", True):
        expected = "init_lora_weights true or false beside it"
        return [(Code.CONFIG_VALUE, "lora_bias", expected, "another start")]
    return []


def _parameter_options(config: LoraConfig, values: Mapping[str, Any]) -> list[_Parts]:
    if not config.target_parameters:
        return []
    field = "target_parameters"
    refused = {
        "lora_dropout": "0",
        "fan_in_fan_out": "false",
        "lora_bias": "false",
        "use_dora": "false",
    }
    found: list[_Parts] = [
        (Code.CONFIG_VALUE, name, f"{expected} with {field}", shown(values[name]))
        for name, expected in refused.items()
        if values.get(name)
    ]
    match = _NUMBERS.match(values.get("peft_version") or "")
    if match is None or (int(match[1]), int(match[2])) < _PARAMETERS_SINCE:
        expected = "peft_version 0.19 or newer beside it: older ones laid the tensors out otherwise"
        got = str(values.get("peft_version"))
        found.append((Code.CONFIG_OPTION_UNSUPPORTED, field, expected, got))
    return found


def _finding(code: Code, name: str, expected: str, got: str) -> Finding:
    where = f"{_WHERE}: {name}" if name else _WHERE
    return refuse(Check.PEFT_CONFIG, code, where, expected, got)


__all__ = ["ALL_LINEAR", "Expression", "LoraConfig", "Targets", "peft_config_parse"]
