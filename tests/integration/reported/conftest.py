"""Adapters that each say a word of their own, in a registry in which nothing was revoked yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration import engine_world as ew
from tests.integration import serving_world as sw
from tests.integration.scene_world import Scene, scene_make


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    with ew.one_thread():
        return scene_make(tmp_path_factory.mktemp("published"))


@pytest.fixture
def scene(published: Scene, tmp_path: Path) -> Iterator[Scene]:
    registry = sw.FakeRegistry(tmp_path / "registry", published.registry.base)
    registry.artifacts = {d: replace(a) for d, a in published.registry.artifacts.items()}
    with ew.one_thread():
        yield replace(published, registry=registry)
