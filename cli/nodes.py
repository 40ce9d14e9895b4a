"""``adapterctl node``: serving nodes."""

from __future__ import annotations

import typer

from cli.connection import connection_of
from cli.options import AsJson
from cli.output import json_print, moment, short, table_print

app = typer.Typer(no_args_is_help=True, help="Serving nodes.")


@app.command("list")
def node_list(context: typer.Context, as_json: AsJson = False) -> None:
    """Serving nodes by name, with what they hold."""
    with connection_of(context).client("operator", "admin", "auditor", "gateway") as client:
        items = list(client.node_list())
    if as_json:
        json_print(items)
        return
    table_print(
        "",
        ("NODE", "STATE", "BASE", "URL", "RESIDENT", "LAST SEEN"),
        (
            (
                item["node"],
                item["state"],
                short(item["baseModelDigest"]),
                item["url"],
                len(item["residents"]),
                moment(item["lastSeenAt"]),
            )
            for item in items
        ),
        "no nodes",
    )
