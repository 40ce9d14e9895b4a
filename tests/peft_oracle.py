"""PEFT itself as the oracle: what it would save for a config, on meta; and random configs."""

from __future__ import annotations

import copy
import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import peft

from registry_service.domain.catalog import Catalog, Kind
from registry_service.domain.expected_tensors import KEY_PREFIX, ExpectedTensors, expected_tensors
from registry_service.domain.expressions import Matches, matches_of
from registry_service.domain.findings import Code, Finding
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.rewrites import REWRITTEN_TYPES

# What PEFT does without a word where the registry wants it said: a stricter refusal, by name.
STRICTER: Final = frozenset({Code.TARGET_UNKNOWN, Code.PATTERN_UNUSED, Code.TARGET_KIND})
"""A target, exclusion, layer or pattern that hits nothing; a module on which an adapter does
nothing; a target that PEFT rewrites; tensors that it renames by wrapping around them."""


@dataclass(frozen=True)
class Saved:
    """What PEFT would write: shapes by name, and the factor of B·A by module."""

    shapes: dict[str, tuple[int, ...]]
    scaling: dict[str, float]


def here(expressions: Sequence[str], names: Sequence[str]) -> Matches:
    """A matcher in this process: a test's expressions are its own."""
    return {e: frozenset(n for n in names if re.fullmatch(e, n)) for e in expressions}


def config_bytes(options: dict[str, Any]) -> bytes:
    """The bytes that PEFT itself writes for a config, sets as sorted lists."""
    fields = peft.LoraConfig(**copy.deepcopy(options)).to_dict()
    for key, value in fields.items():
        if isinstance(value, set):
            fields[key] = sorted(value)
    return json.dumps(fields, indent=2, sort_keys=True, default=str).encode()


def ours(catalog: Catalog, content: bytes) -> tuple[ExpectedTensors | None, tuple[Finding, ...]]:
    """The expected tensors of a tenant whose policy allows everything, or the findings."""
    config, findings = peft_config_parse(content)
    if config is None:
        return None, findings
    matches = matches_of(catalog, config, here)
    expected = expected_tensors(catalog, config, matches, full_tensors=True)
    return (None, expected.findings) if expected.findings else (expected, ())


