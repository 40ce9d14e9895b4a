"""What a config adds to a file beside LoRA: modules saved whole, embedding rows, base copies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from registry_service.domain.catalog import Catalog, Kind, Module
from registry_service.domain.findings import Code, Finding
from registry_service.domain.peft_config import LoraConfig
from registry_service.domain.peft_fields import Expression
from registry_service.domain.selected import (
    Rows,
    Selection,
    config_finding,
    kind_finding,
    unmatched,
)

# PEFT saves a full copy of the base's tensor beside an adapter on a module of these names.
_EMBEDDINGS: Final = ("embed_tokens", "lm_head")
# Modules that PEFT adds under a targeted one; "default" is the adapter's usual name.
_PEFT_NAMES: Final = (
    *("base_layer", "default", "lora_A", "lora_B", "lora_dropout", "lora_embedding_A"),
    *("lora_embedding_B", "lora_magnitude_vector", "lora_variant"),
)
_CONTAINERS: Final = frozenset({"ModuleList", "ModuleDict", "ParameterList", "ParameterDict"})
# The heads that a task type adds to modules_to_save, and the names all-linear leaves out for it.
HEADS: Final = {
    "SEQ_CLS": ("score", "classifier"),
    "TOKEN_CLS": ("score", "classifier"),
    "QUESTION_ANS": ("qa_outputs",),
}


class SavedModules:
    """``modules_to_save`` with the heads that the task type adds.

    PEFT saves a module whose whole name ends with an entry, with or without a dot between: an
    entry ``classifier`` also saves ``pre_classifier``. It hides from the targets what an entry
    names as a part of a name, read as an expression in which only the dot is special.
    """

    def __init__(self, catalog: Catalog, config: LoraConfig) -> None:
        self._config = config
        self._catalog = catalog
        self.heads = HEADS.get(config.task_type or "", ())
        self.entries = tuple(dict.fromkeys((*config.modules_to_save, *self.heads)))
        # Names hold no character that is special to an expression but the dot: this cannot blow up.
        self._hidden = [re.compile(rf"(^|.*\.){entry}($|\..*)") for entry in self.entries]

    def hides(self, name: str) -> bool:
        """True when PEFT lets no target reach the module of this name."""
        return any(hidden.match(name) for hidden in self._hidden)

    def add(self, chosen: Selection) -> None:
        """Add the saved modules to ``chosen``."""
        if not self.entries:
            return
        unused = set(self.entries)
        for name in (*(m.name for m in self._catalog.modules), *self._catalog.aliases):
            hits = [entry for entry in self.entries if name.endswith(entry)]
            unused.difference_update(hits)
            if hits:
                chosen.saved.append(name)
        chosen.findings += [*self._unmatched(unused), *self._own_names(), *self._faults(chosen)]

    def _unmatched(self, unused: set[str]) -> Iterator[Finding]:
        for entry in sorted(unused.difference(self.heads)):
            yield unmatched("modules_to_save", entry)
        if self.heads and unused.issuperset(self.heads):
            expected = f"a base with a module {' or '.join(self.heads)}"
            got = f"{self._config.task_type} on a {self._catalog.model_class}"
            yield config_finding(Code.TARGET_UNKNOWN, "task_type", expected, got)

    def _own_names(self) -> Iterator[Finding]:
        """An entry that also ends a name which PEFT itself puts into the model."""
        for entry in self._config.modules_to_save:
            if any(name.endswith(entry) for name in _PEFT_NAMES):
                expected = "an entry that names no module of PEFT's own; write more of the name"
                yield config_finding(
                    Code.CONFIG_OPTION_UNSUPPORTED, "modules_to_save", expected, entry
                )

    def _faults(self, chosen: Selection) -> Iterator[Finding]:
        classes = {module.name: module.class_name for module in self._catalog.modules}
        whole = set(chosen.saved)
        for name in chosen.saved:
            if name in self._catalog.aliases:
                yield kind_finding(name, "a module of one name", "a second name of another")
            elif classes[name] in _CONTAINERS:
                yield kind_finding(name, "a module that PEFT can wrap", classes[name])
            if not whole.isdisjoint(parents(name)):
                yield kind_finding(name, "saved modules that do not hold each other", name)
        touched = (*chosen.modules, *(module for module, _ in chosen.parameters))
        for module in touched:
            if module.name in whole or not whole.isdisjoint(parents(module.name)):
                yield kind_finding(module.name, "a target or a saved module", "both")
        explicit = frozenset(self._config.modules_to_save)
        if self._config.task_type in ("TOKEN_CLS", "QUESTION_ANS") and not explicit >= {
            *self.heads
        }:
            # PEFT adds these heads after it has placed the adapter, so a target may hit one.
            expected = f"{', '.join(self.heads)} written out, as PEFT saves them"
            yield config_finding(Code.CONFIG_VALUE, "modules_to_save", expected, "not all of them")


def parents(name: str) -> Iterator[str]:
    """All names that hold ``name``, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def rows_add(chosen: Selection, catalog: Catalog, config: LoraConfig, saved: SavedModules) -> None:
    """Add the rows of ``trainable_token_indices``, and what is wrong with them."""
    taken = {m.name for m in chosen.modules} | {m.name for m, _ in chosen.parameters}
    by_name = {module.name: module for module in catalog.modules}
    for entry, rows in config.trainable_token_indices:
        name = catalog.input_embedding if entry is None else entry
        hits = [n for n in (*by_name, *catalog.aliases) if name and n.endswith(name)]
        if not hits:
            chosen.findings.append(unmatched("trainable_token_indices", str(name)))
        for hit in hits:
            fault = _row_fault(catalog, by_name.get(hit), hit, max(rows))
            if hit in taken or not taken.isdisjoint(catalog.tied_modules):
                fault = "an embedding that is no target, with or through a tied head"
            elif any(hit.endswith(other) for other in saved.entries):
                fault = "an embedding that is not among modules_to_save"
            if fault is not None:
                chosen.findings.append(kind_finding(hit, fault, f"rows up to {max(rows)}"))
            else:
                chosen.rows.append(Rows(by_name[hit], len(rows)))
    names = [row.module.name for row in chosen.rows]
    if len(set(names)) != len(names):
        expected = "each embedding once"
        option = "trainable_token_indices"
        chosen.findings.append(config_finding(Code.CONFIG_VALUE, option, expected, "twice"))


