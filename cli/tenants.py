"""``adapterctl tenant``: who owns adapters."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.connection import connection_of
from cli.options import AsJson, Reason
from cli.output import json_print, moment, pairs_print, table_print

app = typer.Typer(no_args_is_help=True, help="Who owns adapters.")


@app.command("create")
def tenant_create(context: typer.Context, name: str, as_json: AsJson = False) -> None:
    """Create a tenant; its name is never given to another."""
    with connection_of(context).client("admin") as client:
        made = client.tenant_create(name)
    if as_json:
        json_print(made)
    else:
        pairs_print(made.items())


@app.command("list")
def tenant_list(context: typer.Context, as_json: AsJson = False) -> None:
    """Tenants by name."""
    with connection_of(context).client("admin", "operator", "auditor") as client:
        items = list(client.tenant_list())
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("TENANT", "STATE", "FULL TENSORS", "ID", "CREATED"),
        (
            (
                item["name"],
                item["state"],
                item["fullTensors"],
                item["id"],
                moment(item["createdAt"]),
            )
            for item in items
        ),
        "no tenants",
    )


@app.command("suspend")
def tenant_suspend(
    context: typer.Context, name: str, reason: Reason, as_json: AsJson = False
) -> None:
    """Suspend a tenant: its tokens end, and it publishes, resolves and runs nothing."""
    with connection_of(context).client("admin") as client:
        item = client.tenant_suspend(name, reason)
    if as_json:
        json_print(item)
    else:
        pairs_print(item.items())


@app.command("policy")
def tenant_policy(
    context: typer.Context,
    name: str,
    reason: Reason,
    full_tensors: Annotated[
        bool,
        typer.Option(
            "--full-tensors/--no-full-tensors",
            help="May its adapters hold whole tensors of the base (modules_to_save)?",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Set what a tenant's adapters may hold; it counts for what is scanned from now on."""
    with connection_of(context).client("operator", "admin") as client:
        item = client.tenant_policy_set(name, full_tensors=full_tensors, reason=reason)
    if as_json:
        json_print(item)
    else:
        pairs_print(item.items())
