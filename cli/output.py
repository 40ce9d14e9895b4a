"""What the commands print: tables of at most 100 columns, JSON, progress, and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    RefusedError,
    RegistryError,
    UnauthenticatedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from rich.console import Console

WIDTH: Final = 100
_SHORT_HEX: Final = 12
_WHOLE_CHARS: Final = 19
_PLAIN_STEP: Final = 0.25

_HINTS: Final[Sequence[tuple[type[RegistryError], str]]] = (
    (
        UnauthenticatedError,
        "name a token with --token or ADAPTERCTL_TOKEN, or a profile with --profile; "
        "make one with 'adapterctl token create'",
    ),
    (
        ForbiddenError,
        "use a token with that role: --as ROLE picks one of the profile, "
        "'adapterctl token create' makes one",
    ),
    (
        NotFoundError,
        "check the name; what is revoked or belongs to somebody else looks like something unknown",
    ),
    (ConflictError, "read it again, and decide anew"),
    (RefusedError, "change what is named above; 'adapterctl report' shows an artifact's findings"),
    (UnavailableError, "try again; 'adapterctl up' starts a service on this machine"),
)


def console(*, error: bool = False) -> Console:
    """A console for stdout or stderr that never writes wider than 100 columns."""
    from rich.console import Console

    made = Console(stderr=error, highlight=False, soft_wrap=False)
    return Console(
        stderr=error, highlight=False, width=min(made.width, WIDTH) if made.is_terminal else WIDTH
    )


def plain(value: object) -> str:
    """``value`` as text for a terminal: what does not print is escaped, so it cannot act."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short(digest: object) -> str:
    """A digest's first 12 hex digits, for tables only."""
    text = plain(digest)
    return text[: len("sha256:") + _SHORT_HEX] if text.startswith("sha256:") else text


def moment(value: object) -> str:
    """A time to the second."""
    text = plain(value)
    return text[:19].replace("T", " ") if len(text) >= 19 else text


def say(line: str) -> None:
    """A line for people, on stderr, so that stdout stays what was asked for."""
    sys.stderr.write(plain(line) + "\n")
    sys.stderr.flush()


def json_print(value: Any) -> None:
    """``value`` as JSON on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def table_print(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    empty: str,
    *,
    whole: Sequence[str] = (),
) -> None:
    """A table on stdout, or ``empty`` on stderr when there are no rows.

    Columns in ``whole`` are never wrapped.
    """
    from rich.table import Table
    from rich.text import Text

    listed = [[plain(cell) for cell in row] for row in rows]
    if not listed:
        say(empty)
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        # What is short stays whole; only long text gives way.
        longest = max(len(row[index]) for row in listed)
        table.add_column(
            column, overflow="fold", no_wrap=column in whole or longest <= _WHOLE_CHARS
        )
    for row in listed:
        table.add_row(*map(Text, row))
    console().print(table)


def pairs_print(pairs: Iterable[tuple[str, object]]) -> None:
    """Name and value, a line each; values are never shortened or wrapped, digests included."""
    listed = [(name, plain(value)) for name, value in pairs]
    width = max(len(name) for name, _ in listed)
    for name, value in listed:
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def error_print(error: RegistryError) -> None:
    """What went wrong and what to do next, on stderr."""
    for text in f"error: {error.message}".splitlines():
        say(text)
    if error.findings:
        from cli.report_print import findings_print

        findings_print(error.findings, error=True)
    fitting = (text for kind, text in _HINTS if isinstance(error, kind))
    hint = getattr(error, "hint", None) or next(fitting, None)
    if hint is not None:
        say(f"  next: {hint}")


class ProgressLines:
    """Progress of several files: a bar on a terminal, a plain line now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._next: dict[str, float] = {}

    def __enter__(self) -> ProgressLines:
        shown = console(error=True)
        if shown.is_terminal:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
            self._bars = Progress(*columns, console=shown, transient=True)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, name: str, done: int, total: int) -> None:
        """``done`` of ``total`` bytes of ``name``."""
        if not name:
            return
        if self._bars is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(f"{self._what} {plain(name)}", total=total)
            self._bars.update(self._tasks[name], completed=done)
            return
        part = done / total if total else 1.0
        if done == total or part >= self._next.get(name, _PLAIN_STEP):
            self._next[name] = part + _PLAIN_STEP
            say(f"{self._what} {name}: {done:,} of {total:,} bytes")
