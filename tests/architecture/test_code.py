"""Rules of the code that no linter knows. Each opt-out has its reason."""

from __future__ import annotations

import ast
import re
import sys

import pytest

from tests.architecture.sources import (
    ROOT,
    SHIPPED,
    dotted,
    imports,
    place,
    python_files,
    tree,
)

LINES = 500
EVERYTHING = (*SHIPPED, "tests")
TRANSACTION = frozenset({"commit", "begin", "begin_nested", "begin_twophase"})
MAY_COMMIT = {
    "registry_service/store/migrate.py": "runs as administrator, before there is a service",
}
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve"})
UNSAFE_CALLS = frozenset({"torch.load", "marshal.loads", "yaml.load", "numpy.load", "np.load"})
UNSAFE_ARGUMENTS = {
    "verify": False,
    "weights_only": False,
    "allow_pickle": True,
    "trust_remote_code": True,
    "shell": True,
}
# What a pure module may take from outside the standard library.
ALLOWED = {
    "registry_service/domain": {"pydantic", "rfc8785"},
    "registry_service/trust": {"cryptography", "jwt"},
}
# Files, processes, threads, clock and environment: no business of a pure module.
IMPURE = frozenset(
    {
        *("os", "io", "pathlib", "shutil", "tempfile", "socket", "ssl", "http", "urllib"),
        *("subprocess", "threading", "multiprocessing", "concurrent", "asyncio", "signal"),
        *("time", "random", "secrets", "logging", "sqlite3", "importlib"),
    }
)


def test_transactions_begin_and_end_in_use_cases_only() -> None:
    seen, found = set(), []
    for path in python_files("registry_service", "migrations"):
        name = str(path.relative_to(ROOT))
        if name.startswith("registry_service/usecases/"):
            continue
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in TRANSACTION
            ):
                seen.add(name)
                if name not in MAY_COMMIT:
                    found.append(place(path, node))
    assert found == []
    assert seen == set(MAY_COMMIT), "an opt-out that is not needed any more"


def test_nothing_reads_a_pickle() -> None:
    # Tests are left out: they make the pickles that have to be refused.
    found = []
    for path in python_files(*SHIPPED):
        found += [
            place(path, node)
            for node, name in imports(path)
            if name.partition(".")[0] in UNSAFE_MODULES
        ]
        found += [
            place(path, node)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and dotted(node.func) in UNSAFE_CALLS
        ]
    assert found == []


def test_no_safety_is_switched_off() -> None:
    found = [
        f"{place(path, node)}: {keyword.arg}"
        for path in python_files(*EVERYTHING)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if isinstance(keyword.value, ast.Constant)
        and keyword.arg in UNSAFE_ARGUMENTS
        and keyword.value.value is UNSAFE_ARGUMENTS[keyword.arg]
    ]
    assert found == []


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_pure_modules_import_pure_modules(folder: str) -> None:
    allowed = ALLOWED[folder] | {"registry_service"} | (sys.stdlib_module_names - IMPURE)
    found = [
        f"{place(path, node)}: {name}"
        for path in python_files(folder)
        for node, name in imports(path)
        if name.partition(".")[0] not in allowed
    ]
    assert found == []


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_pure_modules_do_not_look_at_the_clock(folder: str) -> None:
    found = [
        place(path, node)
        for path in python_files(folder)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and (
            dotted(node.func).endswith((".now", ".utcnow", ".today", "uuid.uuid4"))
            or dotted(node.func) in {"open", "input", "print", "uuid4"}
        )
    ]
    assert found == []


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_public_functions_and_classes_say_what_they_do(folder: str) -> None:
    found = [
        f"{place(path, node)}: {node.name}"
        for path in python_files(folder)
        for node in tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in python_files(*EVERYTHING)
        if tree(path).body and ast.get_docstring(tree(path)) is None
    ]
    assert found == []


def test_files_fit_a_reader() -> None:
    sizes = {path: path.read_text("utf-8").count("\n") for path in python_files(*EVERYTHING)}
    assert {
        str(path.relative_to(ROOT)): lines for path, lines in sizes.items() if lines > LINES
    } == {}


def test_nothing_is_put_off_in_a_comment() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files(*EVERYTHING)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if marks.search(line)
    ]
    assert found == []


def test_the_transition_table_is_the_databases_too() -> None:
    from registry_service.domain.lifecycle import TRANSITIONS

    rows = re.compile(r"\('([A-Z_]+)', '([a-z_]+)', '([A-Z_]+)'\)")
    sql = (ROOT / "registry_service/store/schema.sql").read_text("utf-8")
    ours = {(str(old), str(event), str(new)) for (old, event), new in TRANSITIONS.items()}
    # The root of every chain of moves is no event of the domain.
    assert set(rows.findall(sql)) == ours | {("NEW", "created", "NEW")}
