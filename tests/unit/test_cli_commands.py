"""Commands are imported when they are asked for, and the table says what they are."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cli.commands import TABLE, CommandTable
from tests import sample_adapter as sample

COMMANDS = CommandTable()
HEAVY = ("httpx", "torch", "transformers", "sqlalchemy", "fastapi", "numpy", "safetensors", "peft")
MODULES = sorted({entry.module for entry in TABLE.values()})


def loaded_after(*arguments: str) -> tuple[int, set[str]]:
    """The exit code of a command in a process of its own, and the modules it had imported."""
    program = (
        "import json, sys; from cli.main import main; code = main(sys.argv[1:]); "
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    code, modules = json.loads(done.stderr.splitlines()[-1])
    return code, set(modules)


@pytest.mark.parametrize("module", MODULES)
def test_the_table_has_every_command_of_its_modules(module: str) -> None:
    imported = importlib.import_module(module)
    listed = {name for name, entry in TABLE.items() if entry.module == module}
    if hasattr(imported, "app"):
        assert len(listed) == 1 and all(TABLE[name].is_group for name in listed)
        return
    app = typer.Typer()
    imported.register(app)
    assert {command.name for command in app.registered_commands} == listed


@pytest.mark.parametrize("name", TABLE)
def test_the_tables_help_is_the_start_of_the_commands_own(name: str) -> None:
    assert (COMMANDS[name].help or "").startswith(TABLE[name].help.rstrip("."))


def test_every_module_with_commands_is_in_the_table() -> None:
    files = (Path(__file__).parents[2] / "cli").glob("*.py")
    texts = {f"cli.{path.stem}": path.read_text("utf-8") for path in files}
    with_commands = {
        module
        for module, text in texts.items()
        if "\napp = typer.Typer(" in text or "\ndef register(" in text
    } - {"cli.main"}
    assert with_commands == set(MODULES)


def test_the_commands_cannot_be_changed_from_outside() -> None:
    with pytest.raises(TypeError):
        COMMANDS["check"] = COMMANDS["up"]
    with pytest.raises(TypeError):
        del COMMANDS["check"]
    assert len(COMMANDS) == len(TABLE) == len(list(COMMANDS))


def test_help_imports_no_command_and_no_model_of_anything() -> None:
    code, modules = loaded_after("--help")
    assert code == 0
    assert modules.isdisjoint({*HEAVY, *MODULES, "pydantic", "rich"})


@pytest.mark.parametrize("command", ["up", "publish", "base", "list"])
def test_a_commands_help_imports_that_command_alone(command: str) -> None:
    code, modules = loaded_after(command, "--help")
    assert code == 0
    assert modules.isdisjoint({*HEAVY, "rich"})
    assert modules & set(MODULES) == {TABLE[command].module}


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], r".*\.(q|v)_proj"])
def test_check_imports_neither_a_client_nor_what_models_need(
    tmp_path: Path, target_modules: object
) -> None:
    config = json.dumps(sample.config(target_modules=target_modules)).encode()
    folder = sample.write(tmp_path / "a", sample.files(config=config, declaration=None))
    catalog = tmp_path / "catalog.json"
    catalog.write_bytes(sample.catalog().to_bytes())
    code, modules = loaded_after("check", str(folder), "--catalog", str(catalog), "--json")
    assert code == 0
    assert modules.isdisjoint({*HEAVY, "rich"})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("adapterctl ba", {"base"}),
        ("adapterctl tenant ", {"create", "list", "suspend", "policy"}),
        ("adapterctl check --base-", {"--base-config", "--base-digest"}),
    ],
)
def test_the_shell_completes_commands_groups_and_options(words: str, expected: set[str]) -> None:
    environment = os.environ | {
        "_ADAPTERCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    program = "from cli.main import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert set(done.stdout.split()) == expected
