"""Regular expressions of other people: matched as Python's re does it, or refused at a bound."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from registry_service import matching
from registry_service.domain import limits
from registry_service.domain.errors import MalformedError, UnavailableError
from registry_service.matching import expressions_match

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NAMES = [f"model.layers.{n}.self_attn.{name}" for n in range(250) for name in PROJECTIONS]
ENDLESS = ".*(.*)*q_projX"


def reference(expression: str, names: list[str]) -> frozenset[str]:
    return frozenset(name for name in names if re.fullmatch(expression, name))


@pytest.mark.parametrize(
    "expression",
    [
        r".*\.q_proj",
        # Both are in public adapter configs; no engine without backtracking takes them.
        r"^(model(?=\.).*\.(k_proj|up_proj))$",
        r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
        r"(?i).*\.Q_PROJ",
        r"(?x) .* \. [qv]_proj  # with a comment",
        r"(?P<name>.*)\.(q|v)_proj",
        "",
        "\0",
        "\ud800",
        "мод.*",
        "(" * 200 + "model.*" + ")" * 200,
        "((a{1000}){1000}){1000}",
        "[\x01-\U0010ffff]*",
    ],
)
def test_an_expression_matches_what_it_matches_for_python(expression: str) -> None:
    names = [*NAMES, "", "\0", "\ud800", "модель"]
    assert expressions_match([expression], names) == {expression: reference(expression, names)}


# Python warns of a set in a set, which it may read otherwise one day; so would PEFT.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@settings(max_examples=15, deadline=None)
@given(st.lists(st.from_regex(r"[a-c.()|?+\[\]\\dw]{0,8}", fullmatch=True), max_size=4))
def test_the_answer_is_that_of_python_whatever_is_asked(expressions: list[str]) -> None:
    names = ["a", "b.c", "abc", "a.b.c", "3", "(", "\\"]
    try:
        expected = {expression: reference(expression, names) for expression in expressions}
    except re.error:
        with pytest.raises(MalformedError, match="Python's re"):
            expressions_match(expressions, names)
    else:
        assert expressions_match(expressions, names) == expected


def test_nothing_is_asked_of_a_process_without_expressions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    assert expressions_match([], NAMES) == {}


def test_an_expression_that_runs_on_is_killed_and_named() -> None:
    with pytest.raises(MalformedError, match="2 s of processor time on 1000 names") as refusal:
        expressions_match([r".*\.q_proj", ENDLESS, r".*\.v_proj"], NAMES)
    assert ENDLESS in refusal.value.message


@pytest.mark.parametrize("expression", ["((?:.*){1000}){1000}", "(.|.)*(.|.)*(.|.)*(.|.)*#"])
def test_no_kind_of_backtracking_outlives_the_bound(
    monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    monkeypatch.setattr(limits, "MATCH_CPU_SECONDS", 0)
    with pytest.raises(MalformedError, match="processor time"):
        expressions_match([expression], NAMES)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("(", "unterminated subpattern"),
        ("*a", "nothing to repeat"),
        ("(a{1000}){1000}{1000}", "multiple repeat"),
        (".*(?i)q_proj", "global flags not at the start"),
        ("(?L)a", "cannot use 'L' flag"),
        ("(?<=a+)b", "look-behind requires fixed-width"),
        ("a{99999999999999999999}", "repetition number is too large"),
        ("(" * 500 + "a" + ")" * 500, "RecursionError"),
        ("(?:(?:(?:a?){65535}){65535}){65535}", "MemoryError"),
        ("(?P<\N{RIGHT-TO-LEFT OVERRIDE}>a)", r"bad character in group name '\\u202e'"),
    ],
)
def test_an_expression_that_python_does_not_take_is_refused_with_its_reason(
    expression: str, reason: str
) -> None:
    with pytest.raises(MalformedError) as refusal:
        expressions_match([r".*\.q_proj", expression], NAMES)
    assert reason in refusal.value.message
    assert refusal.value.message.isprintable()


def test_expressions_over_a_limit_are_refused_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    for expressions, names, expected in (
        (["a" * (limits.EXPRESSION_CHARS + 100)], 1, "up to 1024 characters"),
        (["a"] * (limits.MATCH_EXPRESSIONS + 1), 1, "of them"),
        (["a"] * 1_000, 3_000, "pairs of expression and name"),
    ):
        with pytest.raises(MalformedError, match=expected):
            expressions_match(expressions, ["x"] * names)


def test_more_names_than_a_catalog_has_are_a_fault_of_ours() -> None:
    with pytest.raises(UnavailableError, match="names to match"):
        expressions_match(["a"], ["x"] * (limits.CATALOG_MODULES + 1))


def test_a_machine_without_time_room_or_program_is_a_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for target, name, value in (
        (limits, "MATCH_WALL_SECONDS", 0.3),
        (limits, "MATCH_ADDRESS_BYTES", 1),
        (limits, "MATCH_ANSWER_BYTES", 8),
        (sys, "executable", "/does/not/exist"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            # A short request would fit into what the process has before it limits itself.
            names = NAMES * 100 if name == "MATCH_ADDRESS_BYTES" else NAMES
            with pytest.raises(UnavailableError):
                expressions_match([ENDLESS if name == "MATCH_WALL_SECONDS" else ".*"], names)


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"[-1]", b"[3]", b"[true]", b"[1.0]", b"null", b"[" * 100_000]
)
def test_an_answer_in_another_form_is_a_fault_of_ours(line: bytes) -> None:
    with pytest.raises(UnavailableError, match="the matching process gave an answer"):
        matching._answer(line, 3)


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, -signal.SIGSEGV])
def test_a_process_that_ends_otherwise_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(matching, "_run", lambda request: (code, [b"[0]"]))
    with pytest.raises(UnavailableError, match=f"ended with {code}"):
        expressions_match(["a", "b"], ["a"])


def test_the_process_can_open_no_file_and_start_no_process() -> None:
    command = [sys.executable, "-I", "-S", str(matching._PROCESS), "2", str(2**29), "1000"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={})
    held = {"Max open files": "0", "Max processes": "0", "Max core file size": "0"}
    held |= {"Max file size": "1000", "Max address space": str(2**29)}
    status = Path(f"/proc/{process.pid}/limits")
    # It sets its limits before it reads; the file is there as long as it waits for its input.
    while not all(re.search(rf"{k} +{v} +{v} ", status.read_text()) for k, v in held.items()):
        assert process.poll() is None
    answer, _ = process.communicate(json.dumps({"expressions": ["a"], "names": ["a"]}).encode())
    assert (process.returncode, answer) == (0, b"[0]\n")
