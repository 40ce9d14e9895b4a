"""``adapterctl list | show | report | resolve | pull | requeue | revoke``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.connection import connection_of
from cli.options import AsJson, Reason, Versioned
from cli.output import json_print, moment, pairs_print, say, short, table_print
from cli.reference import artifact_find, reference_parse, tenant_of
from cli.report_print import (
    comparison_print,
    findings_grouped,
    findings_print,
    hint_print,
    modules_print,
)
from registry_service.domain.errors import MalformedError

_READERS = ("operator", "reviewer", "auditor", "admin", "publisher")


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("list")(artifact_list)
    app.command("show")(artifact_show)
    app.command("report")(report_show)
    app.command("resolve")(resolve)
    app.command("pull")(pull)
    app.command("requeue")(requeue)
    app.command("revoke")(revoke)


def artifact_list(
    context: typer.Context,
    adapter: Annotated[str | None, typer.Argument(help="TENANT or TENANT/ADAPTER.")] = None,
    state: Annotated[str | None, typer.Option(help="As in --state IN_REVIEW.")] = None,
    as_json: AsJson = False,
) -> None:
    """Artifacts, newest first."""
    tenant, _, name = (adapter or "").partition("/")
    with connection_of(context).client(*_READERS, tenant=tenant or None) as client:
        items = list(client.artifact_list(tenant=tenant or None, adapter=name or None, state=state))
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("ADAPTER", "DIGEST", "STATE", "RANK", "LABELS", "PUBLISHER", "SUBMITTED"),
        (
            (
                f"{item['tenant']}/{item['adapterId']}",
                short(item["adapterDigest"]),
                item["state"],
                item["rank"],
                item["labels"] or None,
                item["publisher"],
                moment(item["submittedAt"]),
            )
            for item in items
        ),
        "no artifacts",
    )


def artifact_show(context: typer.Context, adapter: Versioned, as_json: AsJson = False) -> None:
    """One artifact, in whatever state it is, with its reviews and revocation."""
    reference = reference_parse(adapter)
    with connection_of(context).client(*_READERS, tenant=reference.tenant) as client:
        tenant, digest = artifact_find(client, reference)
        item = client.artifact_show(tenant, digest)
        item["reviews"] = client.review_list(tenant, digest)
        if item["state"] in {"REVOKING", "REVOKED"}:
            item["revocation"] = client.revocation_show(tenant, digest)
    if as_json:
        json_print(item)
        return
    nested = ("reviews", "revocation")
    pairs_print((key, value) for key, value in item.items() if key not in nested)
    for review in item["reviews"]:
        say(f"{review['decision']} by {review['reviewer']}: {review['reason']}")
    if "revocation" in item:
        _revocation_print(item["revocation"])


def report_show(context: typer.Context, adapter: Versioned, as_json: AsJson = False) -> None:
    """What the checks saw, and what changes against the version that each alias points to."""
    reference = reference_parse(adapter)
    with connection_of(context).client(*_READERS, tenant=reference.tenant) as client:
        tenant, digest = artifact_find(client, reference)
        reports = client.report_list(tenant, digest)
    if as_json:
        json_print([{**report, "groups": _groups_json(report)} for report in reports])
        return
    if not reports:
        say("no reports yet")
    for report in reports:
        report_print(report)
    hint_print(findings_grouped(f for report in reports for f in report["findings"]))


def resolve(context: typer.Context, adapter: Versioned, as_json: AsJson = False) -> None:
    """The immutable digest behind an alias, label or digest; admitted artifacts only."""
    reference = reference_parse(adapter)
    roles = ("operator", "node", "gateway", "reviewer", "publisher")
    with connection_of(context).client(*roles, tenant=reference.tenant) as client:
        tenant = tenant_of(client, reference)
        found = client.resolve(tenant, reference.adapter, reference.version_needed())
    if as_json:
        json_print(found)
    else:
        pairs_print(found.items())


def pull(
    context: typer.Context,
    adapter: Versioned,
    into: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    as_json: AsJson = False,
) -> None:
    """Fetch an admitted artifact; every byte is verified against the digest."""
    from registry_service.domain.digests import is_digest

    reference = reference_parse(adapter)
    roles = ("operator", "node", "reviewer", "publisher")
    with connection_of(context).client(*roles, tenant=reference.tenant) as client:
        tenant, digest = tenant_of(client, reference), reference.version_needed()
        if not is_digest(digest):
            found = client.resolve(tenant, reference.adapter, digest)
            digest = found["adapterDigest"]
        manifest = client.pull(tenant, reference.adapter, digest, into)
    files = [{"path": f.path, "digest": f.digest, "size": f.size} for f in manifest.files]
    if as_json:
        json_print({"adapterDigest": digest, "folder": str(into), "files": files})
    else:
        pairs_print([("adapterDigest", digest), ("folder", into), ("files", len(files))])


def requeue(context: typer.Context, adapter: Versioned, reason: Reason) -> None:
    """Scan a STALLED artifact again."""
    reference = reference_parse(adapter)
    with connection_of(context).client("operator", "admin") as client:
        tenant, digest = artifact_find(client, reference)
        item = client.artifact_requeue(tenant, digest, reason)
    pairs_print([("adapterDigest", digest), ("state", item["state"])])


def revoke(
    context: typer.Context,
    adapter: Versioned,
    reason: Reason,
    deadline: Annotated[
        int | None,
        typer.Option(help="Seconds after which running requests are cancelled."),
    ] = None,
    immediate: Annotated[
        bool, typer.Option("--immediate", help="Cancel running requests at once.")
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait until every node has let go of it.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Refuse an artifact everywhere at once, and drain it from the nodes.

    Repeated, it brings the deadline forward and never puts it off.
    """
    import time

    if immediate and deadline is not None:
        raise MalformedError("revoke: expected --deadline or --immediate, got both")
    deadline = 0 if immediate else deadline
    reference = reference_parse(adapter)
    with connection_of(context).client("operator", "admin") as client:
        tenant, digest = artifact_find(client, reference, exact=True)
        shown = client.revoke(tenant, digest, reason, deadline)
        until = time.monotonic() + wait
        while shown["state"] != "REVOKED" and time.monotonic() < until:
            time.sleep(0.25)
            shown = client.revocation_show(tenant, digest)
    if as_json:
        json_print(shown)
    else:
        pairs_print([("adapterDigest", digest)])
        _revocation_print(shown)


