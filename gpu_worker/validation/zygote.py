"""The zygote: holds torch, PEFT and one base; makes a throw-away child for every job.

Starts in the sandbox and speaks JSON lines: its settings and then jobs on stdin, answers on stdout.
It never reads an adapter's bytes: a forked child does, bounded, and answers through a pipe. After
any abnormal end of a child this process ends too, and its owner starts a new one. On CUDA, where a
fork would break the driver's state, the child is started afresh and loads the base itself.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpu_worker.validation.confine import child_confine, process_expendable, process_seal
from registry_service.domain import limits

_LINE_BYTES: Final = limits.MIB
_READ_BYTES: Final = 1 << 16
_CHILD_FLAG: Final = "--child"


def main() -> int:
    """Run as the zygote, or with ``--child`` as a started child."""
    process_expendable()
    process_seal()
    lines = sys.stdin.buffer
    # Answers leave through a descriptor of their own: a library's print cannot forge one.
    answers = os.dup(1)
    os.dup2(2, 1)
    settings = _line(lines)
    if settings is None:
        return 0
    if _CHILD_FLAG in sys.argv:
        return _started_child(settings, answers)
    return _serve(settings, lines, answers)


def _serve(settings: dict[str, Any], lines: Any, answers: int) -> int:
    base, ready = _prepare(settings)
    _answer(answers, {"outcome": "ready", **ready})
    settings = {**settings, "device": ready["device"].split(":")[0]}
    while (job := _line(lines)) is not None:
        outcome = _job(settings, base, job, lines.fileno(), answers)
        _answer(answers, outcome)
        if outcome["outcome"] == "fault":
            return 1
    return 0


def _prepare(settings: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Load libraries and, where children are forked, the base. Imports are late: see ``main``."""
    import torch

    from gpu_worker.validation import loading
    from gpu_worker.validation.versions import device_name, versions

    torch.set_num_threads(1)
    device = loading.device_choose(settings["device"])
    started = settings["spawn"] or device == "cuda"
    base = None if started else _load(settings, device)
    ready = {"device": device_name(device), "versions": versions(device), "spawn": started}
    if base is not None:
        # What is there now is never freed: collecting it would only copy shared pages.
        gc.collect()
        gc.freeze()
    return base, ready


def _load(settings: Mapping[str, Any], device: str) -> Any:
    import torch

    from gpu_worker.validation import checking, loading  # noqa: F401 (warm for the children)

    torch.set_num_threads(1)
    return loading.base_load(Path(settings["baseDir"]), settings["baseFiles"], device)


def _job(
    settings: Mapping[str, Any], base: Any, job: dict[str, Any], jobs_in: int, answers: int
) -> dict[str, Any]:
    source, sink = os.pipe()
    if base is None:
        child = _spawn(settings, job, sink)
    else:
        child = os.fork()
        if child == 0:
            os.close(source)
            _forked_child(base, job, sink, (jobs_in, answers))
    os.close(sink)
    content, reason = _collect(source, time.monotonic() + float(job["wallSeconds"]))
    os.close(source)
    if reason is not None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _strays_end(settings)
    return _outcome(content, reason, status)


def _forked_child(base: Any, job: dict[str, Any], sink: int, inherited: tuple[int, ...]) -> None:
    code = 70
    try:
        # The parent's channels are closed first: a child must not be able to answer for it.
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (*inherited, 0, 1, 2):
            os.dup2(nothing, descriptor)
        child_confine(adapter_bytes=_adapter_bytes(job), cuda=False)
        from gpu_worker.validation.checking import adapter_check

        _send(sink, adapter_check(base, job))
        code = 0
    finally:
        os._exit(code)


def _spawn(settings: Mapping[str, Any], job: dict[str, Any], sink: int) -> int:
    command = [sys.executable, "-B", "-P", "-s", "-m", "gpu_worker.validation.zygote", _CHILD_FLAG]
    # Its answer goes to the pipe as its stdout; the job comes with the settings as one line.
    source, feed = os.pipe()
    process = subprocess.Popen(command, stdin=source, stdout=sink, close_fds=True)
    os.close(source)
    with os.fdopen(feed, "wb") as file, suppress(BrokenPipeError):
        file.write(json.dumps({**settings, "job": job}).encode() + b"\n")
    process.returncode = 0  # we wait for it ourselves
    return process.pid


def _started_child(settings: dict[str, Any], answers: int) -> int:
    job = settings["job"]
    base = _load(settings, settings["device"])
    child_confine(adapter_bytes=_adapter_bytes(job), cuda=settings["device"] == "cuda")
    from gpu_worker.validation.checking import adapter_check

    _send(answers, adapter_check(base, job))
    return 0


def _adapter_bytes(job: Mapping[str, Any]) -> int:
    return sum(int(file["size"]) for file in job["files"])


def _collect(source: int, deadline: float) -> tuple[bytes, str | None]:
    """What the child wrote, and the reason to end it where there is one."""
    content = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return bytes(content), "the child ran past its time"
        ready, _, _ = select.select([source], [], [], left)
        if not ready:
            continue
        chunk = os.read(source, _READ_BYTES)
        if not chunk:
            return bytes(content), None
        content += chunk
        if len(content) > limits.CHILD_RESULT_BYTES:
            return b"", "the child answered with too many bytes"


def _outcome(content: bytes, reason: str | None, status: int) -> dict[str, Any]:
    if reason is None and os.WIFSIGNALED(status):
        reason = f"the child was ended by signal {os.WTERMSIG(status)}"
    if reason is None and os.waitstatus_to_exitcode(status) != 0:
        reason = f"the child ended with status {os.waitstatus_to_exitcode(status)}"
    if reason is not None:
        return {"outcome": "fault", "reason": reason}
    try:
        return {"outcome": "done", "result": json.loads(content)}
    except (ValueError, RecursionError):
        return {"outcome": "fault", "reason": "the child's answer is not JSON"}


def _strays_end(settings: Mapping[str, Any]) -> None:
    """End whatever a child left running. Only as the first process of a namespace of our own."""
    if not settings["sandbox"] or os.getppid() != 1:
        return
    if Path("/proc/1/comm").read_text(encoding="ascii").strip() != "bwrap":
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(-1, signal.SIGKILL)


def _send(sink: int, value: dict[str, Any]) -> None:
    with os.fdopen(sink, "wb") as file:
        file.write(json.dumps(value, allow_nan=False).encode())


def _answer(answers: int, value: dict[str, Any]) -> None:
    content = json.dumps(value, allow_nan=False).encode() + b"\n"
    while content:
        content = content[os.write(answers, content) :]


def _line(lines: Any) -> dict[str, Any] | None:
    content = lines.readline(_LINE_BYTES)
    if not content.endswith(b"\n"):
        return None
    value = json.loads(content)
    return value if isinstance(value, dict) else None


if __name__ == "__main__":
    raise SystemExit(main())
