"""What a node does before it listens: its base is the registry's, and what it held is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving import startup
from gpu_worker.serving.base_load import base_load
from gpu_worker.serving.options import Wanted
from gpu_worker.serving.residency import Key
from gpu_worker.serving.store import NodeStore
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import (
    ConflictError,
    NotFoundError,
    RefusedError,
    UntrustedError,
)
from tests.integration import serving_world as sw
from tests.integration.http_world import node_make, options_of
from tests.waiting import until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return sw.prove(sw.base_make(tmp_path_factory.mktemp("base")))


@pytest.fixture
def registry(base: ProvenBase, tmp_path: Path) -> sw.FakeRegistry:
    """One that has two adapters."""
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    for seed in range(2):
        folder = tmp_path / f"peft-{seed}"
        sw.peft_make(base.dir, folder, seed)
        registry.publish(sw.adapter_files(base, folder))
    return registry


def test_a_base_that_the_registry_does_not_know_stops_the_start(
    registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path
) -> None:
    client: Any = registry
    other = sw.prove(sw.base_make(tmp_path / "other", "gpt2"))
    with pytest.raises(RefusedError, match="no base"):
        startup.base_admit(client, registry.trust(), other)
    registry.state = "CONFLICTED"
    with pytest.raises(RefusedError, match="CONFLICTED"):
        startup.base_admit(client, registry.trust(), base)
    registry.state = "PENDING"
    assert startup.base_admit(client, registry.trust(), base).digest == base.digest
    registry.state = "USABLE"
    own, other_catalog = sw.identity(base).catalog_digest, digest_of(b"other")
    registry.statement_changes = {"catalog_digest": other_catalog}
    with pytest.raises(RefusedError, match="expected catalog"):
        startup.base_admit(client, registry.trust(), base)
    registry.statement_changes["earlier_catalog_digests"] = (own,)
    assert startup.base_admit(client, registry.trust(), base).catalog_digest == own
    forged = sw.FakeRegistry(tmp_path / "forged", base)
    with pytest.raises(UntrustedError):
        startup.base_admit(client=forged, trust=registry.trust(), proven=base)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose


def test_preload(registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path) -> None:
    digests = list(registry.artifacts)
    wanted = [Wanted(sw.TENANT, sw.ADAPTER, digest) for digest in digests]
    loaded = base_load(base, "cpu")
    node = node_make(registry, tmp_path, loaded)
    node.start(options_of(tmp_path, base, *wanted))
    assert all(node.residents.serving(Key(sw.TENANT_ID, digest)) for digest in digests)
    assert len(registry.catalogs) == 1
    assert registry.registered == [(sw.NODE, node.base.catalog_digest)]
    assert [item["state"] for item in registry.heartbeats[0]] == ["SERVING", "SERVING"]
    with pytest.raises(ConflictError):
        NodeStore(tmp_path / "store", url=registry.url, node=sw.NODE)
    node.stop()
    registry.heartbeats.clear()
    registry.revoke(digests[1])
    again = node_make(registry, tmp_path, base_load(base, "cpu"))
    with pytest.raises(NotFoundError):
        again.start(options_of(tmp_path, base, *wanted))
    assert registry.heartbeats == []
    again.stop()


def test_a_preload_that_was_revoked_meanwhile_stops_the_start(
    registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path
) -> None:
    digest = next(iter(registry.artifacts))
    registry.overdue = [
        {"tenantId": str(sw.TENANT_ID), "adapterDigest": digest, "deadlineSeconds": None}
    ]
    node = node_make(registry, tmp_path, base_load(base, "cpu"))
    with pytest.raises(RefusedError, match="revoked meanwhile"):
        node.start(options_of(tmp_path, base, Wanted(sw.TENANT, sw.ADAPTER, digest)))
    node.stop()


def test_files_of_an_earlier_run_are_reported_and_purged(
    registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path
) -> None:
    digest = next(iter(registry.artifacts))
    node = node_make(registry, tmp_path, base_load(base, "cpu"))
    folder = node.store.folder(Key(sw.TENANT_ID, digest))
    registry.pull(sw.TENANT, sw.ADAPTER, digest, folder)
    registry.overdue = [
        {"tenantId": str(sw.TENANT_ID), "adapterDigest": digest, "deadlineSeconds": None}
    ]
    node.start(options_of(tmp_path, base))
    assert registry.heartbeats[0][0]["state"] == "STORED"
    until(lambda: bool(registry.acknowledged))
    assert not folder.exists()
    node.stop()