def _groups_json(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [group.to_json() for group in findings_grouped(report["findings"])]


def report_print(report: dict[str, Any]) -> None:
    """One report: a line, its findings in groups, the modules and the comparisons."""
    pairs_print(
        [
            ("stage", f"{report['stage']}, attempt {report['attempt']}: {report['verdict']}"),
            ("worker", report["worker"]),
            ("at", moment(report["createdAt"])),
            ("device", report.get("device")),
            ("sandbox", report.get("sandbox")),
        ]
    )
    measured = report["measurements"]
    findings_print(report["findings"], hint=False)
    if measured.get("findings", 0) > len(report["findings"]):
        say(f"of {measured['findings']} findings the report keeps {len(report['findings'])}")
    if measured.get("modules") and report["stage"] == "scan":
        modules_print(measured["modules"])
    for comparison in report["comparison"] or ():
        comparison_print(comparison)


def _revocation_print(shown: dict[str, Any]) -> None:
    pairs_print([("state", shown["state"]), ("reason", shown["reason"]), ("by", shown["actor"])])
    table_print(
        "",
        ("NODE", "STATE", "ACKNOWLEDGED", "FREED BYTES", "PURGED BLOCKS"),
        (
            (
                node["node"],
                node["state"],
                moment(node["acknowledgedAt"]),
                node["freedBytes"],
                node["purgedBlocks"],
            )
            for node in shown["nodes"]
        ),
        "no node held it",
    )
