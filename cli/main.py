"""``adapterctl``: the registry from the command line.

Exit codes: 0 ok, 1 bug, 2 usage or malformed input, 3 refused, 4 not found, 5 conflict,
6 not allowed, 7 unavailable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.commands import TableGroup
from cli.connection import Connection
from cli.output import error_print, say
from registry_service.domain.errors import RegistryError

app = typer.Typer(
    name="adapterctl",
    cls=TableGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Publish, review, resolve and revoke LoRA adapters.",
    epilog="Exit codes: 0 ok, 1 bug, 2 usage, 3 refused, 4 not found, 5 conflict, "
    "6 not allowed, 7 unavailable.",
)


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(envvar="ADAPTERCTL_URL", help="The service.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="ADAPTERCTL_TOKEN", help="The token to use.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(envvar="ADAPTERCTL_PROFILE", help="The profile.json of 'adapterctl up'."),
    ] = None,
    role: Annotated[
        str | None, typer.Option("--as", metavar="ROLE", help="Which token of the profile.")
    ] = None,
) -> None:
    """Publish, review, resolve and revoke LoRA adapters."""
    context.obj = Connection(url=url, token=token, profile=profile, role=role)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit code."""
    try:
        app(args=None if arguments is None else list(arguments), prog_name="adapterctl")
    except RegistryError as error:
        error_print(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader went away, as 'head' does. Closing stdout again must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        say("stopped")
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
