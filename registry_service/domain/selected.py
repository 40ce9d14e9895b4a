"""What of a base an adapter's config selects, and how a selection says what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from registry_service.domain.catalog import Module
from registry_service.domain.findings import Check, Code, Finding, refuse

_CONFIG: Final = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one embedding that the adapter replaces."""

    module: Module
    count: int


@dataclass(slots=True)
class Selection:
    """What the config selects; of no use when there are findings.

    ``parameters`` are the targeted parameters of a module in its order, which is that of PEFT's
    nesting. ``saved`` are names of modules whose tensors the file holds whole.
    """

    modules: list[Module] = field(default_factory=list)
    parameters: list[tuple[Module, list[str]]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    copied: list[Module] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def config_finding(code: Code, option: str, expected: str, got: str) -> Finding:
    """A refusal of check 5 that points at an option of the config."""
    return refuse(Check.STRUCTURE, code, f"{_CONFIG}: {option}", expected, got)


def kind_finding(where: str, expected: str, got: str) -> Finding:
    """A refusal of check 5: a target that an adapter cannot be put on."""
    return refuse(Check.STRUCTURE, Code.TARGET_KIND, where, expected, got)


def unmatched(option: str, name: str) -> Finding:
    """A refusal of check 5: a name in the config that no module has."""
    what = "parameter" if option == "target_parameters" else "module"
    return config_finding(Code.TARGET_UNKNOWN, option, f"the name of at least one {what}", name)
