"""The unit tests need neither torch nor a database, which only a run of them alone shows."""

from __future__ import annotations

import subprocess
import sys

from tests.architecture.sources import ROOT


def test_the_unit_tests_can_be_collected_without_heavy_packages() -> None:
    command = [sys.executable, "-m", "pytest", "tests/unit", "--collect-only", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
