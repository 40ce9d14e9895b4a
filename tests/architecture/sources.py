"""The project's files, as the tests of this folder read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SHIPPED = ("registry_service", "gpu_worker", "cli", "migrations", "schemas", "bench")


@cache
def python_files(*folders: str) -> tuple[Path, ...]:
    """Python files below these top folders, by name."""
    return tuple(
        sorted(
            path
            for folder in folders
            for path in (ROOT / folder).rglob("*.py")
            if "__pycache__" not in path.parts
        )
    )


@cache
def tree(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text("utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    """Where something stands, as an editor opens it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Every module a file imports, with the statement."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path, node)}: a relative import"
            yield node, node.module or ""


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain, else an empty text."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
