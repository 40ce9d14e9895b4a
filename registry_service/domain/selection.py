"""What of a base an adapter's config selects: modules, parameters, modules saved whole, rows.

The rules are those of peft 0.21, checked against it in ``tests/contract/test_peft_oracle.py``. What
PEFT does silently (a target that matches nothing, a name that means two things, a rewritten list)
is a finding here, and a selection with findings is of no use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from registry_service.domain.catalog import Catalog, Kind
from registry_service.domain.expressions import Matches
from registry_service.domain.extra_tensors import (
    HEADS,
    SavedModules,
    copied_add,
    parents,
    rows_add,
)
from registry_service.domain.findings import Check, Code, refuse
from registry_service.domain.peft_config import LoraConfig
from registry_service.domain.peft_fields import ALL_LINEAR, Expression
from registry_service.domain.rewrites import default_finding, rewritten_findings, task_findings
from registry_service.domain.selected import Selection, kind_finding, unmatched

# PEFT refuses these on a state-space model: its kernels bypass their forward.
_STATE_SPACE: Final = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
_STATE_SPACE_TARGETS: Final = frozenset({"out_proj", "conv1d"})
_LAYER: Final = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")


def select(catalog: Catalog, config: LoraConfig, matches: Matches) -> Selection:
    """Everything that ``config`` selects in ``catalog``; ``matches`` answers its expressions."""
    chosen = Selection()
    if config.target_modules is None:
        chosen.findings.append(default_finding(catalog))
        return chosen
    chosen.findings += task_findings(catalog, config)
    targets = _targets(catalog, config, matches)
    chosen.findings += rewritten_findings(catalog, config, targets)
    saved = SavedModules(catalog, config)
    excluded = _names(config.exclude_modules, matches)
    _modules(chosen, catalog, config, targets, excluded, saved)
    _kinds(chosen, catalog)
    _parameters(chosen, catalog, config)
    saved.add(chosen)
    rows_add(chosen, catalog, config, saved)
    _nested(chosen)
    copied_add(chosen, catalog, config, targets)
    return chosen


def _modules(
    chosen: Selection,
    catalog: Catalog,
    config: LoraConfig,
    targets: frozenset[str],
    excluded: frozenset[str],
    saved: SavedModules,
) -> None:
    """The targeted modules, and what in the selection matches nothing."""
    # To PEFT all-linear is the list of those modules' whole names.
    by_ending = not isinstance(config.target_modules, Expression)
    ends_excluded = not isinstance(config.exclude_modules, Expression)
    layers = _Layers(config)
    unused_targets, unused_excludes = set(targets), set(excluded)
    for module in catalog.modules:
        endings = list(_endings(module.name))
        banned = endings if ends_excluded else [module.name]
        if not excluded.isdisjoint(banned):
            unused_excludes.difference_update(banned)
            continue
        hits = [e for e in endings if e in targets] if by_ending else [module.name]
        if not hits or (not by_ending and module.name not in targets) or saved.hides(module.name):
            continue
        if by_ending and module.name not in targets and not layers.take(module.name):
            continue
        unused_targets.difference_update(hits)
        chosen.modules.append(module)
    if not isinstance(config.target_modules, tuple):
        unused_targets = set() if chosen.modules else {_shown(config.target_modules)}
    if not ends_excluded:
        used = len(unused_excludes) < len(excluded)
        unused_excludes = set() if used else {_shown(config.exclude_modules)}
    chosen.findings += [
        *(unmatched("target_modules", name) for name in sorted(unused_targets)),
        *(unmatched("exclude_modules", name) for name in sorted(unused_excludes)),
        *(unmatched("layers_to_transform", str(layer)) for layer in sorted(layers.unused)),
    ]


def _targets(catalog: Catalog, config: LoraConfig, matches: Matches) -> frozenset[str]:
    if config.target_modules != ALL_LINEAR:
        return _names(config.target_modules, matches)
    left_out = catalog.output_embedding
    if left_out is None and config.task_type == "SEQ_CLS":
        # PEFT looks for an attribute of the model itself, in this order.
        names = {module.name for module in catalog.modules}
        left_out = next((head for head in HEADS["SEQ_CLS"] if head in names), None)
    return frozenset(
        module.name
        for module in catalog.modules
        # PEFT puts an adapter on an inert one too, which is refused with the others of its kind.
        if module.kind in (Kind.LINEAR, Kind.CONV1D, Kind.INERT) and module.name != left_out
    )


def _names(option: object, matches: Matches) -> frozenset[str]:
    if isinstance(option, Expression):
        return matches[option.text]
    return frozenset(option) if isinstance(option, tuple) else frozenset()


def _shown(option: object) -> str:
    return option.text if isinstance(option, Expression) else str(option)


def _endings(name: str) -> Iterator[str]:
    """``a.b.c``, ``b.c``, ``c``: what a name in a list may say to select this module."""
    while True:
        yield name
        _, dot, name = name.partition(".")
        if not dot:
            return


class _Layers:
    """``layers_to_transform``: the first number in a name, behind a listed name if any is."""

    def __init__(self, config: LoraConfig) -> None:
        self._wanted = frozenset(config.layers_to_transform)
        self._patterns = [
            re.compile(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.") for name in config.layers_pattern
        ] or [_LAYER]
        self.unused = set(self._wanted)

    def take(self, name: str) -> bool:
        if not self._wanted:
            return True
        found = (pattern.match(name) for pattern in self._patterns)
        match = next((match for match in found if match is not None), None)
        if match is None or int(match["index"]) not in self._wanted:
            return False
        self.unused.discard(int(match["index"]))
        return True


def _kinds(chosen: Selection, catalog: Catalog) -> None:
    for module in chosen.modules:
        expected = None
        if module.kind is Kind.OTHER:
            expected = "a Linear, Conv1D, Conv2d or Embedding module"
        elif module.kind is Kind.INERT:
            expected = "a module that is called: its attention reads the weights alone; exclude it"
        elif catalog.model_type in _STATE_SPACE and module.last_name in _STATE_SPACE_TARGETS:
            expected = f"no target of this name in a {catalog.model_type} (PEFT refuses it)"
        if expected is not None:
            chosen.findings.append(
                refuse(Check.STRUCTURE, Code.TARGET_KIND, module.name, expected, module.class_name)
            )


def _parameters(chosen: Selection, catalog: Catalog, config: LoraConfig) -> None:
    targets = frozenset(config.target_parameters)
    unused = set(targets)
    selected = {module.name for module in chosen.modules}
    for module in catalog.modules if targets else ():
        hit = []
        for parameter in module.parameters:
            endings = targets.intersection(_endings(f"{module.name}.{parameter}"))
            unused -= endings
            if endings:
                hit.append(parameter)
        for parameter in hit:
            if len(module.tensors[parameter]) not in (2, 3):
                expected, got = "a parameter of two or three sizes", str(module.tensors[parameter])
                chosen.findings.append(kind_finding(f"{module.name}.{parameter}", expected, got))
        if hit and module.name in selected:
            expected = "a module in target_modules or its parameter in target_parameters"
            chosen.findings.append(kind_finding(module.name, expected, "both"))
        if hit:
            chosen.parameters.append((module, hit))
    chosen.findings += [unmatched("target_parameters", name) for name in sorted(unused)]


def _nested(chosen: Selection) -> None:
    """A wrapped parameter renames all that lies inside of its module: nothing there is served."""
    wrapped = {module.name for module, _ in chosen.parameters}
    inner = (*chosen.modules, *(row.module for row in chosen.rows))
    for name in (*(module.name for module in inner), *wrapped, *chosen.saved):
        if not wrapped.isdisjoint(parents(name)):
            expected = "nothing selected inside of a module that target_parameters selects"
            chosen.findings.append(kind_finding(name, expected, "both"))