def pefts(model: Any, content: bytes) -> Saved:
    """What PEFT saves when the adapter of this config is put on the meta model ``model``."""
    options = json.loads(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placed = peft.get_peft_model(model, peft.LoraConfig(**options), low_cpu_mem_usage=True)
        state = peft.get_peft_model_state_dict(placed)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return Saved(shapes, dict(_scaling(placed)))


def _scaling(placed: Any) -> list[tuple[str, float]]:
    found = []
    for name, module in placed.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            plain = name.removeprefix(KEY_PREFIX).replace(".base_layer", "")
            parameter = getattr(module, "parameter_name", None)
            key = f"{plain}.{parameter}" if parameter else plain
            found.append((key, float(module.scaling["default"])))
    return found


def equal(expected: ExpectedTensors, saved: Saved) -> bool:
    """True when names, shapes and scaling are the same; copies count as saved."""
    every = {**expected.tensors, **expected.copies}
    close = expected.scaling.keys() == saved.scaling.keys() and all(
        abs(expected.scaling[name] - value) <= 1e-9 * abs(value)
        for name, value in saved.scaling.items()
    )
    return close and {name: e.shape for name, e in every.items()} == saved.shapes


@dataclass
class Draw:
    """Random but sensible options for one base; every kind of option comes up."""

    catalog: Catalog
    rng: random.Random
    linear: list[str] = field(init=False)
    embeddings: list[str] = field(init=False)
    parameters: list[str] = field(init=False)
    whole: float = field(init=False)

    def __post_init__(self) -> None:
        modules = self.catalog.modules
        rewritten = ("gate", "gate_proj", "up_proj", "down_proj")
        fused = self.catalog.model_type in REWRITTEN_TYPES
        self.linear = [
            m.name
            for m in modules
            if m.kind in (Kind.LINEAR, Kind.CONV1D, Kind.CONV2D)
            and m.name != self.catalog.output_embedding
            and not (fused and m.last_name in rewritten)
            and m.last_name not in ("score", "classifier", "pre_classifier")
        ]
        # PEFT rewrites all-linear where experts are fused: refused by name, so drawn less often.
        self.whole = 0.2 if fused else 1.0
        self.embeddings = [m.name for m in modules if m.kind is Kind.EMBEDDING]
        self.parameters = [
            f"{m.name}.{p}" for m in modules for p in m.parameters if len(m.tensors[p]) == 3
        ]

    def _chance(self, share: float) -> bool:
        return self.rng.random() < share

    def options(self) -> dict[str, Any]:
        """Keyword arguments of a ``LoraConfig``."""
        rng = self.rng
        options: dict[str, Any] = {
            "r": rng.choice([1, 2, 3, 4, 8]),
            "lora_alpha": rng.choice([1, 4, 8, 16, 5]),
            "task_type": self._task(),
            "lora_dropout": rng.choice([0.0, 0.05]),
            "use_rslora": self._chance(0.2),
            "use_dora": self._chance(0.2),
            "init_lora_weights": rng.choice([True, True, False, "gaussian"]),
        }
        self._targets(options)
        steps: list[tuple[float, Callable[[dict[str, Any]], None]]] = [
            (0.3, self._layers),
            (0.25, self._patterns),
            (0.15, self._exclude),
            (0.1, self._bias),
            (0.3, self._experts),
            (0.12, self._tokens),
            (0.12, self._saved),
        ]
        for share, step in steps:
            if self._chance(share):
                step(options)
        return options

    def _task(self) -> str | None:
        name = self.catalog.model_class
        if name.endswith("SequenceClassification"):
            # Now and then a task that PEFT does not take for the class.
            return "CAUSAL_LM" if self._chance(0.05) else "SEQ_CLS"
        return self.rng.choice(["SEQ_2_SEQ_LM" if name.startswith("T5") else "CAUSAL_LM", None])

    def _endings(self, names: list[str], count: int) -> list[str]:
        """Distinct endings of some names: the last part, the last two, or all of it."""
        found = set()
        for name in self.rng.sample(names, min(count, len(names))):
            parts = name.split(".")
            found.add(".".join(parts[-self.rng.choice([1, 1, 1, 2, len(parts)]) :]))
        return sorted(found)

    def _targets(self, options: dict[str, Any]) -> None:
        kind = self.rng.random()
        if kind < 0.15 * self.whole:
            options["target_modules"] = "all-linear"
        elif kind < 0.3:
            lasts = sorted({name.rpartition(".")[2] for name in self.linear})
            chosen = self.rng.sample(lasts, min(2, len(lasts)))
            whole = re.escape(self.rng.choice(self.linear))
            options["target_modules"] = self.rng.choice(
                [rf".*\.({'|'.join(chosen)})"] * 3 + [whole]
            )
        else:
            options["target_modules"] = self._endings(self.linear, self.rng.randint(1, 4))
            if self._chance(0.2) and self.embeddings:
                options["target_modules"] += self._endings(self.embeddings, 1)
            if self._chance(0.05) and self.catalog.output_embedding:
                options["target_modules"] += [self.catalog.output_embedding]
            options["target_modules"] = sorted(set(options["target_modules"]))

    def _layers(self, options: dict[str, Any]) -> None:
        targets = options["target_modules"]
        if isinstance(targets, str) or not all("." not in name for name in targets):
            return
        options["layers_to_transform"] = self.rng.choice([0, 1, [0, 1], [1]])
        if self._chance(0.5):
            names = {part for name in self.linear for part in re.findall(r"(\w+)\.\d+\.", name)}
            options["layers_pattern"] = self.rng.choice([sorted(names), self.rng.choice([*names])])

    def _selected(self, options: dict[str, Any]) -> list[str]:
        targets = options["target_modules"]
        if isinstance(targets, str):
            return [n for n in self.linear if targets == "all-linear" or re.fullmatch(targets, n)]
        endings = tuple(f".{name}" for name in targets)
        return [n for n in self.linear if n in targets or n.endswith(endings)]

    def _patterns(self, options: dict[str, Any]) -> None:
        selected = self._selected(options)
        for option, values in (("rank_pattern", [1, 2, 6]), ("alpha_pattern", [2, 7, 32])):
            if not selected or not self._chance(0.7):
                continue
            patterns = {}
            for ending in self._endings(selected, self.rng.randint(1, 2)):
                whole = next(name for name in selected if f".{name}".endswith(f".{ending}"))
                forms = [ending, ending.replace(".", "\\."), f"^{whole}$", rf".*{ending}"]
                patterns[self.rng.choice(forms)] = self.rng.choice(values)
            options[option] = patterns

    def _exclude(self, options: dict[str, Any]) -> None:
        selected = self._selected(options)
        if len(selected) < 2:
            return
        name = self.rng.choice(selected)
        options["exclude_modules"] = self.rng.choice([[name], rf".*{re.escape(name)}"])

    def _bias(self, options: dict[str, Any]) -> None:
        if not options["use_dora"] and isinstance(options["init_lora_weights"], bool):
            options["lora_bias"] = True

    def _experts(self, options: dict[str, Any]) -> None:
        if not self.parameters:
            return
        lasts = sorted({name.rpartition(".")[2] for name in self.parameters})
        options["target_parameters"] = self.rng.sample(lasts, self.rng.randint(1, len(lasts)))
        options.update(lora_dropout=0.0, use_dora=False, lora_bias=False)
        if self._chance(0.5):
            options["rank_pattern"] = {rf".*\.{options['target_parameters'][0]}": 2}

    def _tokens(self, options: dict[str, Any]) -> None:
        name = self.catalog.input_embedding
        rows = self.rng.sample(range(32), self.rng.randint(1, 5))
        last = str(name).rpartition(".")[2]
        options["trainable_token_indices"] = self.rng.choice([rows, {name: rows}, {last: rows}])

    def _saved(self, options: dict[str, Any]) -> None:
        norms = sorted({m.last_name for m in self.catalog.modules if "norm" in m.last_name.lower()})
        if norms:
            options["modules_to_save"] = [self.rng.choice(norms)]
