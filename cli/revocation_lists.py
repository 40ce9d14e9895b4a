"""``adapterctl revocation-list``: what is revoked, as nodes are told it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.connection import connection_of
from cli.options import AsJson
from cli.output import json_print, pairs_print, short, table_print
from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError, UnavailableError
from registry_service.trust.keys import public_key_parse
from registry_service.trust.revocation_list import (
    RevocationList,
    entry_write,
    revocation_list_verify,
)
from registry_service.trust.statement import time_text

app = typer.Typer(no_args_is_help=True, help="The signed list of what is revoked.")
_READERS = ("operator", "auditor", "admin")


@app.command("show")
def revocation_list_show(
    context: typer.Context,
    trust: Annotated[Path, typer.Option(help="The trust.json that nodes pin.")],
    as_json: AsJson = False,
) -> None:
    """Fetch the list, verify it as a node does, and show it."""
    with connection_of(context).client(*_READERS) as client:
        envelope = client.revocation_list()
    if envelope is None:
        raise UnavailableError("expected a revocation list, got none")
    revocations = _verified(envelope, trust)
    if as_json:
        json_print(_facts(revocations) | {"entries": [entry_write(e) for e in revocations.entries]})
        return
    pairs_print(_facts(revocations).items())
    table_print(
        "",
        ("ADAPTER", "WEIGHTS", "CONTENT", "TENANT", "CANCELS"),
        (tuple(short(v) for v in entry_write(entry).values()) for entry in revocations.entries),
        "nothing is revoked",
    )


@app.command("verify")
def revocation_list_check(
    envelope: Annotated[Path, typer.Argument(help="A list as it was fetched: a DSSE envelope.")],
    trust: Annotated[Path, typer.Option(help="The trust.json that nodes pin.")],
    as_json: AsJson = False,
) -> None:
    """Verify a kept list offline: signature, purpose, issuer, form and time."""
    facts = _facts(_verified(_read(envelope, limits.REVOCATION_LIST_BYTES), trust))
    if as_json:
        json_print(facts)
    else:
        pairs_print(facts.items())


def _verified(envelope: bytes, trust: Path) -> RevocationList:
    document = json_parse(_read(trust, limits.CONFIG_BYTES), what=str(trust), limit=64 * 1024)
    try:
        pinned = document["revocationList"]
        key, issuer = public_key_parse(pinned["publicKey"]), str(pinned["issuer"])
    except (KeyError, TypeError, AttributeError) as error:
        raise MalformedError(
            f"{trust}: expected revocationList with publicKey and issuer; it is made by "
            "'python -m registry_service keys'"
        ) from error
    return revocation_list_verify(envelope, public_key=key, issuer=issuer, now=datetime.now(UTC))


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise MalformedError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise MalformedError(f"{path}: expected at most {limit} bytes")
    return content


def _facts(revocations: RevocationList) -> dict[str, Any]:
    return {
        "number": revocations.number,
        "issuer": revocations.issuer,
        "issuedAt": time_text(revocations.issued_at),
        "expiresAt": time_text(revocations.expires_at),
        "revoked": len(revocations.entries),
    }
