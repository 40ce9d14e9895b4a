"""The node as a process of its own: it comes up, answers, and finishes what runs on SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
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


def test_sigterm_finishes_what_runs(tmp_path: Path) -> None:
    base = sw.prove(sw.base_make(tmp_path / "base"))
    (tmp_path / "token").write_text("token\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--url", "http://r", "--token-file", str(tmp_path / "token"), "--name", sw.NODE]
    arguments += ["--base", str(base.dir), "--port", str(port), "--device", "cpu"]
    arguments += ["--trust", str(tmp_path / "trust.json"), "--store", str(tmp_path / "store")]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *arguments],
        env={"PYTHONPATH": f"{Path(__file__).parent}:{Path.cwd()}", "PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
    )
    try:
        _until_ready(f"http://127.0.0.1:{port}", process)
        answers: list[Any] = []
        asker = threading.Thread(target=_ask, args=(tmp_path, base, port, answers))
        asker.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        asker.join(30)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert answers[0].status_code == 200
    assert answers[0].json()["completionTokens"] == 400


def _until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 40
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read() if process.stderr else b""
        try:
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the node did not come up")


def _ask(root: Path, base: Any, port: int, answers: list[Any]) -> None:
    signer = sw.FileSigner.load(root / "keys" / "routing.pem")
    body = json.dumps({"prompt": "w1 w2 w3", "max_tokens": 400}).encode()
    registry = sw.FakeRegistry(root / "unused", base)
    registry.routing_signer = signer
    answers.append(
        httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            content=body,
            headers={"Routing-Context": registry.context(body, None)},
            timeout=30,
        )
    )
