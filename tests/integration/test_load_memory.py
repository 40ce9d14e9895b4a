"""Loading and unloading leaves a node's memory as it was."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.eviction import Reason
from gpu_worker.serving.loader import QueueLimits
from gpu_worker.serving.options import LoadLimits
from tests.integration import serving_world as sw
from tests.integration.load_world import adapters_publish, world_start

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


@pytest.fixture
def base(tmp_path: Path) -> ProvenBase:
    return sw.prove(sw.base_make(tmp_path / "base"))


@pytest.mark.slow
def test_three_hundred_loads_and_unloads_leave_the_memory_as_it_was(
    base: ProvenBase, tmp_path: Path
) -> None:
    # Large ones, for this base: what all loads read together is many times the bound.
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    digests = adapters_publish(registry, tmp_path, 3, target_modules="all-linear", r=64)
    read = 100 * sum(
        len(data) for digest in digests for data in registry.artifacts[digest].files.values()
    )
    limits = LoadLimits(adapters=2, rank=64, queue=QueueLimits(per_minute=100_000))
    world = world_start(registry, tmp_path, base, limits)

    def cycles(count: int) -> int:
        for number in range(count):
            digest = digests[number % len(digests)]
            world.use(digest)
            world.unload(digest)
        return resident_bytes()

    before = cycles(60)
    after = cycles(300)
    world.clean()
    world.node.stop()
    assert world.node.residents.unloads() == {Reason.PLACEMENT_LOST: 360}
    # What one file of each load would leave behind is far over the bound.
    assert read > 2 * 0.02 * before
    assert after <= before * 1.02


def resident_bytes() -> int:
    """What the process holds once everything that can be given back is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
