"""Every tensor that an adapter's file must hold, from catalog and config alone.

Names and shapes are those that peft 0.21 writes, checked against it for random configs in
``tests/contract/test_peft_oracle.py``. Another PEFT type would be one more function from a
selection to tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.expressions import NO_MATCHES, Matches, pattern_expression
from registry_service.domain.findings import Check, Code, Finding, refuse, review
from registry_service.domain.peft_config import LoraConfig
from registry_service.domain.peft_fields import Expression
from registry_service.domain.safetensors_header import ALLOWED_DTYPES
from registry_service.domain.selected import Selection, config_finding
from registry_service.domain.selection import select

KEY_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one tensor has to be.

    ``rank_axis`` is the axis that holds the rank, if one does; ``rank`` is 0 where there is none.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    module: str
    rank: int
    rank_axis: int | None


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """Tensors by name, and the factor of B·A and the rank by module; complete without findings.

    A targeted parameter stands under its own name. ``copies`` are base tensors that PEFT may save
    beside the adapter: all of them or none, and none where ``full_tensors``, the tenant's policy,
    is off.
    """

    tensors: Mapping[str, Expectation]
    scaling: Mapping[str, float]
    findings: tuple[Finding, ...]
    copies: Mapping[str, Expectation]
    ranks: Mapping[str, int]
    full_tensors: bool = False


def expected_tensors(
    catalog: Catalog,
    config: LoraConfig,
    matches: Matches = NO_MATCHES,
    *,
    full_tensors: bool = False,
) -> ExpectedTensors:
    """All tensors of an adapter with ``config`` on the base of ``catalog``.

    ``matches`` answers every expression of the config; ``full_tensors`` is the tenant's policy on
    whole modules in an adapter.
    """
    chosen = select(catalog, config, matches)
    findings = chosen.findings
    if not full_tensors:
        findings += [_not_allowed(name) for name in chosen.saved]
    keys = [*(module.name for module in chosen.modules), *_parameter_keys(chosen)]
    ranks, alphas = dict[str, float](), dict[str, float]()
    if (len(config.rank_pattern) + len(config.alpha_pattern)) * len(keys) > limits.PATTERN_MATCHES:
        got = "too many to match"
        findings.append(config_finding(Code.CONFIG_VALUE, "rank_pattern", "fewer patterns", got))
    else:
        ranks = _by_pattern(keys, config, "rank_pattern", matches, findings)
        alphas = _by_pattern(keys, config, "alpha_pattern", matches, findings)
    findings += [f for module in chosen.modules for f in _variant_faults(module, config, ranks)]
    if findings:
        return ExpectedTensors({}, {}, tuple(findings), {}, {})
    root = math.sqrt if config.use_rslora else float
    return ExpectedTensors(
        tensors=dict(_all(catalog, config, chosen, ranks)),
        scaling={key: alphas[key] / root(ranks[key]) for key in keys},
        findings=(),
        copies={
            f"{KEY_PREFIX}{module.name}.base_layer.{key}": _whole(module.name, shape)
            for module in chosen.copied
            for key, shape in module.tensors.items()
        },
        ranks={key: int(ranks[key]) for key in keys},
        full_tensors=full_tensors,
    )


def scaling_check(expected: ExpectedTensors) -> tuple[Finding, ...]:
    """A look at every factor of B·A that is far above what adapters are published with.

    The factor stands in no tensor: ten times the alpha would change nothing else in the file.
    """
    high: dict[float, list[str]] = {}
    for name, factor in expected.scaling.items():
        if factor >= limits.SCALING_REVIEW:
            high.setdefault(factor, []).append(name)
    return tuple(
        review(
            Check.STRUCTURE,
            Code.SCALING_HIGH,
            names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
            f"a factor of B·A below {limits.SCALING_REVIEW:g}",
            f"{factor:g}",
        )
        for factor, names in sorted(high.items())
    )


def _all(
    catalog: Catalog, config: LoraConfig, chosen: Selection, ranks: Mapping[str, float]
) -> Iterator[tuple[str, Expectation]]:
    for module in chosen.modules:
        for suffix, expectation in _on_module(module, int(ranks[module.name]), config):
            yield KEY_PREFIX + module.name + suffix, expectation
    for module, parameters in chosen.parameters:
        for position, parameter in enumerate(parameters):
            # PEFT wraps one parameter after the other, so the last one is outermost.
            wrapped = module.name + ".base_layer" * (len(parameters) - 1 - position)
            rank = int(ranks[f"{module.name}.{parameter}"])
            for suffix, expectation in _on_parameter(module, parameter, rank):
                yield KEY_PREFIX + wrapped + suffix, expectation
    saved = tuple(f"{name}." for name in chosen.saved)
    for module in catalog.modules if saved else ():
        if f"{module.name}.".startswith(saved):
            for key, shape in module.tensors.items():
                yield f"{KEY_PREFIX}{module.name}.{key}", _whole(module.name, shape)
    for rows in chosen.rows:
        sizes = rows.module.in_size or 0, rows.module.out_size or 0
        width = sizes[rows.module.kind is Kind.EMBEDDING]
        name = f"{KEY_PREFIX}{rows.module.name}.token_adapter.trainable_tokens_delta"
        yield name, _whole(rows.module.name, (rows.count, width))


def _on_module(module: Module, rank: int, config: LoraConfig) -> Iterator[tuple[str, Expectation]]:
    # Sizes are there for every kind but OTHER, which was refused before.
    in_size, out_size = module.in_size or 0, module.out_size or 0
    name = module.name
    dora_shape: tuple[int, ...] = (out_size,)
    down, up = ".lora_A.weight", ".lora_B.weight"
    down_shape: tuple[int, ...] = (rank, in_size)
    up_shape: tuple[int, ...] = (out_size, rank)
    if module.kind is Kind.EMBEDDING:
        down, up = ".lora_embedding_A", ".lora_embedding_B"
    elif module.kind is Kind.CONV2D:
        down_shape = (rank, in_size, *module.kernel)
        up_shape = (out_size, rank // module.groups, 1, 1)
        dora_shape = (1, out_size, 1, 1)
    yield down, Expectation(down_shape, ALLOWED_DTYPES, name, rank, 0)
    yield up, Expectation(up_shape, ALLOWED_DTYPES, name, rank, 1)
    if config.lora_bias:
        yield ".lora_B.bias", _whole(name, (out_size,))
    if config.use_dora:
        yield ".lora_magnitude_vector", _whole(name, dora_shape)


def _on_parameter(module: Module, parameter: str, rank: int) -> Iterator[tuple[str, Expectation]]:
    """Layout of peft 0.19 and newer: experts beside each other along the rank."""
    shape = module.tensors[parameter]
    experts, out_size, in_size = shape if len(shape) == 3 else (1, *shape)
    if len(shape) == 3 and module.transposed:
        out_size, in_size = in_size, out_size
    both = rank * experts
    yield ".lora_A.weight", Expectation((both, in_size), ALLOWED_DTYPES, module.name, both, 0)
    yield ".lora_B.weight", Expectation((out_size, both), ALLOWED_DTYPES, module.name, both, 1)


def _whole(module: str, shape: tuple[int, ...]) -> Expectation:
    return Expectation(shape, ALLOWED_DTYPES, module, 0, None)


def _parameter_keys(chosen: Selection) -> list[str]:
    return [f"{m.name}.{parameter}" for m, hit in chosen.parameters for parameter in hit]


def _variant_faults(
    module: Module, config: LoraConfig, ranks: Mapping[str, float]
) -> Iterator[Finding]:
    """What PEFT refuses on one kind of module only."""
    expected = None
    if module.kind is Kind.EMBEDDING and config.lora_bias:
        expected = "no embedding among the targets with lora_bias"
    elif module.kind is Kind.CONV2D and module.groups > 1 and config.use_dora:
        expected = "no grouped convolution among the targets with use_dora"
    elif module.kind is Kind.CONV2D and ranks.get(module.name, 0) % module.groups:
        expected = f"a rank that {module.groups} groups divide"
    if expected is not None:
        yield refuse(Check.STRUCTURE, Code.TARGET_KIND, module.name, expected, module.class_name)


def _not_allowed(name: str) -> Finding:
    expected = "no whole module in an adapter: the tenant's policy full_tensors is off"
    return refuse(Check.STRUCTURE, Code.FULL_TENSOR, name, expected, "a module to save")


def _by_pattern(
    names: Sequence[str],
    config: LoraConfig,
    option: str,
    matches: Matches,
    findings: list[Finding],
) -> dict[str, float]:
    """The value of each module: that of the first pattern that matches it, else the default."""
    ranks = option == "rank_pattern"
    patterns: Sequence[tuple[str | Expression, float]]
    patterns = config.rank_pattern if ranks else config.alpha_pattern
    values = dict.fromkeys(names, config.r if ranks else config.lora_alpha)
    faults = []
    for key, value in reversed(patterns):
        matched = _matched(key, names, matches)
        text = key.text if isinstance(key, Expression) else key
        if matched is None:
            expected = "a key whose dots match only dots"
            faults.append(config_finding(Code.CONFIG_OPTION_UNSUPPORTED, option, expected, text))
        elif not matched:
            expected = "a targeted module for each key"
            faults.append(config_finding(Code.PATTERN_UNUSED, option, expected, text))
        values.update(dict.fromkeys(matched or (), value))
    findings += faults[::-1]
    return values


def _matched(key: str | Expression, names: Sequence[str], matches: Matches) -> list[str] | None:
    """The names that PEFT's ``(.*\\.)?(key)$`` matches.

    In a key without quantifiers only the dot can be read two ways. Such a key is served only where
    both readings select the same modules, so that nobody can mean one and get the other; else None.
    """
    if isinstance(key, Expression):
        hit = matches[pattern_expression(key)]
        return [name for name in names if name in hit]
    plain = key.replace("\\.", ".")
    regex = re.compile(key)
    matched = [name for name in names if _ends_with(regex, len(plain), name)]
    if any(name != plain and not name.endswith("." + plain) for name in matched):
        return None
    return matched


def _ends_with(regex: re.Pattern[str], length: int, name: str) -> bool:
    # Without quantifiers a key has one length, so the regex runs only where it can match.
    if length < len(name) and name[-length - 1] != ".":
        return False
    return regex.fullmatch(name[-length:]) is not None
