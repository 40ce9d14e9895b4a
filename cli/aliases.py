"""``adapterctl alias``: movable names, moved by compare-and-swap."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.connection import connection_of
from cli.options import Adapter, AsJson, Reason, Versioned
from cli.output import json_print, moment, pairs_print, short, table_print
from cli.reference import Reference, artifact_find, reference_parse, tenant_of
from registry_service.domain.errors import MalformedError, NotFoundError

_READERS = ("operator", "reviewer", "auditor", "admin", "publisher")

app = typer.Typer(no_args_is_help=True, help="Movable names such as prod.")


@app.command("set")
def alias_set(
    context: typer.Context,
    adapter: Versioned,
    target: Annotated[
        str, typer.Argument(metavar="VERSION", help="sha256:… or a version label of the adapter.")
    ],
    reason: Reason,
    generation: Annotated[
        int | None,
        typer.Option(help="Move it only if it still has this generation (0: is new)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias at an admitted artifact."""
    reference = reference_parse(adapter)
    alias = reference.version_needed()
    with connection_of(context).client("operator") as client:
        tenant = tenant_of(client, reference)
        _, digest = artifact_find(client, Reference(tenant, reference.adapter, target), exact=True)
        if generation is None:
            # Read now, compared when it is written: a move in between is a conflict, not lost.
            try:
                current = client.alias_show(tenant, reference.adapter, alias)
                generation = int(current["generation"])
            except NotFoundError:
                generation = 0
        moved = client.alias_set(tenant, reference.adapter, alias, digest, generation, reason)
    if as_json:
        json_print(moved)
    else:
        pairs_print(moved.items())


@app.command("show")
def alias_show(context: typer.Context, adapter: Adapter, as_json: AsJson = False) -> None:
    """Where an alias points; without a name, all aliases of the adapter."""
    reference = reference_parse(adapter)
    with connection_of(context).client(*_READERS, tenant=reference.tenant) as client:
        tenant = tenant_of(client, reference)
        if reference.version is None:
            items = list(client.alias_list(tenant, reference.adapter))
        else:
            items = [client.alias_show(tenant, reference.adapter, reference.version)]
    if as_json:
        json_print(items if reference.version is None else items[0])
        return
    if reference.version is not None:
        pairs_print(items[0].items())
        return
    table_print(
        "",
        ("ALIAS", "GENERATION", "DIGEST", "UPDATED", "BY"),
        (
            (
                item["alias"],
                item["generation"],
                short(item["adapterDigest"]),
                moment(item["updatedAt"]),
                item["actor"],
            )
            for item in items
        ),
        "no aliases",
    )


@app.command("history")
def alias_history(context: typer.Context, adapter: Versioned, as_json: AsJson = False) -> None:
    """Every move of an alias, newest first."""
    reference = reference_parse(adapter)
    alias = reference.version_needed()
    if alias.startswith("sha256:"):
        raise MalformedError("name an alias, as in TENANT/ADAPTER:prod")
    with connection_of(context).client(*_READERS, tenant=reference.tenant) as client:
        tenant = tenant_of(client, reference)
        items = list(client.alias_history(tenant, reference.adapter, alias))
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("GENERATION", "DIGEST", "PREVIOUS", "AT", "BY", "REASON"),
        (
            (
                item["generation"],
                short(item["adapterDigest"]),
                short(item["previousDigest"]),
                moment(item["at"]),
                item["actor"],
                item["reason"],
            )
            for item in items
        ),
        "no moves",
    )
