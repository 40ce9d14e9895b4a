"""Runs a piece of Python in a process that dies when it needs more than it may.

A bound on time is a bound on processor time, kept by the kernel: it does not depend on what else
the machine is doing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_LIMITS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
sys.path.insert(0, "tests")
"""


def run_bounded(code: str, *, cpu_seconds: int = 5, memory_mib: int = 512) -> str:
    """What ``code`` prints; fails when it ends in any other way than by itself."""
    limits = _LIMITS.format(memory=memory_mib << 20, seconds=cpu_seconds)
    done = subprocess.run(
        [sys.executable, "-c", limits + code],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout
