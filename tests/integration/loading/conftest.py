"""A node that takes loads, and a registry with two tenants' adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.options import LoadLimits
from registry_service.domain.digests import Digest
from tests.integration import serving_world as sw
from tests.integration.load_world import LIMITS, LoadWorld, adapters_publish, world_start


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return sw.prove(sw.base_make(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def registry(base: ProvenBase, tmp_path_factory: pytest.TempPathFactory) -> sw.FakeRegistry:
    root = tmp_path_factory.mktemp("adapters")
    made = sw.FakeRegistry(root / "registry", base)
    adapters_publish(made, root, 6, target_modules="all-linear")
    adapters_publish(made, root, 2, tenant=sw.OTHER)
    return made


@pytest.fixture
def own(registry: sw.FakeRegistry) -> Iterator[list[Digest]]:
    """One tenant's adapters. What a test does to the registry is undone."""
    registry.placements.clear()
    registry.down = False
    registry.pulls = 0
    yield [a.digest for a in registry.artifacts.values() if a.tenant == sw.TENANT]
    registry.acknowledged.clear()
    if registry.listed:
        registry.listed = ()
        registry.list_issue()


@pytest.fixture
def others(registry: sw.FakeRegistry) -> list[Digest]:
    return [a.digest for a in registry.artifacts.values() if a.tenant == sw.OTHER]


@pytest.fixture
def start(
    registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path
) -> Iterator[Callable[[LoadLimits], LoadWorld]]:
    """Starts a node; again, over the same folder, once the one before has stopped."""
    worlds: list[LoadWorld] = []

    def run(limits: LoadLimits) -> LoadWorld:
        worlds.append(world_start(registry, tmp_path, base, limits))
        return worlds[-1]

    yield run
    for world in worlds:
        world.node.stop()


@pytest.fixture
def world(own: list[Digest], start: Callable[[LoadLimits], LoadWorld]) -> LoadWorld:
    return start(LIMITS)
