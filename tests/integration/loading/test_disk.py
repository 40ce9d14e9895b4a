"""What a node keeps on its disk: within a budget, fair between tenants, and known when revoked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.residency import Key
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import RefusedError, UnavailableError
from registry_service.trust.revocation_list import Revoked
from tests.integration import serving_world as sw
from tests.integration.load_world import LIMITS, LoadWorld
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]
FEW = LoadLimits(adapters=2, rank=8, queue=LIMITS.queue)
START = Callable[[LoadLimits], LoadWorld]


def stored(world: LoadWorld) -> set[Digest]:
    return {key.digest for key in world.node.store.keys()}  # noqa: SIM118 - a store, no mapping


def size_of(world: LoadWorld, digest: Digest) -> int:
    return sum(len(data) for data in world.registry.artifacts[digest].files.values())


def test_files_that_nobody_uses_make_room_the_longest_unused_first(
    own: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORED_ADAPTERS", 3)
    world = start(FEW)
    held = world.acquire(own[0])
    for digest in own[1:4]:
        world.use(digest)
    # The first is resident: its files stay, however long it has been unused.
    assert stored(world) == {own[0], own[2], own[3]}
    held.release()
    world.use(own[2])
    world.use(own[4])
    world.use(own[5])
    assert stored(world) == {own[2], own[4], own[5]}
    assert set(world.states()) <= stored(world)


def test_a_tenant_that_creates_versions_takes_no_more_disk_than_its_share(
    own: list[Digest], others: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(FEW)
    most = max(size_of(world, digest) for digest in own)
    monkeypatch.setattr(limits, "STORE_TENANT_BYTES", 3 * most)
    world.use(others[0])
    world.unload(others[0])
    for digest in own:
        world.use(digest)
        theirs = [item for item in world.node.store.stored() if item.key.tenant_id == sw.TENANT_ID]
        assert sum(item.size for item in theirs) <= 3 * most
        assert digest in stored(world)
    assert others[0] in stored(world)


def test_a_small_disk_keeps_room_for_what_has_to_be_written(
    own: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(FEW)
    size = size_of(world, own[0])
    room = size // 2
    monkeypatch.setattr(world.node.store, "free", lambda: limits.STORE_FREE_BYTES + room)
    with pytest.raises(UnavailableError, match="no room on the disk"):
        world.acquire(own[0])
    world.clean()
    assert stored(world) == set()
    room = 2 * size
    world.use(own[0])
    world.unload(own[0])
    room = size // 2
    # What may go makes room, although the disk has none.
    world.use(own[1])
    assert stored(world) == {own[1]}


def test_a_heartbeat_names_residents_first_and_no_more_than_it_may(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert limits.STORED_ADAPTERS < limits.HEARTBEAT_RESIDENTS
    for number in range(8):
        key = Key(sw.TENANT_ID, digest_of(b"%d" % number))
        world.node.store.folder(key).mkdir(parents=True)
    world.use(own[0])
    monkeypatch.setattr(limits, "HEARTBEAT_RESIDENTS", 5)
    report = world.node.residents.report()
    assert [item["state"] for item in report] == ["SERVING", *["STORED"] * 4]
    assert report[0]["adapterDigest"] == own[0]


def test_the_same_bytes_as_revoked_ones_go_from_the_disk_though_nothing_is_resident(
    own: list[Digest], start: START
) -> None:
    world = start(FEW)
    for digest in own[:2]:
        world.use(digest)
        world.slot_save(digest)
        world.unload(digest)
    other = Digest("sha256:" + "0" * 64)
    weights, content = world.node.store.revocable(world.key(own[0]))
    assert weights == digest_of(world.registry.artifacts[own[0]].files["adapter_model.safetensors"])
    # Another package, which this node never saw, is revoked; also after a restart it is known.
    world.node.stop()
    world.registry.list_issue(Revoked(other, None, content, None, None))
    again = start(FEW)
    until(lambda: stored(again) == {own[1]})
    until(lambda: not again.node.residents.letting_go)
    assert again.node.slots.keys() == {again.key(own[1])}
    assert again.node.store.revocable(again.key(own[0])) == ()


def test_files_that_went_for_room_leave_known_what_their_slots_may_be_revoked_by(
    own: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "STORED_ADAPTERS", 2)
    world = start(FEW)
    for digest in own[:2]:
        world.use(digest)
        world.unload(digest)
    world.slot_save(own[0])
    (weights, _) = world.node.store.revocable(world.key(own[0]))
    for digest in own[2:4]:
        world.use(digest)
    assert stored(world) == set(own[2:4])
    # Of what has neither files nor slots nothing is left.
    assert set(world.node.store.revocable_keys()) == {world.key(d) for d in (own[0], *own[2:4])}
    world.registry.list_issue(Revoked(digest_of(b"twin"), weights, None, None, None))
    world.node.follower.list_refresh(world.node.residents)
    until(lambda: world.node.slots.entries() == () and not world.node.residents.letting_go)
    assert world.key(own[0]) not in world.node.store.revocable_keys()


def test_a_load_that_is_refused_as_revoked_leaves_no_files_and_no_slots(
    own: list[Digest], start: START
) -> None:
    world = start(FEW)
    world.use(own[0])
    world.slot_save(own[0])
    world.unload(own[0])
    _, content = world.node.store.revocable(world.key(own[0]))
    envelope = world.registry.list_issue(Revoked(digest_of(b"twin"), None, content, None, None))
    # It came, and what it names has not been looked for yet.
    world.node.follower._held.take(envelope)
    with pytest.raises(RefusedError, match="those of a revoked one"):
        world.acquire(own[0])
    until(lambda: world.node.slots.entries() == () and not world.node.residents.letting_go)
    world.clean()
    assert stored(world) == set()


def test_files_that_were_never_proven_do_not_outlive_a_restart(
    own: list[Digest], start: START
) -> None:
    world = start(FEW)
    world.use(own[0])
    key, unproven = world.key(own[0]), world.key(own[1])
    folder = world.node.store.folder(unproven)
    world.registry.pull(sw.TENANT, sw.ADAPTER, own[1], folder)
    record = world.node.store.folder(key).with_name(f".{folder.name}.json.new")
    record.write_bytes(b"{")
    world.unload(own[0])
    world.node.stop()
    again = start(FEW)
    assert stored(again) == {own[0]}
    assert not record.exists()
    pulls = world.registry.pulls
    again.use(own[0])
    assert world.registry.pulls == pulls
