"""Options and arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reason = Annotated[
    str, typer.Option("--reason", "-m", help="Why, in a line; it is kept in the audit trail.")
]
BaseDigest = Annotated[
    str | None,
    typer.Option(
        metavar="DIGEST",
        help="The base's digest, of 'adapterctl base show'; "
        "without it the weights in the folder are hashed.",
    ),
]
Versioned = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER",
        help="TENANT/ADAPTER:NAME or TENANT/ADAPTER@sha256:…; "
        "the tenant may be left out when the token is bound to one.",
    ),
]
Adapter = Annotated[
    str,
    typer.Argument(
        metavar="ADAPTER",
        help="TENANT/ADAPTER; the tenant may be left out when the token is bound to one.",
    ),
]
