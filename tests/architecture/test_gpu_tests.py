"""What runs on a borrowed CUDA machine needs five packages, and what these bring with them."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution, packages_distributions

import pytest
from packaging.requirements import Requirement

from tests.architecture.sources import ROOT

PACKAGES = ("torch", "transformers", "peft", "safetensors", "pytest")
# None instead of a module is how Python says that there is none.
_IMPORTED = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import tests.gpu.test_checks_gpu, tests.gpu.test_engine_gpu, tests.gpu.test_ledger_gpu
"""


def brought() -> set[str]:
    """The packages and whatever they cannot do without, by their normal names."""
    found: set[str] = set()
    left = list(PACKAGES)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        wanted = map(Requirement, distribution(name).requires or ())
        left += [r.name for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.torch
def test_the_tests_for_cuda_need_five_packages_and_what_these_bring() -> None:
    there = {"adapter-registry", *brought()}
    absent = [
        name
        for name, packages in packages_distributions().items()
        if not there & {package.lower().replace("_", "-") for package in packages}
    ]
    assert {"fastapi", "sqlalchemy", "cryptography"} <= set(absent)
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *absent],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
