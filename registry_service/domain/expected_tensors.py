"""Every tensor that an adapter's file must hold, from catalog and config alone.

The selection and naming rules are those of peft 0.21, checked against it in
``tests/contract/test_peft_oracle.py``; what PEFT would do silently (a target that matches nothing,
a pattern without use) is a finding here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.peft_config import ALL_LINEAR, LoraConfig
from registry_service.domain.safetensors_header import ALLOWED_DTYPES

KEY_PREFIX: Final = "base_model.model."

_CONFIG: Final = "adapter_config.json"
# PEFT saves a full copy of the base's tensor beside an adapter on a module of these names.
_COPIED: Final = frozenset({"embed_tokens", "lm_head"})
# On a base with fused experts PEFT rewrites these targets, and all-linear, to the fused parameters.
_EXPERT_TARGETS: Final = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
# PEFT refuses these on a state-space model: its kernels bypass their forward.
_STATE_SPACE: Final = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
_STATE_SPACE_TARGETS: Final = frozenset({"out_proj", "conv1d"})
_LAYER: Final = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one tensor has to be. ``rank_axis`` is the axis that holds the rank, if one does."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    module: str
    rank: int
    rank_axis: int | None


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """Tensors by name, and the factor of B·A by module; complete only without findings."""

    tensors: Mapping[str, Expectation]
    scaling: Mapping[str, float]
    findings: tuple[Finding, ...]


def expected_tensors(catalog: Catalog, config: LoraConfig) -> ExpectedTensors:
    """All tensors of an adapter with ``config`` on the base of ``catalog``."""
    selected, findings = _select(catalog, config)
    findings += _kind_findings(catalog, selected)
    findings += _expert_findings(catalog, config)
    names = [module.name for module in selected]
    if (len(config.rank_pattern) + len(config.alpha_pattern)) * len(names) > limits.PATTERN_MATCHES:
        findings.append(
            _structure(Code.CONFIG_VALUE, "rank_pattern", "fewer patterns", "too many to match")
        )
    if findings:
        return ExpectedTensors({}, {}, tuple(findings))
    ranks, rank_findings = _by_pattern(names, config.rank_pattern, config.r, "rank_pattern")
    alphas, alpha_findings = _by_pattern(
        names, config.alpha_pattern, config.lora_alpha, "alpha_pattern"
    )
    if rank_findings or alpha_findings:
        return ExpectedTensors({}, {}, (*rank_findings, *alpha_findings))
    tensors = {
        KEY_PREFIX + module.name + suffix: expectation
        for module in selected
        for suffix, expectation in _tensors(module, int(ranks[module.name]), config.use_dora)
    }
    root = math.sqrt if config.use_rslora else float
    scaling = {name: alphas[name] / root(ranks[name]) for name in names}
    return ExpectedTensors(tensors, scaling, ())


def _select(catalog: Catalog, config: LoraConfig) -> tuple[list[Module], list[Finding]]:
    """The targeted modules, and what in the selection matches nothing."""
    targets = _targets(catalog, config)
    excluded = frozenset(config.exclude_modules)
    unused_targets, unused_excludes = set(targets), set(excluded)
    unused_layers = set(config.layers_to_transform)
    selected = []
    for module in catalog.modules:
        endings = list(_endings(module.name))
        if not excluded.isdisjoint(endings):
            unused_excludes.difference_update(endings)
            continue
        hits = [ending for ending in endings if ending in targets]
        if not hits:
            continue
        if config.layers_to_transform and module.name not in targets:
            layer = _layer_of(module.name)
            if layer is None or layer not in config.layers_to_transform:
                continue
            unused_layers.discard(layer)
        unused_targets.difference_update(hits)
        selected.append(module)
    if config.target_modules == ALL_LINEAR:
        unused_targets = set() if selected else {ALL_LINEAR}
    findings = [
        *(_unmatched("target_modules", name) for name in sorted(unused_targets)),
        *(_unmatched("exclude_modules", name) for name in sorted(unused_excludes)),
        *(_unmatched("layers_to_transform", str(layer)) for layer in sorted(unused_layers)),
    ]
    return selected, findings


def _targets(catalog: Catalog, config: LoraConfig) -> frozenset[str]:
    if config.target_modules != ALL_LINEAR:
        return frozenset(config.target_modules)
    return frozenset(
        module.name
        for module in catalog.modules
        if module.kind in (Kind.LINEAR, Kind.CONV1D) and module.name != catalog.output_embedding
    )


def _endings(name: str) -> Iterator[str]:
    """``a.b.c``, ``b.c``, ``c``: what a name in a list may say to select this module."""
    while True:
        yield name
        _, dot, name = name.partition(".")
        if not dot:
            return


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match["index"]) if match else None


def _kind_findings(catalog: Catalog, selected: Iterable[Module]) -> list[Finding]:
    findings = []
    for module in selected:
        expected = None
        if module.kind is Kind.OTHER:
            expected = "a Linear, Conv1D or Embedding module"
        elif module.last_name in _COPIED:
            expected = "no target of this name (its full copy in the file is not served yet)"
        elif catalog.model_type in _STATE_SPACE and module.last_name in _STATE_SPACE_TARGETS:
            expected = f"no target of this name in a {catalog.model_type} (PEFT refuses it)"
        if expected is not None:
            findings.append(
                refuse(Check.STRUCTURE, Code.TARGET_KIND, module.name, expected, module.class_name)
            )
    return findings


def _expert_findings(catalog: Catalog, config: LoraConfig) -> list[Finding]:
    fused = any(
        len(shape) == 3 and name in ("gate_up_proj", "down_proj")
        for module in catalog.modules
        for name, shape in module.tensors.items()
    )
    if not fused:
        return []
    expected = "no target that means fused experts (they are not served yet)"
    targets = config.target_modules
    rewritten = (
        [targets]
        if targets == ALL_LINEAR
        else [name for name in targets if name.rpartition(".")[2] in _EXPERT_TARGETS]
    )
    return [_structure(Code.TARGET_KIND, "target_modules", expected, str(t)) for t in rewritten]


def _by_pattern(
    names: Sequence[str],
    patterns: Sequence[tuple[str, float]],
    default: float,
    field: str,
) -> tuple[dict[str, float], list[Finding]]:
    """The value of each module: that of the first pattern that matches it, else the default.

    PEFT matches ``(.*\\.)?(key)$``, where a dot is any character. A key is served only where this
    and the plain reading select the same modules, so that nobody can mean one and get the other.
    """
    values = dict.fromkeys(names, default)
    findings = []
    for key, value in reversed(patterns):
        plain = key.replace("\\.", ".")
        regex = re.compile(key)
        matched = [name for name in names if _matches(regex, len(plain), name)]
        if any(name != plain and not name.endswith("." + plain) for name in matched):
            expected = "a key whose dots match only dots"
            findings.append(_structure(Code.CONFIG_OPTION_UNSUPPORTED, field, expected, key))
        if not matched:
            findings.append(
                _structure(Code.PATTERN_UNUSED, field, "a targeted module for each key", key)
            )
        values.update(dict.fromkeys(matched, value))
    return values, findings[::-1]


def _matches(regex: re.Pattern[str], length: int, name: str) -> bool:
    # Without quantifiers a key has one length, so the regex runs only where it can match.
    if length < len(name) and name[-length - 1] != ".":
        return False
    return regex.fullmatch(name[-length:]) is not None


def _tensors(module: Module, rank: int, dora: bool) -> Iterator[tuple[str, Expectation]]:
    # Sizes are there for every kind but OTHER, which was refused before.
    in_size, out_size = module.in_size or 0, module.out_size or 0
    if module.kind is Kind.EMBEDDING:
        down, up = ".lora_embedding_A", ".lora_embedding_B"
    else:
        down, up = ".lora_A.weight", ".lora_B.weight"
    name = module.name
    yield down, Expectation((rank, in_size), ALLOWED_DTYPES, name, rank, 0)
    yield up, Expectation((out_size, rank), ALLOWED_DTYPES, name, rank, 1)
    if dora:
        yield ".lora_magnitude_vector", Expectation((out_size,), ALLOWED_DTYPES, name, rank, None)


def _unmatched(field: str, name: str) -> Finding:
    return _structure(Code.TARGET_UNKNOWN, field, "the name of at least one module", name)


def _structure(code: Code, field: str, expected: str, got: str) -> Finding:
    return refuse(Check.STRUCTURE, code, f"{_CONFIG}: {field}", expected, got)
