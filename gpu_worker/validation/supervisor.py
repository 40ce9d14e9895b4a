"""The worker's side of the zygote: starts it, hands it jobs, replaces it. Opens no adapter."""

from __future__ import annotations

import json
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_worker.base_files import ProvenBase
from gpu_worker.validation.sandbox import BASE_DIR, INPUTS_DIR, Sandbox
from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.manifest import FileEntry
from registry_service.domain.text import bounded

START_SECONDS: Final = 900
CATALOG_SECONDS: Final = 300
_GRACE_SECONDS: Final = 30
_TAIL_BYTES: Final = 4096
_TICK_SECONDS: Final = 0.1
_ANSWER_BYTES: Final = limits.CHILD_RESULT_BYTES + 64 * limits.KIB

Stopped = Callable[[], bool]


class ZygoteFaultError(Exception):
    """The zygote or its child ended abnormally: a fault of ours, never a finding."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a zygote said when it stood: its device and its versions."""

    device: str
    versions: dict[str, str]


class Zygote:
    """One running zygote for one base. Used from one thread, the one that started it."""

    def __init__(
        self,
        sandbox: Sandbox,
        base: ProvenBase,
        inputs: Path,
        *,
        device: str,
        spawn: bool = False,
        wall_seconds: float = limits.CHILD_WALL_SECONDS,
    ) -> None:
        self.base = base
        self._sandbox = sandbox
        self._inputs = inputs
        self._wall_seconds = wall_seconds
        self._process = _Process(
            sandbox, base, inputs, ["-m", "gpu_worker.validation.zygote"], keep_open=True
        )
        self._process.send(
            {
                "baseDir": sandbox.path_inside(BASE_DIR, base.dir),
                "baseFiles": {entry.path: entry.digest for entry in base.files},
                "device": device,
                "spawn": spawn,
                "sandbox": sandbox.active,
            }
        )

    @property
    def pid(self) -> int:
        """The outermost process."""
        return self._process.pid

    def ready(self, stopped: Stopped = lambda: False) -> Ready:
        """Wait until the base is loaded.

        Raises:
            ZygoteFaultError: it did not come up.
        """
        answer = self._answer(START_SECONDS, stopped)
        versions = answer.get("versions")
        if answer.get("outcome") != "ready" or not isinstance(versions, dict):
            raise ZygoteFaultError("the zygote did not say that it is ready")
        named = {bounded(str(k), 32): bounded(str(v), 64) for k, v in versions.items()}
        return Ready(bounded(str(answer.get("device")), 64), named)

    def run(
        self, folder: Path, files: Sequence[FileEntry], stopped: Stopped = lambda: False
    ) -> dict[str, Any]:
        """Check the adapter whose files lie in ``folder``, a folder of the inputs.

        Raises:
            ZygoteFaultError: a fault; this zygote is of no more use.
        """
        name = folder.relative_to(self._inputs)
        self._process.send(
            {
                "dir": self._sandbox.path_inside(INPUTS_DIR / name, folder),
                "files": [{"path": f.path, "digest": f.digest, "size": f.size} for f in files],
                "wallSeconds": self._wall_seconds,
            }
        )
        answer = self._answer(self._wall_seconds + _GRACE_SECONDS, stopped)
        result = answer.get("result")
        if answer.get("outcome") != "done" or not isinstance(result, dict):
            raise ZygoteFaultError(bounded(str(answer.get("reason", "no reason given")), 500))
        return result

    def close(self) -> None:
        """End it and everything in its sandbox."""
        self._process.end()

    def _answer(self, seconds: float, stopped: Stopped) -> dict[str, Any]:
        try:
            value = json_parse(
                self._process.line(seconds, stopped), what="zygote", limit=_ANSWER_BYTES
            )
        except MalformedError as error:
            raise ZygoteFaultError(error.message) from error
        if not isinstance(value, dict):
            raise ZygoteFaultError("the zygote's answer is no object")
        return value


def catalog_make(
    sandbox: Sandbox, base: ProvenBase, inputs: Path, stopped: Stopped = lambda: False
) -> bytes:
    """The catalog of a base, made in a process of its own.

    Raises:
        ZygoteFaultError: the process failed or took too long.
    """
    arguments = ["-m", "gpu_worker.validation.catalog_process"]
    arguments += [sandbox.path_inside(BASE_DIR, base.dir), base.digest]
    process = _Process(sandbox, base, inputs, arguments, keep_open=False)
    try:
        return process.rest(CATALOG_SECONDS, stopped)
    finally:
        process.end()


class _Process:
    """A process in the sandbox: lines in, bounded lines out, the end of its stderr kept."""

    def __init__(
        self,
        sandbox: Sandbox,
        base: ProvenBase,
        inputs: Path,
        arguments: Sequence[str],
        *,
        keep_open: bool,
    ) -> None:
        files = [entry.path for entry in base.files]
        self._process = subprocess.Popen(
            sandbox.command(arguments, base=base.dir, base_files=files, inputs=inputs),
            env=sandbox.environment(),
            stdin=subprocess.PIPE if keep_open else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C at the terminal is for the worker, which ends this one in good order.
            start_new_session=True,
            cwd="/",
        )
        self.pid = self._process.pid
        self._buffer = bytearray()
        self._tail = bytearray()
        # Drained all the time: a full pipe would stop the process.
        self._drain = threading.Thread(target=self._stderr_drain, daemon=True)
        self._drain.start()

    def send(self, value: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        try:
            if stdin is None:
                raise ZygoteFaultError("no input")
            stdin.write(json.dumps(value).encode() + b"\n")
            stdin.flush()
        except OSError as error:
            raise ZygoteFaultError(self._ended()) from error

    def line(self, seconds: float, stopped: Stopped) -> bytes:
        """The next line of its answers."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not self._more(deadline, stopped):
                raise ZygoteFaultError(self._ended())
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def rest(self, seconds: float, stopped: Stopped) -> bytes:
        """All it writes until its good end."""
        deadline = time.monotonic() + seconds
        while self._more(deadline, stopped):
            pass
        if self._process.wait(_GRACE_SECONDS) != 0:
            raise ZygoteFaultError(self._ended())
        return bytes(self._buffer)

    def end(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._drain.join(_GRACE_SECONDS)

    def _more(self, deadline: float, stopped: Stopped) -> bool:
        stdout = self._process.stdout
        if stdout is None:
            return False
        while True:
            if stopped():
                raise ZygoteFaultError("the worker gave this up")
            if time.monotonic() > deadline:
                raise ZygoteFaultError("the zygote did not answer in time")
            ready, _, _ = select.select([stdout], [], [], _TICK_SECONDS)
            if ready:
                break
        chunk = os.read(stdout.fileno(), 1 << 16)
        self._buffer += chunk
        if len(self._buffer) > max(_ANSWER_BYTES, limits.CATALOG_BYTES):
            raise ZygoteFaultError("the zygote answered with too many bytes")
        return bool(chunk)

    def _ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SECONDS)
        self._drain.join(1)
        tail = self._tail.decode("utf-8", "replace").strip()
        last = tail.splitlines()[-1] if tail else "no message"
        return f"the zygote ended (status {self._process.returncode}): {bounded(last, 300)}"

    def _stderr_drain(self) -> None:
        stderr = self._process.stderr
        if stderr is None:
            return
        with stderr:
            while chunk := os.read(stderr.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
