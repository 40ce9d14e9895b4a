"""What the pages say is what there is: tree, commands, options, links, settings, dependencies."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from cli.main import app
from registry_service.settings import Settings
from tests.architecture.sources import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SCREEN = 75
COMMAND: Any = typer.main.get_command(app)
# Made by builds and tools, or by whoever runs the project.
NO_PART = {"var", "secrets", "dist", "build", "adapter_registry.egg-info"}


def block(start: str) -> list[str]:
    """The lines of the README's code block that starts with ``start``."""
    return README.split(f"```\n{start}", 1)[1].split("\n```", 1)[0].splitlines()


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_readme_fits_on_one_screen() -> None:
    assert README.count("\n") <= SCREEN
    assert max(len(line) for line in README.splitlines()) <= 100


def test_the_readme_shows_the_tree_as_it_is() -> None:
    shown, folder = set(), ""
    first, *rest = block("registry_service/")
    for line in ["registry_service/" + first, *rest]:
        name = line.split()[0]
        folder = name if not line.startswith(" ") and name.endswith("/") else folder
        path = folder + name if line.startswith(" ") else name
        shown.add(path)
        assert (ROOT / path).exists(), path
    for parent in ("", "registry_service/", "gpu_worker/"):
        there = {
            f"{parent}{path.name}/"
            for path in (ROOT / parent).iterdir()
            if path.is_dir() and path.name not in NO_PART and path.name[0] not in "._"
            if any(file.is_file() and file.suffix != ".pyc" for file in path.rglob("*"))
        }
        assert there <= shown


def test_the_readme_lists_the_commands_that_there_are() -> None:
    first, *rest = block("adapterctl")
    pairs = " ".join(rest).split()
    listed = {"adapterctl": set(first.split())} | {
        group: set(members.split("|"))
        for group, members in zip(pairs[::2], pairs[1::2], strict=True)
    }
    groups = {
        name: set(command.commands)
        for name, command in COMMAND.commands.items()
        if hasattr(command, "commands")
    }
    assert listed == {"adapterctl": set(COMMAND.commands) - set(groups), **groups}


def test_help_names_every_command() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    assert set(COMMAND.commands) <= set(said.split())


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_on_the_pages_exist_with_their_options(page: Path) -> None:
    for line in re.findall(r"^ {4,}(adapterctl .*)$", page.read_text("utf-8"), re.MULTILINE):
        command = COMMAND
        for word in shlex.split(line)[1:]:
            if word.startswith("-"):
                known = {name for parameter in command.params for name in parameter.opts}
                assert word in known | {"--help"}, f"{line}: {word}"
            elif word in getattr(command, "commands", {}):
                command = command.commands[word]
        assert not hasattr(command, "commands"), f"{line}: no command"


def test_every_setting_is_explained() -> None:
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    named = set(re.findall(r"`(REGISTRY_[A-Z_]+)`", page))
    settings = {f"REGISTRY_{field.upper()}" for field in Settings.model_fields}
    assert settings <= named


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs" / "adr"
    index = (folder / "README.md").read_text("utf-8")
    pages = [path.name for path in sorted(folder.glob("[0-9]*.md"))]
    assert pages == re.findall(r"\]\(([^)]+)\)", index)
    numbers = [int(name[:4]) for name in pages]
    assert numbers == list(range(1, len(pages) + 1))


def test_every_dependency_has_a_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (ROOT / "docs" / "adr" / "0002-dependencies.md").read_text("utf-8").lower()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[\[><=~! ]", item)[0].lower() for group in groups for item in group}
    assert {name for name in names if name not in page} == set()


def test_what_is_installed_is_pinned() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^+ ]+", line) for line in lines)
    pinned = {normal(line.partition("==")[0]) for line in lines}
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {normal(re.split(r"[\[><=~! ]", item)[0]) for group in groups for item in group}
    assert wanted | {"pip", "hatchling", "editables"} <= pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
