"""What the demo works with: the running stack, the people in it, and claims that must hold."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from cli.processes import die_with_parent
from cli.stack import InUseError, child_environment
from registry_service.client import RegistryClient
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import RegistryError

_READY_SECONDS: Final = 240.0
_STOP_SECONDS: Final = 90.0
_MODULE: Final = "cli.main"
_ONE_RUNS: Final = 'node_queue_length{queue="running"} 1.0'


class DemoFailedError(RegistryError):
    """A step of the demo does not hold."""

    code = "DEMO_FAILED"


@dataclass
class World:
    """Where things are, who is who, and the digests learned on the way."""

    var: Path
    profile: dict[str, Any] = field(default_factory=dict)
    publishers: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    token_seconds: float = 0.1
    started: float = field(default_factory=time.monotonic)

    @property
    def base(self) -> Path:
        return self.var / "base" / "smollm2-135m-instruct-fp32"

    @property
    def adapters(self) -> Path:
        return self.var / "demo" / "adapters"

    @property
    def stack(self) -> Path:
        return self.var / "demo" / "stack"

    @property
    def prompt(self) -> str:
        return str(self._trained()["prompt"])

    def sentence(self, name: str) -> str:
        """What an adapter has learned to say."""
        return str(self._trained()["sentences"][name]).strip()

    def client(self, role: str) -> RegistryClient:
        """A client with a role's token."""
        return RegistryClient(self.profile["url"], self.profile["tokens"][role])

    def step(self, number: int, title: str) -> None:
        """Begin a step."""
        line(f"\n[{time.monotonic() - self.started:5.1f} s] {number}. {title}")

    def command(self, token: str, *arguments: str, expect: int = 0) -> Any:
        """Run ``adapterctl`` with a token as a process of its own; its JSON.

        Raises:
            DemoFailedError: another exit code than expected.
        """
        line(f"  $ adapterctl {' '.join(arguments)}")
        environment = child_environment(
            {"ADAPTERCTL_URL": self.profile["url"], "ADAPTERCTL_TOKEN": token}
        )
        done = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE, *arguments, "--json"],
            stdout=subprocess.PIPE,
            env=environment,
            check=False,
            text=True,
        )
        if done.returncode != expect:
            raise DemoFailedError(f"expected exit code {expect}, got {done.returncode}")
        if expect:
            line(f"  ok: refused with exit code {expect}")
        return json.loads(done.stdout) if done.stdout else None

    def complete(
        self, tenant: str, adapter: str | None, reference: str | None, tokens: int
    ) -> dict[str, Any]:
        """As a gateway for the user ``alice``: mint a routing context and ask the node.

        The answer's text, and the digest that it ran on.

        Raises:
            RegistryError: the registry or the node refused.
        """
        node = self.profile["nodes"][0]
        asked = {"prompt": self.prompt, "max_tokens": tokens, "temperature": 0}
        body = json.dumps(asked).encode()
        with self.client("gateway") as client:
            minted = client.routing_context(
                tenant=tenant,
                adapter=adapter,
                reference=reference,
                node=node["name"],
                body_digest=digest_of(body),
                session_id="demo",
                subject="alice",
            )
        answer = httpx.post(
            f"{node['url']}/v1/completions",
            content=body,
            headers={
                "Content-Type": "application/json",
                "Routing-Context": minted["routingContext"],
            },
            timeout=300,
            trust_env=False,
        )
        if not answer.is_success:
            raise DemoFailedError(f"the node answered {answer.status_code}: {answer.text}")
        found = answer.json()
        return {"adapterDigest": found["system_fingerprint"], "text": found["choices"][0]["text"]}

    def residents(self) -> set[str]:
        """The digests that the node says it holds."""
        url = self.profile["nodes"][0]["url"]
        items = httpx.get(f"{url}/v1/residency", timeout=10, trust_env=False).json()["items"]
        return {item["adapterDigest"] for item in items if item["state"] is not None}

    def running_wait(self, long: Running) -> None:
        """Until the node computes the answer of ``long``: whose adapter is chosen by then.

        Raises:
            DemoFailedError: it does not for long, or the request ended. RegistryError: it failed.
        """
        url, until = self.profile["nodes"][0]["url"], time.monotonic() + _READY_SECONDS
        while long.is_alive() and time.monotonic() < until:
            metrics = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
            if f"\n{_ONE_RUNS}\n" in metrics:
                return
            time.sleep(0.05)
        if not long.is_alive():
            long.result()
        raise DemoFailedError("does not hold: the long request runs; it was not seen running")

    def _trained(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.adapters / "sentences.json").read_text("utf-8"))
        return found


class Running(threading.Thread):
    """A request that runs in the background; ``result`` waits for it."""

    def __init__(self, work: Any) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._found: Any = None
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._found = self._work()
        except Exception as error:  # noqa: BLE001 - raised again by result()
            self._error = error

    def result(self) -> Any:
        """The answer, or the error raised again."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._found


@contextmanager
def stack_running(world: World) -> Iterator[None]:
    """``adapterctl up`` as a process, from its ready line to its clean end."""
    command = [sys.executable, "-P", "-m", _MODULE, "up", "--port", "0"]
    command += ["--data-dir", str(world.stack), "--base", f"smollm2={world.base}"]
    process = _start(command)
    try:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        timer = threading.Timer(_READY_SECONDS, process.terminate)
        timer.start()
        ready = process.stdout.readline()
        timer.cancel()
        claim(ready.startswith("ready:"), "the stack is ready", "it did not start")
        line(f"  {ready.strip()}")
        world.profile = json.loads((world.stack / "profile.json").read_text("utf-8"))
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait(_STOP_SECONDS)
    claim(code == 0, "the stack stopped cleanly", f"exit code {code}")


def process_relay(arguments: Sequence[str]) -> None:
    """Run ``python -m`` with ``arguments`` and show its lines.

    Raises:
        DemoFailedError: it failed.
    """
    process = _start([sys.executable, "-P", "-m", *arguments])
    assert process.stdout is not None  # noqa: S101 - it was asked for
    try:
        for text in process.stdout:
            line(f"  {text.rstrip()}")
    finally:
        if sys.exc_info()[0] is not None:
            process.terminate()
        process.wait()
    if process.returncode != 0:
        raise DemoFailedError(f"{arguments[0]} failed with exit code {process.returncode}")


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=child_environment({}),
        text=True,
        # Ctrl-C is for the demo, which ends what it started.
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - before any thread is started
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder against another demo.

    Raises:
        InUseError: one is running there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InUseError(f"another demo runs in {folder}") from error
        yield


def claim(holds: bool, what: str, otherwise: str = "") -> None:
    """Show a claim that holds; the demo ends at the first one that does not.

    Raises:
        DemoFailedError: it does not hold.
    """
    if not holds:
        raise DemoFailedError(f"does not hold: {what}" + (f"; {otherwise}" if otherwise else ""))
    line(f"  ok: {what}")


def line(text: str) -> None:
    """A line of the demo's story, on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
