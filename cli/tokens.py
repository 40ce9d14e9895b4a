"""``adapterctl token``: who may ask."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.connection import connection_of
from cli.options import AsJson
from cli.output import json_print, moment, pairs_print, say, table_print
from registry_service.domain.roles import Role

app = typer.Typer(no_args_is_help=True, help="Who may ask.")


@app.command("create")
def token_create(
    context: typer.Context,
    subject: Annotated[str, typer.Option(help="Who it speaks for, as in ci@example.org.")],
    role: Annotated[Role, typer.Option(help="What it may be used for.")],
    tenant: Annotated[str | None, typer.Option(help="The tenant that it is bound to.")] = None,
    days: Annotated[int | None, typer.Option(help="How long it is valid.", min=1)] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep it in the profile instead of printing it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a token. It is shown this once."""
    connection = connection_of(context)
    if save:
        connection.profile_needed()
    with connection.client("admin") as client:
        made = client.token_create(subject, role.value, tenant, days and days * 24 * 3600)
    if save:
        name = role.value if tenant is None else f"{role.value}@{tenant}"
        path = connection.profile_token_set(name, made.pop("token"))
        say(f"kept in {path} as {name}")
    if as_json:
        json_print(made)
    else:
        pairs_print(made.items())


@app.command("list")
def token_list(context: typer.Context, as_json: AsJson = False) -> None:
    """Tokens without their secrets, newest first."""
    with connection_of(context).client("admin", "auditor") as client:
        items = list(client.token_list())
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("ID", "SUBJECT", "ROLE", "TENANT", "EXPIRES", "REVOKED"),
        (
            (
                item["id"],
                item["subject"],
                item["role"],
                item["tenant"],
                moment(item["expiresAt"])[:10],
                moment(item["revokedAt"])[:10],
            )
            for item in items
        ),
        "no tokens",
    )


@app.command("revoke")
def token_revoke(context: typer.Context, token_id: str) -> None:
    """Withdraw a token at once."""
    with connection_of(context).client("admin") as client:
        client.token_revoke(token_id)
    say(f"token {token_id} is withdrawn")
