"""Single changes of a saved adapter, each with what has to come of it.

A kind is applied where it makes sense for the adapter at hand and left out elsewhere. ``REFUSED``
kinds carry the codes of which one at least has to be found.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import sample_adapter as sample

from registry_service.domain.catalog import Catalog
from registry_service.domain.findings import Finding
from registry_service.domain.verification import static_check

PREFIX: Final = "base_model.model."
_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1, "BOOL": 1}

Shape = tuple[int, ...]


@dataclass
class Adapter:
    """An adapter's static side: tensors by name in file order, config, declaration, base."""

    tensors: dict[str, tuple[str, Shape]]
    config: dict[str, Any]
    catalog: Catalog
    others: Mapping[str, Catalog]
    metadata: dict[str, Any] = field(default_factory=lambda: {"format": "pt"})
    declared: dict[str, Any] = field(default_factory=dict)
    full_tensors: bool = False
    fill: int = 0
    raw_config: bytes | None = None
    raw_header: Callable[[bytes, bytes], tuple[bytes, bytes]] | None = None

    def copy(self) -> Adapter:
        """The same adapter, to be changed."""
        return copy.deepcopy(self)

    def files(self) -> dict[str, bytes]:
        """The files as bytes; tensor data are ``fill``, which no static check reads."""
        entries: dict[str, Any] = {"__metadata__": self.metadata}
        at = 0
        for name, (dtype, shape) in self.tensors.items():
            size = _BYTES[dtype]
            for dimension in shape:
                size *= dimension
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        header, data = json.dumps(entries).encode(), bytes([self.fill]) * at
        if self.raw_header is not None:
            header, data = self.raw_header(header, data)
        targets = self.config.get("target_modules") or []
        return {
            sample.WEIGHTS: sample.raw(header, data),
            sample.CONFIG: self.raw_config or json.dumps(self.config).encode(),
            sample.DECLARATION: json.dumps(
                sample.declaration(
                    **{
                        "rank": self.config["r"],
                        "alpha": self.config["lora_alpha"],
                        "targetModules": targets if isinstance(targets, str) else sorted(targets),
                        "baseModelDigest": self.catalog.base_digest,
                        **self.declared,
                    }
                )
            ).encode(),
        }

    def check(self, matcher: Any) -> tuple[Finding, ...]:
        """The static checks' findings."""
        inputs = sample.inputs(self.files(), catalog=self.catalog, full_tensors=self.full_tensors)
        return static_check(inputs, None, matcher).findings

    # What mutations pick their victims from.

    def lora(self, ending: str) -> str | None:
        """The first key with this ending."""
        return next((name for name in self.tensors if name.endswith(ending)), None)

    def pair(self) -> tuple[str, str]:
        """A first factor and its second."""
        down = self.lora(".lora_A.weight") or self.lora(".lora_embedding_A") or ""
        return down, down.replace("_A", "_B")

    def rename(self, change: Callable[[str], str]) -> bool:
        """Rename all keys; True when one is new."""
        renamed = {change(name): value for name, value in self.tensors.items()}
        changed = renamed.keys() != self.tensors.keys()
        self.tensors = renamed
        return changed

    def reshape(self, name: str | None, change: Callable[[Shape], Shape]) -> bool:
        """Give one tensor another shape; True when it is another."""
        if name is None or name not in self.tensors:
            return False
        dtype, shape = self.tensors[name]
        self.tensors[name] = (dtype, change(shape))
        return change(shape) != shape


# A change in place; False where it does not apply.
Change = Callable[[Adapter], bool]


@dataclass(frozen=True)
class Mutation:
    """One kind of change: its name, the change, and the codes of a refusal, if one is due."""

    name: str
    change: Change
    codes: frozenset[str] = frozenset()


def kinds(table: Mapping[str, tuple[Change, str]]) -> list[Mutation]:
    return [
        Mutation(name, change, frozenset(codes.split())) for name, (change, codes) in table.items()
    ]


def applied(kinds: list[Mutation], adapter: Adapter) -> Iterator[tuple[Mutation, Adapter]]:
    """Each kind that applies, with the changed adapter."""
    for kind in kinds:
        changed = adapter.copy()
        if kind.change(changed):
            yield kind, changed
