"""The node as a process of its own: it comes up, answers, and ends, whatever hangs."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.stack import port_free
from gpu_worker.serving import startup
from registry_service.domain.digests import Digest
from tests.integration import serving_world as sw

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

# The real main on an in-memory registry; only the client is another, and what the test breaks.
PROGRAM = """
import contextlib, sys, threading, time
from pathlib import Path
from tests.integration import serving_world as sw
from gpu_worker.serving import startup
root = Path(sys.argv[1])
class Client(sw.FakeRegistry):
    def __enter__(self): return self
    def __exit__(self, *_): return None
fake = Client(root / "keys", sw.prove(root / "base"))
(root / "trust.json").write_bytes(fake.trust_json())
if (root / "adapter").exists():
    fake.publish({path.name: path.read_bytes() for path in (root / "adapter").iterdir()})
startup.RegistryClient = lambda url, token: fake
def hang(*_, **__): threading.Event().wait()
def compute():
    import torch
    (root / "here").touch()
    some = torch.rand(400, 400)
    while True: some = (some @ some).softmax(-1)
def die(*_): raise SystemError("injected")
def stand_until(go):
    from gpu_worker.serving.requests import Requests
    run = Requests._run
    def stand(self, step):
        while not go.exists(): time.sleep(0.01)
        run(self, step)
    Requests._run = stand
def last():
    from gpu_worker.serving.engine import Engine
    from tests.integration import engine_world as ew
    start = Engine.start
    def started(self):
        start(self)
        lasting.enter_context(ew.lasting(self))
    Engine.start = started
