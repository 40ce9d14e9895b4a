"""``adapterctl audit``: what happened, in order."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import typer

from cli.connection import connection_of
from cli.options import AsJson
from cli.output import json_print, moment, short, table_print
from cli.reference import artifact_find, reference_parse

_SHOWN: Final = ("generation", "epoch", "node", "reason")
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")

app = typer.Typer(no_args_is_help=True, help="What happened, in order.")


@app.command("list")
def audit_list(
    context: typer.Context,
    adapter: Annotated[
        str | None,
        typer.Argument(help="TENANT, or an artifact: TENANT/ADAPTER:NAME or …@sha256:…."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The audit trail, oldest first."""
    named = adapter is not None and any(mark in adapter for mark in "/:@")
    tenant = (adapter or "").partition("/")[0] or None
    roles = ("auditor", "operator", "admin", "reviewer", "publisher")
    with connection_of(context).client(*roles, tenant=tenant) as client:
        subject = None
        if named and adapter is not None:
            tenant, subject = artifact_find(client, reference_parse(adapter))
        items = list(client.audit_list(tenant=tenant, subject=subject))
    if as_json:
        json_print(items)
    else:
        events_print(items)


def events_print(items: list[dict[str, Any]]) -> None:
    """Events as a table; whom they are about is left out when it is the same for all."""
    rows: list[tuple[object, ...]] = [
        (
            item["index"],
            moment(item["at"]),
            item["kind"],
            f"{item['tenant']} {_subject(item['subject'])}",
            item["actor"],
            _what(item["body"]),
        )
        for item in items
    ]
    columns = ["INDEX", "AT", "EVENT", "ABOUT", "BY", "WHAT"]
    if len({row[3] for row in rows}) == 1:
        columns.pop(3)
        rows = [row[:3] + row[4:] for row in rows]
    table_print("", columns, rows, "no events", whole=("EVENT",))


def _subject(subject: str) -> str:
    return subject[:8] + "…" if _UUID.fullmatch(subject) else short(subject)


def _what(body: dict[str, Any]) -> str:
    moved = f"{body['from']} → {body['to']}" if {"from", "to"} <= body.keys() else ""
    named = body.get("alias") or body.get("label") or body.get("name") or ""
    extra = (f"{key} {body[key]}" for key in _SHOWN if body.get(key))
    return "; ".join(part for part in (moved, str(named), *extra) if part)
