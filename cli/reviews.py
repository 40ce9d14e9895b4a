"""``adapterctl review``: what waits for a person, and the person's decision."""

from __future__ import annotations

import time
from typing import Any, Final

import typer

from cli.connection import connection_of
from cli.options import AsJson, Reason, Versioned
from cli.output import json_print, moment, pairs_print, say, short, table_print
from cli.reference import artifact_find, reference_parse

ADMISSION_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.1

app = typer.Typer(no_args_is_help=True, help="What waits for review, and decisions.")


@app.command("list")
def review_list(context: typer.Context, as_json: AsJson = False) -> None:
    """Artifacts that wait for a decision."""
    with connection_of(context).client("reviewer", "operator", "auditor", "admin") as client:
        items = list(client.artifact_list(state="IN_REVIEW"))
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("ADAPTER", "DIGEST", "RANK", "TARGETS", "PUBLISHER", "SUBMITTED"),
        (
            (
                f"{item['tenant']}/{item['adapterId']}",
                short(item["adapterDigest"]),
                item["rank"],
                item["targetModules"],
                item["publisher"],
                moment(item["submittedAt"]),
            )
            for item in items
        ),
        "nothing waits for review",
    )


@app.command("approve")
def approve(
    context: typer.Context, adapter: Versioned, reason: Reason, as_json: AsJson = False
) -> None:
    """Admit an artifact; comes back once the signed verdict is there."""
    item = _decide(context, adapter, "approve", reason)
    _print(item, as_json)
    if not item["admitted"]:
        say(f"approved; the verdict was not there after {ADMISSION_SECONDS:.0f} s")


@app.command("reject")
def reject(
    context: typer.Context, adapter: Versioned, reason: Reason, as_json: AsJson = False
) -> None:
    """Refuse an artifact for good."""
    _print(_decide(context, adapter, "reject", reason), as_json)


def admission_wait(client: Any, tenant: str, digest: str) -> dict[str, Any]:
    """The artifact once it is admitted, or as it is after 10 seconds."""
    until = time.monotonic() + ADMISSION_SECONDS
    while True:
        item: dict[str, Any] = client.artifact_show(tenant, digest)
        if item["admitted"] or item["state"] != "APPROVED" or time.monotonic() > until:
            return item
        time.sleep(_POLL_SECONDS)


def _decide(context: typer.Context, adapter: str, decision: str, reason: str) -> dict[str, Any]:
    reference = reference_parse(adapter)
    with connection_of(context).client("reviewer", tenant=reference.tenant) as client:
        tenant, digest = artifact_find(client, reference, exact=True)
        client.review_submit(tenant, digest, decision, reason)
        if decision == "approve":
            return admission_wait(client, tenant, digest)
        return client.artifact_show(tenant, digest)


def _print(item: dict[str, Any], as_json: bool) -> None:
    if as_json:
        json_print(item)
        return
    pairs_print(
        [
            ("adapter", f"{item['tenant']}/{item['adapterId']}"),
            ("adapterDigest", item["adapterDigest"]),
            ("state", item["state"]),
            ("admitted", item["admitted"]),
        ]
    )