lasting = contextlib.ExitStack()
exec(sys.argv[2])
startup.process_end(startup.main(sys.argv[3:]))
"""


@dataclass
class Process:
    """A node in a process of its own, and a caller."""

    registry: sw.FakeRegistry
    process: subprocess.Popen[bytes]
    url: str

    def ask(self, digest: Digest | None = None, **fields: Any) -> httpx.Response:
        """A request's answer, whole."""
        asked = {"prompt": "w1 w2 w3", "max_tokens": 400, "temperature": 0, **fields}
        body = json.dumps(asked).encode()
        return httpx.post(
            f"{self.url}/v1/completions",
            content=body,
            headers={"Routing-Context": self.registry.context(body, digest)},
            timeout=600,
        )

    def count(self, *queues: str) -> int:
        """How many requests are there."""
        text = httpx.get(f"{self.url}/metrics").text
        names = [f'queue="{queue}"' for queue in queues]
        lines = [line for line in text.splitlines() if any(name in line for name in names)]
        return sum(int(float(line.split()[-1])) for line in lines)

    def listens(self) -> bool:
        """Whether a caller can reach it."""
        address = httpx.URL(self.url)
        with (
            suppress(ConnectionRefusedError),
            socket.create_connection((address.host, address.port)),
        ):
            return True
        return False

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def node(
    root: Path,
    *options: str,
    broken: str = "",
    kind: str = "llama",
    until: str = "",
    **environment: str,
) -> Iterator[Process]:
    """A node that is up, or wrote the file ``until``, until the end of the context.

    ``broken`` is run before it starts.
    """
    base = sw.prove(sw.base_make(root / "base", kind))
    (root / "token").write_text("token\n")
    port = port_free()
    arguments = ["--url", "http://r", "--token-file", str(root / "token"), "--name", sw.NODE]
    arguments += ["--base", str(base.dir), "--port", str(port), "--device", "cpu", *options]
    arguments += ["--trust", str(root / "trust.json"), "--store", str(root / "store")]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), broken, *arguments],
        env={
            "PYTHONPATH": f"{Path(__file__).parent}:{Path.cwd()}",
            "PATH": "/usr/bin:/bin",
            # Others run beside it: a thread that waits leaves them the processor.
            "OMP_WAIT_POLICY": "passive",
        }
        | environment,
        stderr=(root / "log").open("wb"),
    )
    try:
        if until:
            _until((root / until).exists)
        else:
            _until_ready(f"http://127.0.0.1:{port}", process, root / "log")
        registry = sw.FakeRegistry(root / "caller", base)
        registry.routing_signer = sw.FileSigner.load(root / "keys" / "routing.pem")
        yield Process(registry, process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def adapter_make(root: Path, kind: str = "llama") -> Digest:
    """An adapter that the node's registry has; its digest."""
    base = sw.prove(sw.base_make(root / "base", kind))
    sw.peft_make(base.dir, root / "peft", 0)
    files = sw.adapter_files(base, root / "peft")
    (root / "adapter").mkdir()
    for name, content in files.items():
        (root / "adapter" / name).write_bytes(content)
    return sw.FakeRegistry(root / "publisher", base).publish(files)


def test_sigterm_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    with (
        node(tmp_path, "--drain-seconds", "3600", broken="stand_until(root / 'go')") as started,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(started.ask)
        _until(lambda: started.count("running") == 1)
        started.terminate()
        _until(lambda: not started.listens())
        assert not answer.done()
        (tmp_path / "go").touch()
        assert answer.result().status_code == 200
        assert answer.result().json()["usage"]["completion_tokens"] == 400
        assert started.process.wait(60) == 0
    assert f"node {sw.NODE} stopped" in (tmp_path / "log").read_text()


def test_what_does_not_finish_in_time_is_told_so(tmp_path: Path) -> None:
    with (
        node(tmp_path, "--drain-seconds", "1", broken="last()") as started,
        ThreadPoolExecutor(9) as pool,
    ):
        asked = {"max_tokens": 1000, "n": 8, "temperature": 1}
        whole = [pool.submit(started.ask, **asked) for _ in range(7)]
        stream = pool.submit(started.ask, stream=True, **asked)
        _until(lambda: started.count("waiting", "running") == 8)
        started.terminate()
        answers = [each.result() for each in whole]
        last = stream.result().text.strip().split("\n\n")[-1]
        assert started.process.wait(60) == 0
    cut = [answer for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in cut} == {503}
    assert {answer.json()["error"]["code"] for answer in cut} <= {"cancelled", "unavailable"}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in cut)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "cancelled"


def test_what_waits_for_an_adapter_is_handed_back_at_once(tmp_path: Path) -> None:
    digest = adapter_make(tmp_path)
    # The pull never ends.
    with (
        node(tmp_path, "--drain-seconds", "3600", broken="fake.pull = hang") as started,
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = [pool.submit(started.ask, digest, stream=stream) for stream in (False, True)]
        _until(lambda: started.count("starting") == 2)
        started.terminate()
        answers = [each.result() for each in waiting]
        assert started.process.wait(60) == 0
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"]["code"] for answer in answers} == {"unavailable"}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in answers)


@pytest.mark.parametrize(
    ("broken", "queues"),
    [
        ("from gpu_worker.serving.slots import Slots; Slots.restore = hang", ["starting"]),
        (
            "from gpu_worker.serving.requests import Requests; Requests._run = hang",
            ["waiting", "running"],
        ),
    ],
    ids=["disk", "model"],
)
def test_whatever_hangs_is_handed_back_and_does_not_keep_the_process(
    tmp_path: Path, broken: str, queues: list[str]
) -> None:
    options = ("--drain-seconds", "1")
    broken += "; startup._STOP_SECONDS = 1"
    with node(tmp_path, *options, broken=broken) as started, ThreadPoolExecutor(2) as pool:
        hanging = [pool.submit(started.ask, stream=stream) for stream in (False, True)]
        _until(lambda: started.count(*queues) == 2)
        started.terminate()
        answers = [each.result() for each in hanging]
        assert started.process.wait(60) == 0
    assert {answer.status_code for answer in answers} == {503}
    assert {answer.json()["error"]["code"] for answer in answers} == {"cancelled"}


def test_a_node_whose_model_thread_died_ends_with_an_error(tmp_path: Path) -> None:
    broken = "from gpu_worker.serving.requests import Requests; Requests.step = die"
    with node(tmp_path, broken=broken) as started:
        assert started.ask().status_code == 503
        assert started.process.wait(60) == 1
    assert "the engine is stopped" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("work", ["(root / 'here').touch() or hang()", "compute()"])
@pytest.mark.parametrize("step", ["startup.base_load", "Engine.start"])
def test_who_interrupts_it_before_it_listens_is_told_so_at_once(
    tmp_path: Path, step: str, work: str
) -> None:
    broken = f"from gpu_worker.serving.engine import Engine\n{step} = lambda *_: {work}"
    broken += "\nstartup._STOP_SECONDS = 1"
    with node(tmp_path, broken=broken, until="here", OMP_NUM_THREADS="2") as started:
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(60) == 130
    log = (tmp_path / "log").read_text()
    assert "interrupted before it listened" in log
    assert "Traceback" not in log


def test_a_load_that_computes_does_not_keep_the_process(tmp_path: Path) -> None:
    digest = adapter_make(tmp_path)
    broken = "from gpu_worker.serving.engine import Engine; Engine.attach = lambda *_: compute()"
    broken += "; startup._STOP_SECONDS = 1"
    with node(tmp_path, broken=broken, OMP_NUM_THREADS="2") as started:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(started.ask, digest)
            _until((tmp_path / "here").exists)
            started.terminate()
            assert waiting.result().status_code == 503
        assert started.process.wait(60) == 0


def test_an_unusable_start_ends_with_a_clear_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--token-file", str(tmp_path / "none")]
    arguments += ["--name", "node-1", "--base", str(tmp_path), "--port", "1"]
    arguments += ["--trust", str(tmp_path / "trust.json"), "--store", str(tmp_path / "store")]
    assert startup.main(arguments) == 2
    assert "trust.json: cannot be read" in caplog.text
    assert startup.main([*arguments, "--preload", "t/a:prod"]) == 2
    assert "--preload: expected tenant/adapter@sha256" in caplog.text


# Tells which threads are Python's, when asked.
TELLING = """
import json, os, signal
def tell(*_):
    told = root / "threads.new"
    told.write_text(json.dumps([thread.native_id for thread in threading.enumerate()]))
    told.rename(root / "threads")
signal.signal(signal.SIGUSR1, tell)
"""


def test_the_models_thread_alone_keeps_others_that_compute_for_it(tmp_path: Path) -> None:
    digest = adapter_make(tmp_path, "wide")
    words = [f"w{number % 90}" for number in range(200)]
    # With one at each thread's side: OpenMP's, and none of another library.
    alone = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with node(tmp_path, broken=TELLING, kind="wide", **alone) as started:
        for turn, asked in enumerate((digest, None, digest, None)):
            answer = started.ask(asked, prompt=" ".join(words[: 150 + turn]), max_tokens=2)
            assert answer.status_code == 200
        _until(lambda: len(_helpers(started.process, tmp_path)) == 1)


def _helpers(process: subprocess.Popen[bytes], root: Path) -> set[int]:
    """Threads of a node that are not Python's, and bear the name of one that is."""
    (root / "threads").unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    _until((root / "threads").exists)
    pythons = json.loads((root / "threads").read_text())
    tasks = Path(f"/proc/{process.pid}/task")
    name = (tasks / str(process.pid) / "comm").read_text()
    found = set()
    for task in tasks.iterdir():
        # It may end meanwhile.
        with suppress(OSError):
            if int(task.name) not in pythons and (task / "comm").read_text() == name:
                found.add(int(task.name))
    return found


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
