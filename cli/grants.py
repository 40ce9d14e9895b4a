"""``adapterctl grant``: who may run an adapter."""

from __future__ import annotations

import typer

from cli.connection import connection_of
from cli.options import Adapter, AsJson
from cli.output import json_print, pairs_print
from cli.reference import reference_parse, tenant_of

app = typer.Typer(no_args_is_help=True, help="Who may run an adapter.")


@app.command("set")
def grant_set(
    context: typer.Context, adapter: Adapter, subject: str, as_json: AsJson = False
) -> None:
    """Let a subject run an adapter."""
    _change(context, adapter, subject, as_json, active=True)


@app.command("withdraw")
def grant_withdraw(
    context: typer.Context, adapter: Adapter, subject: str, as_json: AsJson = False
) -> None:
    """End a subject's right to run an adapter; requests minted under it end too."""
    _change(context, adapter, subject, as_json, active=False)


@app.command("show")
def grant_show(
    context: typer.Context, adapter: Adapter, subject: str, as_json: AsJson = False
) -> None:
    """A subject's grant."""
    reference = reference_parse(adapter)
    roles = ("operator", "reviewer", "auditor", "admin", "publisher")
    with connection_of(context).client(*roles, tenant=reference.tenant) as client:
        found = client.grant_show(tenant_of(client, reference), reference.adapter, subject)
    json_print(found) if as_json else pairs_print(found.items())


def _change(
    context: typer.Context, adapter: str, subject: str, as_json: bool, *, active: bool
) -> None:
    reference = reference_parse(adapter)
    with connection_of(context).client("operator", "admin") as client:
        change = client.grant_set if active else client.grant_withdraw
        grant = change(tenant_of(client, reference), reference.adapter, subject)
    json_print(grant) if as_json else pairs_print(grant.items())
