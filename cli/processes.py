"""Child processes of the stack: started with a log each, watched, and stopped in order."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from registry_service.domain.errors import RegistryError, UnavailableError

TAIL_LINES: Final = 20
_STOP_SECONDS: Final = 15.0
_TAIL_BYTES: Final = 16 * 1024
_PR_SET_PDEATHSIG: Final = 1


class ChildEndedError(UnavailableError):
    """A process of the stack ended by itself."""

    code = "CHILD_ENDED"


@dataclass(frozen=True, slots=True)
class Child:
    """One process, and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass
class Children:
    """The stack's processes in the order of their start; they stop in the reverse order."""

    logs: Path
    running: list[Child] = field(default_factory=list)

    def run(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bytes:
        """Run ``python -m`` with ``arguments`` to its end; its stdout.

        Raises:
            RegistryError: it failed; with the end of its log.
        """
        log = self.logs / f"{name}.log"
        with _log_open(log) as out:
            done = subprocess.run(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=out,
                env=dict(environment),
                check=False,
            )
        if done.returncode != 0:
            raise RegistryError(f"{name} failed with exit code {done.returncode}\n{tail(log)}")
        return done.stdout

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Start ``python -m`` with ``arguments`` in the background."""
        log = self.logs / f"{name}.log"
        with _log_open(log) as out:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(environment),
                # Ctrl-C is for the supervisor alone, which stops them in order.
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - before any thread is started
            )
        child = Child(name, process, log)
        self.running.append(child)
        return child

    def check(self) -> None:
        """Raise ChildEndedError when a process ended by itself, with the end of its log."""
        for child in self.running:
            code = child.process.poll()
            if code is not None:
                raise ChildEndedError(f"{child.name} ended with {code}\n{tail(child.log)}")

    def stop(self) -> None:
        """Stop all, the last one first; a process that does not listen is killed."""
        while self.running:
            child = self.running.pop()
            if child.process.poll() is not None:
                continue
            child.process.terminate()
            try:
                child.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.process.pid, signal.SIGKILL)
                child.process.wait()


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])


@contextlib.contextmanager
def _log_open(path: Path) -> Iterator[IO[bytes]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        yield file


def die_with_parent() -> None:
    """For ``preexec_fn``: end this child when its parent is gone, however that came about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
