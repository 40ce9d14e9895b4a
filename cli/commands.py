"""The table of all commands; a module is imported when one of its commands is asked for.

So ``adapterctl --help`` imports no command at all, and ``adapterctl check`` neither the client nor
what the others need.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_group_from_info
from typer.models import TyperInfo

if TYPE_CHECKING:
    from typer._click import Command, Context, HelpFormatter


class Entry(NamedTuple):
    """Where a command is: in ``register`` of its module, or as the group that its ``app`` is."""

    module: str
    help: str
    is_group: bool = False


TABLE: Final[dict[str, Entry]] = {
    "up": Entry("cli.up", "Run PostgreSQL, service and workers until Ctrl-C."),
    "demo": Entry("cli.demo", "One real adapter from training to serving and out again."),
    "check": Entry("cli.checking", "Would the registry take this adapter?"),
    "publish": Entry("cli.publish", "Publish an adapter."),
    "list": Entry("cli.artifacts", "Artifacts, newest first."),
    "show": Entry("cli.artifacts", "One artifact, in whatever state it is."),
    "report": Entry("cli.artifacts", "What the checks saw."),
    "resolve": Entry("cli.artifacts", "The immutable digest behind an alias, label or digest."),
    "pull": Entry("cli.artifacts", "Fetch an admitted artifact."),
    "requeue": Entry("cli.artifacts", "Scan a STALLED artifact again."),
    "revoke": Entry("cli.artifacts", "Refuse an artifact everywhere at once."),
    "base": Entry("cli.bases", "Base models.", is_group=True),
    "review": Entry("cli.reviews", "What waits for review, and decisions.", is_group=True),
    "alias": Entry("cli.aliases", "Movable names such as prod.", is_group=True),
    "grant": Entry("cli.grants", "Who may run an adapter.", is_group=True),
    "audit": Entry("cli.audit", "What happened, in order.", is_group=True),
    "node": Entry("cli.nodes", "Serving nodes.", is_group=True),
    "revocation-list": Entry(
        "cli.revocation_lists", "The signed list of what is revoked.", is_group=True
    ),
    "token": Entry("cli.tokens", "Who may ask.", is_group=True),
    "tenant": Entry("cli.tenants", "Who owns adapters.", is_group=True),
}


class CommandTable(MutableMapping[str, "Command"]):
    """The commands by name, each made when it is looked up."""

    def __init__(self) -> None:
        self._made: dict[str, Command] = {}

    def __getitem__(self, name: str) -> Command:
        if name not in self._made:
            self._made[name] = _command_make(name, TABLE[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Command) -> None:
        raise TypeError(f"{name}: commands stand in the table of cli.commands")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"{name}: commands stand in the table of cli.commands")

    def __contains__(self, name: object) -> bool:
        return name in TABLE

    def __iter__(self) -> Iterator[str]:
        return iter(TABLE)

    def __len__(self) -> int:
        return len(TABLE)


class TableGroup(TyperGroup):
    """``adapterctl`` itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = CommandTable()

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """The list of commands in the help, out of the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in TABLE.items()])


def _command_make(name: str, entry: Entry) -> Command:
    module = importlib.import_module(entry.module)
    if entry.is_group:
        return _group_make(module.app)
    app = typer.Typer()
    module.register(app)
    return _group_make(app).commands[name]


def _group_make(app: typer.Typer) -> TyperGroup:
    # Plain help and usage errors: Rich would take 80 ms of every one of them.
    return get_group_from_info(
        TyperInfo(app), pretty_exceptions_short=True, rich_markup_mode=None, suggest_commands=True
    )