def _row_fault(catalog: Catalog, module: Module | None, name: str, last: int) -> str | None:
    if module is None:
        return f"the first name of this module, {catalog.aliases[name]}"
    if name in catalog.tied_modules:
        return f"the input embedding {catalog.input_embedding}, which this one is tied to"
    if module.kind is Kind.EMBEDDING:
        count = module.in_size or 0
    elif module.kind is Kind.LINEAR and name == catalog.output_embedding:
        count = module.out_size or 0
    else:
        return "an embedding"
    return None if last < count else f"rows from 0 to {count - 1}"


def copied_add(
    chosen: Selection, catalog: Catalog, config: LoraConfig, targets: frozenset[str]
) -> None:
    """Add the embeddings whose base tensors PEFT saves beside their adapter.

    ``targets`` are the names of a list, or what the expression matches: PEFT looks for the bare
    names in the list, or for whole names that the expression matches.
    """
    if config.trainable_token_indices:
        return
    if isinstance(config.target_modules, Expression):
        meant = any(name.rpartition(".")[2] in _EMBEDDINGS for name in targets)
    else:
        meant = not targets.isdisjoint(_EMBEDDINGS)
    ends = {catalog.input_embedding, catalog.output_embedding}
    if meant:
        chosen.copied += [
            module
            for module in chosen.modules
            if module.name in ends and module.kind in (Kind.LINEAR, Kind.EMBEDDING)
        ]
