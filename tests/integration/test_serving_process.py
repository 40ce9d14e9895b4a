"""The node as a process of its own: it comes up, answers, and finishes what runs on SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration import serving_world as sw

pytestmark = pytest.mark.torch

# The real main on an in-memory registry; only the client is another.
PROGRAM = """
import sys
from pathlib import Path
from tests.integration import serving_world as sw
from gpu_worker.serving import startup
root = Path(sys.argv[1])
class Client(sw.FakeRegistry):
    def __enter__(self): return self
    def __exit__(self, *_): return None
fake = Client(root / "keys", sw.prove(root / "base"))
(root / "trust.json").write_bytes(fake.trust_json())
startup.RegistryClient = lambda url, token: fake
sys.exit(startup.main(sys.argv[2:]))
"""


@dataclass
class Process:
    """A node in a process of its own, and a caller."""

    registry: sw.FakeRegistry
    process: subprocess.Popen[bytes]
    url: str

    def ask(self, **fields: Any) -> httpx.Response:
        """A request's answer, whole."""
        asked = {"prompt": "w1 w2 w3", "max_tokens": 400, "temperature": 0, **fields}
        body = json.dumps(asked).encode()
        return httpx.post(
            f"{self.url}/v1/completions",
            content=body,
            headers={"Routing-Context": self.registry.context(body, None)},
            timeout=60,
        )

    def running(self) -> int:
        """How many requests run."""
        text = httpx.get(f"{self.url}/metrics").text
        (line,) = [line for line in text.splitlines() if 'queue="running"' in line]
        return int(float(line.split()[-1]))


@contextmanager
def node(root: Path, *options: str) -> Iterator[Process]:
    """A node that is up, until the end."""
    base = sw.prove(sw.base_make(root / "base"))
    (root / "token").write_text("token\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--url", "http://r", "--token-file", str(root / "token"), "--name", sw.NODE]
    arguments += ["--base", str(base.dir), "--port", str(port), "--device", "cpu", *options]
    arguments += ["--trust", str(root / "trust.json"), "--store", str(root / "store")]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), *arguments],
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path.cwd()}", "PATH": "/usr/bin:/bin"},
        stderr=(root / "log").open("wb"),
    )
    try:
        _until_ready(f"http://127.0.0.1:{port}", process, root / "log")
        registry = sw.FakeRegistry(root / "caller", base)
        registry.routing_signer = sw.FileSigner.load(root / "keys" / "routing.pem")
        yield Process(registry, process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def test_sigterm_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    with node(tmp_path) as started, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(started.ask)
        _until(lambda: started.running() == 1)
        started.process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 400
        assert started.process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            started.ask()
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert last["message"] == f"node {sw.NODE} stopped"


def test_what_does_not_finish_in_time_is_told_so(tmp_path: Path) -> None:
    with node(tmp_path, "--drain-seconds", "1") as started, ThreadPoolExecutor(9) as pool:
        asked = {"max_tokens": 1000, "n": 8, "temperature": 1}
        whole = [pool.submit(started.ask, **asked) for _ in range(7)]
        stream = pool.submit(started.ask, stream=True, **asked)
        _until(lambda: started.running() > 0)
        started.process.send_signal(signal.SIGTERM)
        answers = [each.result() for each in whole]
        last = stream.result().text.strip().split("\n\n")[-1]
        assert started.process.wait(60) == 0
    cut = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in cut} == {503}
    assert {answer.json()["error"]["code"] for answer in cut} <= {"cancelled", "unavailable"}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in cut)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    _until(ready)
