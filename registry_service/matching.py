"""Matches the regular expressions of a config, in a process of its own that is killed at a bound.

Why a process: see ``docs/adr/0011-regular-expressions.md``. The expressions are evaluated by
Python's own ``re``, as PEFT does it. An adapter pays for the processor time that its expressions
take and for nothing else: a machine without room or time is a fault of ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError, UnavailableError
from registry_service.domain.expressions import Matches, pattern_expression
from registry_service.domain.peft_fields import Expression
from registry_service.domain.text import bounded, shown

_PROCESS: Final = Path(__file__).with_name("matching_process.py")
_EXPRESSION_CHARS: Final = limits.EXPRESSION_CHARS + len(pattern_expression(Expression("")))
_NEXT: Final = "write the names out as a list"


def expressions_match(expressions: Sequence[str], names: Sequence[str]) -> Matches:
    """For each expression the names that it matches from end to end; a ``Matcher``.

    Raises:
        MalformedError: an expression that does not compile, is over a limit of ``limits``, or
            needs more than ``MATCH_CPU_SECONDS`` of processor time or ``MATCH_ADDRESS_BYTES``.
        UnavailableError: a fault of ours: no process, no time on this machine, no answer.
    """
    _bounds_check(expressions, names)
    if not expressions:
        return {}
    code, lines = _run(json.dumps({"expressions": list(expressions), "names": list(names)}))
    found: dict[str, frozenset[str]] = {}
    for expression, line in zip(expressions, lines, strict=False):
        answer = _answer(line, len(names))
        if isinstance(answer, str):
            _refuse(expression, "one that Python's re takes", bounded(answer))
        found[expression] = frozenset(names[index] for index in answer)
    if code == -signal.SIGXCPU and len(lines) < len(expressions):
        _refuse(
            expressions[len(lines)],
            f"an end within {limits.MATCH_CPU_SECONDS} s of processor time on {len(names)} names",
            "more",
        )
    if code != 0 or len(lines) != len(expressions):
        raise UnavailableError(f"the matching process ended with {code} before it had answered")
    return found


def _bounds_check(expressions: Sequence[str], names: Sequence[str]) -> None:
    longest = max(expressions, key=len, default="")
    if len(longest) > _EXPRESSION_CHARS:
        expected = f"up to {limits.EXPRESSION_CHARS} characters"
        _refuse(longest, expected, f"{len(longest)} characters")
    if len(expressions) > limits.MATCH_EXPRESSIONS:
        expected = f"up to {limits.MATCH_EXPRESSIONS} of them"
        _refuse(expressions[0], expected, f"{len(expressions)}")
    if len(expressions) * len(names) > limits.PATTERN_MATCHES:
        expected = f"up to {limits.PATTERN_MATCHES} pairs of expression and name"
        _refuse(expressions[0], expected, f"{len(expressions)} times {len(names)}")
    if len(names) > limits.CATALOG_MODULES:
        raise UnavailableError(
            f"names to match: expected up to {limits.CATALOG_MODULES}, got {len(names)}"
        )


def _refuse(expression: str, expected: str, got: str) -> NoReturn:
    raise MalformedError(
        f"regular expression {shown(expression)}: expected {expected}, got {got}; {_NEXT}"
    )


def _run(request: str) -> tuple[int, list[bytes]]:
    """The process's exit code (negative: its signal), and the whole lines of its answer."""
    command = [
        *(sys.executable, "-I", "-S", "-W", "ignore", str(_PROCESS)),
        *(str(limits.MATCH_CPU_SECONDS), str(limits.MATCH_ADDRESS_BYTES)),
        str(limits.MATCH_ANSWER_BYTES),
    ]
    try:
        with _memory("request") as asked, _memory("answer") as answered:
            asked.write(request.encode("ascii"))
            asked.seek(0)
            done = subprocess.run(
                command,
                stdin=asked,
                stdout=answered,
                stderr=subprocess.DEVNULL,
                env={},
                timeout=limits.MATCH_WALL_SECONDS,
                check=False,
            )
            answered.seek(0)
            content = answered.read(limits.MATCH_ANSWER_BYTES)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"the matching process had no end after {limits.MATCH_WALL_SECONDS} s; try again"
        ) from error
    except OSError as error:
        raise UnavailableError(f"no matching process: {error.strerror}; try again") from error
    return done.returncode, content.split(b"\n")[:-1]


def _memory(name: str) -> IO[bytes]:
    """A file in memory: unlike a pipe it never blocks a writer, and its size has a limit."""
    return os.fdopen(os.memfd_create(name), "w+b")


def _answer(line: bytes, names: int) -> list[int] | str:
    """One line of the answer, trusted no more than what the process was given.

    Raises:
        UnavailableError: another form.
    """
    try:
        answer: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UnavailableError("the matching process gave an answer that is not JSON") from error
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list) and all(type(i) is int and 0 <= i < names for i in answer):
        return answer
    raise UnavailableError("the matching process gave an answer in another form")
