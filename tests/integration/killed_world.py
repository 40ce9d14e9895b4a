"""A node of its own process on an in-memory registry, which is killed in the middle of a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cli.stack import port_free
from gpu_worker.base_files import ProvenBase
from registry_service.domain.digests import Digest
from tests.integration import serving_world as sw

# The real main. ``stand_at`` a step says that it is reached, and stands, until the file "go" is
# there; ``standing`` has a method do so before and after it. ``fake`` is the registry, which knows
# one adapter, ``digest``, and outlives the node: who holds it stands in a file.
BEFORE = """
import json, shutil, sys, time
from pathlib import Path
from tests.integration import serving_world as sw
from gpu_worker.serving import startup
root, step = Path(sys.argv[1]), sys.argv[2]
def stand_at(name):
    if step == name and not (root / "go").exists():
        (root / "reached").write_text("")
        while True:
            time.sleep(1)
def standing(kind, name, before, after="", when=lambda *_: True):
    real = getattr(kind, name)
    def stands(self, *arguments, **options):
        wanted = when(self)
        if wanted:
            stand_at(before)
        result = real(self, *arguments, **options)
        if wanted:
            stand_at(after)
        return result
    setattr(kind, name, stands)
placed = root / "placed"
class Client(sw.FakeRegistry):
    def __enter__(self): return self
    def __exit__(self, *_): return None
    def placement_take(self, node, tenant, digest):
        stand_at("place")
        self.placements = json.loads(placed.read_text()) if placed.exists() else {}
        answer = super().placement_take(node, tenant, digest)
        placed.write_text(json.dumps(self.placements))
        stand_at("placed")
        return answer
    def placement_release(self, *arguments):
        super().placement_release(*arguments)
        placed.write_text(json.dumps(self.placements))
"""
AFTER = """
shutil.rmtree(root / "keys", ignore_errors=True)
fake = Client(root / "keys", sw.prove(root / "base"))
digest = fake.publish({path.name: path.read_bytes() for path in (root / "files").iterdir()})
(root / "trust.json").write_bytes(fake.trust_json())
startup.RegistryClient = lambda url, token: fake
startup.process_end(startup.main(sys.argv[3:]))
"""


@dataclass
class KilledNode:
    """A node over a folder. ``program`` is what stands between ``BEFORE`` and ``AFTER``."""

    root: Path
    program: str
    step: str
    process: subprocess.Popen[bytes] = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.base: ProvenBase = sw.prove(sw.base_make(self.root / "base"))
        sw.peft_make(self.base.dir, self.root / "adapter", 1)
        (self.root / "files").mkdir()
        files = sw.adapter_files(self.base, self.root / "adapter")
        for name, data in files.items():
            (self.root / "files" / name).write_bytes(data)
        self.registry = sw.FakeRegistry(self.root / "unused", self.base)
        self.digest: Digest = self.registry.publish(files)
        (self.root / "token").write_text("token\n")
        self.store = self.root / "store"

    def start(self) -> None:
        """Start it, and wait until it takes requests."""
        (self.root / "reached").unlink(missing_ok=True)
        port = port_free()
        root = self.root
        arguments = ["--url", "http://r", "--token-file", str(root / "token"), "--name", sw.NODE]
        arguments += ["--base", str(self.base.dir), "--port", str(port), "--device", "cpu"]
        arguments += ["--trust", str(root / "trust.json"), "--store", str(self.store)]
        code = BEFORE + self.program + AFTER
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(root), self.step, *arguments],
            env={"PYTHONPATH": f"{Path(__file__).parent}:{Path.cwd()}", "PATH": os.defpath},
            stderr=(root / "log").open("ab"),
        )
        self.url = f"http://127.0.0.1:{port}"
        self.until(self._ready)

    def ask(self) -> httpx.Response:
        """A request for the adapter."""
        self.registry.routing_signer = sw.FileSigner.load(self.root / "keys" / "routing.pem")
        body = json.dumps({"prompt": "w1 w2 w3", "max_tokens": 4, "temperature": 0}).encode()
        headers = {"Routing-Context": self.registry.context(body, self.digest)}
        return httpx.post(f"{self.url}/v1/completions", content=body, headers=headers, timeout=60)

    def placements(self) -> dict[str, str]:
        """Which node has a lease of which adapter, as the registry has it."""
        path = self.root / "placed"
        return json.loads(path.read_text()) if path.exists() else {}

    def kill_at_step(self) -> None:
        """Kill it where it stands, once it has reached the step."""
        self.until((self.root / "reached").exists)
        self.process.send_signal(signal.SIGKILL)

    def go(self) -> None:
        """Stand nowhere from now on."""
        (self.root / "go").write_text("")

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the node does."""
        for _ in range(1200):
            if condition():
                return
            assert self.process.poll() is None, "the node ended by itself"
            time.sleep(0.05)
        raise AssertionError("nothing happened")

    def end(self) -> None:
        """Kill it, if it runs still."""
        self.process.kill()
        self.process.wait()

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz").status_code == 200
        except httpx.TransportError:
            return False
