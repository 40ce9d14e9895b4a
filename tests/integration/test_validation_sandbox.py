"""What code inside the sandbox, and inside a child, cannot do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpu_worker.validation.sandbox import Sandbox, sandbox_find

PROBE = """
import ctypes, json, os, socket, sys
def attempt(act):
    try:
        return ["did", str(act())]
    except BaseException as error:  # whatever it is, it is the answer
        return ["failed", type(error).__name__]
def connect():
    with socket.create_connection(("1.1.1.1", 53), 1) as s:
        return s
def write(path):
    with open(path, "w") as file:
        return file.write("x")
from gpu_worker.validation.confine import child_confine, process_seal
process_seal()
before = {
    "environment": sorted(os.environ),
    "connect": attempt(connect),
    "secret": attempt(lambda: open(sys.argv[1]).read()),
    "root": attempt(lambda: os.listdir("/root")),
    "project": attempt(lambda: open(sys.argv[2]).read()),
    "tmp": attempt(lambda: write("/tmp/x")),
    "shm": attempt(lambda: write("/dev/shm/x")),
    "inputs": attempt(lambda: write("/sandbox/inputs/x")),
    "code": attempt(lambda: write("/sandbox/code/gpu_worker/x")),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "processes": [p for p in os.listdir("/proc") if p.isdigit()],
    "input": open("/sandbox/inputs/given").read(),
    "first": [os.getppid(), open("/proc/1/comm").read().strip()],
    "capabilities": [l for l in open("/proc/self/status") if l.startswith("CapEff")][0].split()[1],
}
child_confine(adapter_bytes=0, cuda=False)
after = {
    "socket": attempt(socket.socket),
    "run": attempt(lambda: os.execv("/bin/sh", ["sh"])),
    "kill": attempt(lambda: os.kill(1, 9)),
    "memory": attempt(lambda: len(bytearray(8 << 30))),
    "dumpable": ctypes.CDLL(None).prctl(3, 0, 0, 0, 0),
}
print(json.dumps({**before, **after}))
"""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return sandbox_find(wanted=True, cuda=False)


def test_what_a_child_cannot_do(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_DATABASE_URL", "postgresql://secret")
    monkeypatch.setenv("ADAPTERCTL_TOKEN", "secret")
    secret, inputs = tmp_path / "secret", tmp_path / "inputs"
    secret.write_text("secret")
    inputs.mkdir()
    (inputs / "given").write_text("given")
    project = str(Path(__file__).resolve().parents[2] / "pyproject.toml")
    command = sandbox.command(
        ["-c", PROBE, str(secret), project], base=tmp_path, base_files=(), inputs=inputs
    )
    done = subprocess.run(
        command, env=sandbox.environment(), capture_output=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    failed = ("connect", "secret", "root", "project", "tmp", "shm", "inputs", "code", "socket")
    for name in (*failed, "run", "kill", "memory"):
        if name == "root" and seen[name] == ["did", "['.pyenv']"]:
            continue  # the interpreter itself lies there
        assert seen[name][0] == "failed", (name, seen[name])
    assert seen["socket"][1] == seen["kill"][1] == seen["run"][1] == "PermissionError"
    assert seen["dumpable"] == 0
    assert seen["first"] == [1, "bwrap"]  # what ending a child's strays relies on
    assert seen["capabilities"] == "0" * 16
    assert seen["interfaces"] in ([], ["lo"])
    assert set(seen["processes"]) <= {"1", "2", "3"}
    assert seen["input"] == "given"
    leaked = [n for n in seen["environment"] if n.startswith(("REGISTRY_", "ADAPTERCTL_"))]
    assert leaked == []
    allowed = {"TOKENIZERS_PARALLELISM"}
    assert not [n for n in seen["environment"] if "TOKEN" in n and n not in allowed]
