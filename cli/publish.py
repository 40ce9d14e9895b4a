"""``adapterctl publish``: from a training output folder to an artifact."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.begun import begun_default
from cli.connection import connection_of
from cli.options import Adapter, AsJson
from cli.output import ProgressLines, json_print, pairs_print, say
from cli.reference import Reference, reference_parse, tenant_of
from cli.report_print import findings_grouped, findings_print
from registry_service.domain.errors import MalformedError, UnavailableError

if TYPE_CHECKING:
    from registry_service.client import RegistryClient

_UNDECIDED: Final = frozenset({"SCANNING", "VALIDATING"})
# How --wait ends, by state: refused by checks or people, or a fault of ours.
_EXIT_CODES: Final = {"REJECTED": 3, "REVOKING": 3, "REVOKED": 3, "STALLED": 7}
_POLL_SECONDS: Final = 0.25


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("publish")(publish)


def publish(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A training output folder.")],
    adapter: Adapter,
    *,
    base: Annotated[str, typer.Option(help="The base it was trained on, by name or digest.")],
    training_data_version: Annotated[str, typer.Option(help="Which data it was trained on.")],
    base_quantization: Annotated[
        str, typer.Option(help="How the base was quantized during training.")
    ] = "none",
    max_replicas: Annotated[int, typer.Option(help="Nodes that may hold it at once.")] = 1,
    label: Annotated[
        str | None, typer.Option(help="A version label, as in v3; it never moves.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the checks; 3 if refused.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that --wait waits at most.")] = 1800,
    as_json: AsJson = False,
) -> None:
    """Publish an adapter: picks its files, says what it left out, uploads, resumes."""
    from cli.publish_folder import Statement

    reference = reference_parse(adapter)
    if reference.version is not None:
        raise MalformedError("name TENANT/ADAPTER here, and a version with --label")
    with connection_of(context).client("publisher", tenant=reference.tenant) as client:
        tenant = tenant_of(client, reference)
        statement = Statement(
            tenant, reference.adapter, training_data_version, base_quantization, max_replicas
        )
        result = _publish(client, folder, base, statement, label)
        digest = result["adapterDigest"]
        if wait:
            result |= _wait(client, tenant, digest, timeout)
    _print(result, Reference(tenant, reference.adapter, digest), as_json)
    code = _EXIT_CODES.get(str(result.get("state")), 0)
    if code:
        raise typer.Exit(code)


def _publish(
    client: RegistryClient, folder: Path, base: str, statement: Any, label: str | None
) -> dict[str, Any]:
    from cli.publish_folder import declaration_build, files_choose, publish_files

    facts = client.base_show(base)
    chosen = files_choose(folder, facts)
    for path, reason in chosen.left_out:
        say(f"left out {path}: {reason}")
    declaration = declaration_build(chosen, facts, statement)
    files = publish_files(chosen, declaration)
    with ProgressLines("sending") as progress:
        digest = client.push(
            statement.tenant, statement.adapter, files, label, progress, begun_default()
        )
    return {
        "tenant": statement.tenant,
        "adapterId": statement.adapter,
        "adapterDigest": digest,
        "baseModelDigest": facts["baseModelDigest"],
        "label": label,
        "files": sorted(file.path for file in files),
        "leftOut": [{"path": path, "reason": reason} for path, reason in chosen.left_out],
    }


def _wait(client: RegistryClient, tenant: str, digest: str, timeout: float) -> dict[str, Any]:
    """Follow an artifact until the checks have decided; its state and, if refused, findings."""
    until, last = time.monotonic() + timeout, ""
    while True:
        state = client.artifact_show(tenant, digest)["state"]
        if state != last:
            say(f"{digest}: {state}")
            last = state
        if state not in _UNDECIDED:
            break
        if time.monotonic() > until:
            raise UnavailableError(f"{digest} is still {state} after {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
    findings = [f for report in client.report_list(tenant, digest) for f in report["findings"]]
    groups = [group.to_json() for group in findings_grouped(findings)]
    return {"state": state, "findings": findings, "groups": groups}


def _print(result: dict[str, Any], reference: Reference, as_json: bool) -> None:
    if as_json:
        json_print(result)
        return
    hidden = ("findings", "groups", "leftOut")
    pairs_print((key, value) for key, value in result.items() if key not in hidden)
    findings_print(result.get("findings", ()))
    if result.get("state") == "STALLED":
        say("the checks came to a halt through no fault of the adapter; an operator can run them")
        say(f"again: adapterctl requeue {_named(reference)} -m '…'")
    elif result.get("state") == "IN_REVIEW":
        say(f"next, a reviewer: adapterctl review approve {_named(reference)} -m '…'")


def _named(reference: Reference) -> str:
    return f"{reference.tenant}/{reference.adapter}@{reference.version}"
