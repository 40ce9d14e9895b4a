"""A node on an in-memory registry, as the tests of loading need it: small bank, many adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.admission import Admission
from gpu_worker.serving.base_load import LoadedBase, base_load
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.ledger import Category, error_of
from gpu_worker.serving.loader import Load, QueueLimits
from gpu_worker.serving.loading import Loading
from gpu_worker.serving.memory import Ledgers, ledgers_open, storages_bytes
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.parameters import BaseWatch, Unchanged, parameters_digest
from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Lease, Residents
from gpu_worker.serving.slots import Slots
from gpu_worker.serving.startup import base_admit, now
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.withdrawn import Withdrawn
from gpu_worker.serving.workspace import Workspace
from registry_service.domain.digests import Digest
from tests.identities import IDENTITY
from tests.integration import serving_world as sw
from tests.integration import slot_world as sl
from tests.waiting import until

LIMITS = LoadLimits(
    adapters=4,
    rank=8,
    sequences=100,
    queue=QueueLimits(waiting_tenant=100, waiting_each=100, per_minute=6000),
)


@dataclass
class Parts:
    """A node's parts that load, run and let go."""

    engine: Engine
    ledgers: Ledgers
    residents: Residents
    follower: Follower
    store: NodeStore
    slots: Slots
    stopped: bool = False

    def stop(self) -> None:
        # Once only: the number of a closed descriptor may be somebody else's.
        if self.stopped:
            return
        self.stopped = True
        self.residents.stop()
        self.engine.stop()
        self.slots.close()
        self.store.close()


@dataclass
class LoadWorld:
    """A running node, its registry and its base, and what the tests look at."""

    registry: sw.FakeRegistry
    node: Parts
    loaded: LoadedBase

    def acquire(self, digest: Digest, sequences: int = 1) -> Lease:
        """What a request of so many sequences does before it runs."""
        artifact = self.registry.artifacts[digest]
        return self.node.residents.acquire(
            tenant_id=artifact.tenant_id,
            tenant=artifact.tenant,
            adapter=artifact.adapter,
            digest=digest,
            template=self.registry.base.chat_template_digest,
            sequences=sequences,
        )

    @contextmanager
    def acquire_held(self, digest: Digest) -> Iterator[None]:
        """A request that has its adapter for as long as this."""
        lease = self.acquire(digest)
        try:
            yield
        finally:
            lease.release()

    def load(self, digest: Digest) -> Load:
        """What the load queue is asked for."""
        artifact = self.registry.artifacts[digest]
        return Load(self.key(digest), artifact.tenant, artifact.adapter)

    def use(self, digest: Digest) -> None:
        """A request that comes and goes."""
        self.acquire(digest).release()

    def key(self, digest: Digest) -> Key:
        return Key(self.registry.artifacts[digest].tenant_id, digest)

    def states(self) -> dict[Digest, str]:
        return {item.key.digest: str(item.state) for item in self.node.residents.residents()}

    def unload(self, digest: Digest) -> None:
        """Let go of a digest, as when other nodes hold it."""
        self.node.residents.placement_lost(self.key(digest))
        until(lambda: digest not in self.states())

    def slot_save(self, digest: Digest) -> None:
        """What the end of a session's turn leaves."""
        identity = replace(
            IDENTITY, tenant_id=self.key(digest).tenant_id, adapters=((digest, 1.0),)
        )
        assert self.node.slots.save(sl.SESSION, identity, sl.state_make(sl.TOKENS)) is not None

    def clean(self) -> None:
        """Nothing is resident or half-loaded, the base is as it was, the ledger tells the truth."""
        bank = self.node.engine._runner.bank
        assert self.states() == {}
        assert self.node.ledgers.device.by_owner() == {}
        assert self.node.ledgers.host.by_owner() == {}
        # Leases are given back beside whoever lets go.
        until(lambda: self.registry.placements == {})
        assert self.node.engine.references == 0
        for stack in bank.stacks.values():
            assert not stack.used
            assert not stack.a.any()
            assert not stack.b.any()
            # Without DoRA a row multiplies by one.
            assert stack.m.eq(1).all()
        assert parameters_digest(self.loaded.parameters) == self.loaded.parameters_digest
        self.ledger_check()

    def ledger_check(self) -> None:
        """The ledger's bytes are those of the tensors, by category and within the bound."""
        runner = self.node.engine._runner
        blocks = self.node.engine.memory().blocks
        measured = storages_bytes(
            {
                "base": [tensor for _, tensor in self.loaded.parameters],
                "bank": [t for s in runner.bank.stacks.values() for t in (s.a, s.b, s.m)],
                "lanes": [*runner.lanes.keys, *runner.lanes.values],
            }
        )
        taken = self.node.ledgers.device.taken()
        assert taken[Category.BASE] == measured["base"]
        assert taken[Category.ADAPTER] + taken[Category.WORKSPACE] == measured["bank"]
        assert taken[Category.KV] == measured["lanes"] + blocks
        assert error_of(taken, sum(measured.values()) + blocks) < 0.05


def world_start(
    registry: sw.FakeRegistry, root: Path, base: ProvenBase, limits: LoadLimits
) -> LoadWorld:
    """A node with these limits, all but its HTTP, which takes loads."""
    client: Any = registry
    trust, loaded = registry.trust(), base_load(base, "cpu")
    store = NodeStore(root / "store", url=registry.url, node=sw.NODE)
    workspace = Workspace.of(loaded.max_tokens)
    engine = Engine(
        loaded.model,
        stop_tokens=loaded.stop_tokens,
        workspace=replace(workspace, adapters=limits.adapters, rank=limits.rank),
    )
    parameters = [tensor for _, tensor in loaded.parameters]
    ledgers = ledgers_open(engine, parameters, device="cpu", budget=limits.memory)
    held = HeldList(store, trust.list_key, trust.list_issuer, now=now)
    follower = Follower(client, store, sw.NODE, held, Withdrawn(now))
    admission = Admission(
        client,
        trust,
        base_admit(client, trust, base),
        engine,
        store,
        held,
        now=now,
        base_unchanged=BaseWatch(Unchanged(loaded.parameters), engine.stop),
    )
    loading = Loading(admission, ledgers, client, node=sw.NODE, load_limits=limits)
    slots = Slots(store.slots, store.node_key())
    residents = Residents(
        loading,
        engine,
        store,
        held,
        now=now,
        acknowledge=follower.acknowledge,
        purges=[engine],
        slots=[slots],
    )
    engine.start()
    residents.start()
    follower.list_refresh(residents)
    return LoadWorld(registry, Parts(engine, ledgers, residents, follower, store, slots), loaded)


def adapters_publish(
    registry: sw.FakeRegistry, root: Path, count: int, tenant: str = sw.TENANT, **options: Any
) -> list[Digest]:
    """So many different adapters of a tenant."""
    digests = []
    for number in range(count):
        folder = root / f"{tenant}-{number}"
        sw.peft_make(registry.base.dir, folder, number + 100, **options)
        files = sw.adapter_files(registry.base, folder, tenant=tenant)
        digests.append(registry.publish(files, tenant=tenant))
    return digests
