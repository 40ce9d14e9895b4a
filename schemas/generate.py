"""Writes the JSON Schemas in this folder and ``docs/lifecycle.md`` from the code they describe.

``python -m schemas.generate`` writes; with ``--check`` it writes nothing and ends with 1 when a
file differs from what it would write, or ``docs/findings.md``, which people write, does not explain
each code in its place.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from registry_service.domain import wire, wire_statements
from registry_service.domain.declaration import Declaration
from registry_service.domain.findings import Code
from registry_service.domain.lifecycle import TRANSITIONS, State

ROOT: Final = Path(__file__).resolve().parent.parent
_ID: Final = "urn:adapter-registry:schema:"

MODELS: Final[dict[str, type[BaseModel]]] = {
    "alias": wire.Alias,
    "alias-move": wire.AliasMove,
    "artifact": wire.Artifact,
    "base": wire.Base,
    "base-statement": wire_statements.BaseStatement,
    "declaration": Declaration,
    "feed-event": wire.FeedEvent,
    "finding": wire.Finding,
    "grant": wire.Grant,
    "job": wire.Job,
    "node": wire.Node,
    "problem": wire.Problem,
    "report": wire.Report,
    "resolution": wire.Resolution,
    "revocation": wire.Revocation,
    "revocation-list": wire.RevocationList,
    "review": wire.Review,
    "tenant": wire.Tenant,
    "token": wire.Token,
    "verdict-statement": wire_statements.VerdictStatement,
}
# Left out where there are none, although a model's dump would always write them.
_OPTIONAL: Final = frozenset({"findings"})
_PARTS: Final = ("- How it happens: ", "- What to do: ")


def schema_text(name: str) -> str:
    """The JSON Schema of one document, as its file holds it."""
    schema = MODELS[name].model_json_schema(by_alias=True, mode="serialization")
    for part in (schema, *schema.get("$defs", {}).values()):
        _all_required(part, optional=_OPTIONAL if name == "problem" else frozenset())
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": _ID + name}
    return json.dumps({**head, **schema}, indent=2, ensure_ascii=False) + "\n"


def _all_required(part: dict[str, Any], *, optional: frozenset[str]) -> None:
    """A document says everything: defaults serve those who build one, and titles say nothing."""
    if "properties" not in part:
        return
    part["required"] = [field for field in part["properties"] if field not in optional]
    for value in part["properties"].values():
        value.pop("title", None)
        value.pop("default", None)


def lifecycle_text() -> str:
    """The page with the picture and the table of an artifact's life."""
    lines = [
        "# Life of an artifact",
        "",
        "Made by `python -m schemas.generate` from `registry_service/domain/lifecycle.py`; "
        "do not edit.",
        "What is not in the table is refused, by the domain and by the database.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        f"    [*] --> {State.NEW}",
    ]
    lines += [f"    {old} --> {new} : {event}" for (old, event), new in TRANSITIONS.items()]
    ends = {*TRANSITIONS.values()} - {old for old, _ in TRANSITIONS}
    lines += [f"    {state} --> [*]" for state in sorted(ends)]
    lines += ["```", "", "| from | event | to |", "| --- | --- | --- |"]
    lines += [f"| {old} | {event} | {new} |" for (old, event), new in TRANSITIONS.items()]
    return "\n".join([*lines, ""])


def findings_page_faults(page: str) -> list[str]:
    """What is wrong with the page that explains the codes; empty when all is well.

    Each code has a section of its own, in the order of the code, with how it happens and what to
    do about it.
    """
    _, *sections = re.split(r"^### ", page, flags=re.MULTILINE)
    explained = [section.partition("\n")[0] for section in sections]
    known = [code.value for code in Code]
    faults = [f"{code}: not explained" for code in known if code not in explained]
    faults += [f"{code}: no such code" for code in explained if code not in known]
    if not faults and explained != known:
        code = next(
            (there for there, wanted in zip(explained, known, strict=False) if there != wanted),
            explained[-1],
        )
        faults.append(f"{code}: out of order, or twice; the order is that of domain/findings.py")
    for code, section in zip(explained, sections, strict=True):
        faults += [f"{code}: no '{part}'" for part in _PARTS if section.count(part) != 1]
    return faults


def outputs() -> dict[Path, str]:
    """Every generated file with its text."""
    files = {ROOT / "schemas" / f"{name}.json": schema_text(name) for name in MODELS}
    files[ROOT / "docs" / "lifecycle.md"] = lifecycle_text()
    return files


def drifted() -> list[Path]:
    """Generated files that are missing, differ, or that nothing makes any more."""
    files = outputs()
    differing = [
        path
        for path, text in files.items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    return sorted([*differing, *(set((ROOT / "schemas").glob("*.json")) - files.keys())])


def main(arguments: list[str] | None = None) -> int:
    """Write, or compare; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m schemas.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; 1 on a difference")
    if parser.parse_args(arguments).check:
        stale = drifted()
        for path in stale:
            sys.stderr.write(f"{path.relative_to(ROOT)}: run 'make schemas'\n")
        faults = findings_page_faults((ROOT / "docs" / "findings.md").read_text("utf-8"))
        for fault in faults:
            sys.stderr.write(f"docs/findings.md: {fault}\n")
        return 1 if stale or faults else 0
    for path, text in outputs().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
