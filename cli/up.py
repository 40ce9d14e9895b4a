"""``adapterctl up``: the whole stack in the foreground."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.connection import data_dir_default
from cli.output import say
from registry_service.domain.errors import MalformedError
from registry_service.domain.names import base_name


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("up")(up)


def up(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="The service's port; 0: any.")] = 8400,
    base: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A base model to serve; may be repeated."),
    ] = None,
) -> None:
    """Run PostgreSQL, service and workers until Ctrl-C; without --base, the bases of last time."""
    from cli.stack import Stack
    from cli.stack_setup import stack_run

    stack = Stack(data_dir or data_dir_default(), port, bases_parse(base or []))
    # SIGINT too: a shell starts background jobs with it ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        profile = stack_run(stack)
        named = ", ".join(profile["bases"]) or "none"
        sys.stdout.write(
            f"ready: {stack.url} (bases: {named}; nodes: {len(profile['nodes'])}; "
            f"profile: {stack.profile})\n"
        )
        sys.stdout.flush()
        stack.watch()
    except KeyboardInterrupt:
        say("stopping")
    finally:
        # A second Ctrl-C would leave processes behind; stopping is bounded in time.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        stack.stop()
    say("stopped")


def bases_parse(given: list[str]) -> dict[str, Path]:
    """``NAME=DIR`` options. Raises MalformedError."""
    bases: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (equals and folder and Path(folder).is_dir()):
            raise MalformedError(f"--base: expected NAME=DIR with a folder, got '{text}'")
        if name in bases:
            raise MalformedError(f"--base: {name} is named twice")
        bases[base_name(name)] = Path(folder).resolve()
    return bases


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
