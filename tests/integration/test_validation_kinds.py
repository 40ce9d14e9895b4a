"""The tests of ``tests/gpu`` on the CPU, and what they may import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.check_cases import ChecksOnDevice

pytestmark = [pytest.mark.torch]

# A machine with a GPU and nothing else than these: our own code may import no more, and of what
# the registry is made of besides nothing may be needed by anyone.
PROBE = """
import builtins, sys
OURS = {"registry_service", "gpu_worker", "tests"}
ALLOWED = {"torch", "transformers", "peft", "safetensors", "pytest"} | sys.stdlib_module_names
BLOCKED = {"pydantic", "rfc8785", "fastapi", "sqlalchemy", "cryptography", "psycopg", "alembic"}
plain = builtins.__import__
def guarded(name, scope=None, locals=None, fromlist=(), level=0):
    importer = str((scope or {}).get("__name__", "")).partition(".")[0]
    top = name.partition(".")[0]
    if level == 0 and (top in BLOCKED or (importer in OURS and top not in OURS | ALLOWED)):
        raise ModuleNotFoundError(f"{name}, imported by {(scope or {}).get('__name__')}", name=name)
    return plain(name, scope, locals, fromlist, level)
builtins.__import__ = guarded
import tests.gpu.check_cases
import tests.gpu.test_checks_gpu
from gpu_worker.validation.checking import adapter_check
print(sorted(name for name in sys.modules if name.startswith("gpu_worker.validation.checks.c")))
try:
    import registry_service.domain.catalog
except ModuleNotFoundError as error:
    print("guarded")
"""


class TestChecksOnCpu(ChecksOnDevice):
    device = "cpu"


def test_the_checks_import_nothing_but_torch_and_its_kin() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    modules, guarded = done.stdout.splitlines()
    for number in ("09", "10", "11", "12", "13", "14", "15"):
        assert f".c{number}_" in modules
    assert guarded == "guarded"  # the guard is awake: this module does need more
