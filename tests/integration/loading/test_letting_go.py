"""What goes holds up nobody: many at once, slow answers, and what never was here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from gpu_worker.serving.ledger import Category
from gpu_worker.serving.loader import Ticket
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sequence import Job
from gpu_worker.serving.workspace import BLOCK_TOKENS
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import NotFoundError, UnavailableError
from registry_service.trust.revocation_list import Revoked
from tests.integration import serving_world as sw
from tests.integration.load_world import LIMITS, LoadWorld
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]
START = Callable[[LoadLimits], LoadWorld]
FEW = LoadLimits(adapters=2, rank=8, queue=LIMITS.queue)


def drains() -> set[threading.Thread]:
    """The threads that let go, of every node of this process."""
    return {thread for thread in threading.enumerate() if thread.name == "drain"}


def test_what_is_acknowledged_is_what_was_there(world: LoadWorld, own: list[Digest]) -> None:
    key, engine = world.key(own[0]), world.node.engine
    with world.acquire_held(own[0]):
        # Whole blocks of two prompts, one of them twice.
        for first, tokens in ((1, 3 * BLOCK_TOKENS), (2, BLOCK_TOKENS), (1, 3 * BLOCK_TOKENS)):
            prompt = (first,) * (tokens + 1)
            list(
                engine.submit(Job(prompt, 1, key, root_key=b"root", tenant=key.tenant_id)).tokens()
            )
        # Another's stay, and are not counted.
        list(engine.submit(Job((3,) * (BLOCK_TOKENS + 1), 1, root_key=b"base")).tokens())
    ledger = world.node.ledgers.device.by_owner()[key]
    assert ledger[Category.KV] > 0
    world.registry.purged.clear()
    world.node.residents.revoke(key, None)
    until(lambda: bool(world.registry.acknowledged))
    assert world.registry.acknowledged == [
        (str(key.tenant_id), key.digest, ledger[Category.ADAPTER])
    ]
    assert world.registry.purged == [4]
    assert len(engine._prefix) == 1


def test_of_an_old_log_nothing_goes_and_everything_is_refused(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    purged: list[Any] = []
    monkeypatch.setattr(world.node.engine, "purge", purged.append)
    unknown = [digest_of(b"%d" % number) for number in range(300)]
    events = [event(number, digest) for number, digest in enumerate([*unknown, own[0]], 1)]
    monkeypatch.setattr(world.registry, "events", events)
    world.node.follower.feed_read(world.node.residents, 0)
    assert not world.node.residents.letting_go
    assert (purged, world.registry.acknowledged) == ([], [])
    with pytest.raises(NotFoundError):
        world.acquire(own[0])


def test_what_the_registry_waits_for_is_acknowledged_though_nothing_of_it_is_here(
    world: LoadWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    purged: list[Any] = []
    monkeypatch.setattr(world.node.engine, "purge", purged.append)
    owed = [digest_of(b"%d" % number) for number in range(20)]
    named = [
        {"tenantId": str(sw.TENANT_ID), "adapterDigest": digest, "deadlineSeconds": None}
        for digest in owed
    ]
    monkeypatch.setattr(world.registry, "overdue", named)
    world.node.follower.heartbeat(world.node.residents)
    until(lambda: not world.node.residents.letting_go)
    assert {digest for _, digest, _ in world.registry.acknowledged} == set(owed)
    assert {freed for _, _, freed in world.registry.acknowledged} == {0}
    assert purged == []


def test_an_acknowledgement_that_is_not_heard_is_told_when_the_heartbeat_names_it(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.use(own[0])
    size = world.node.residents.residents()[0].size
    world.registry.down = True
    world.node.residents.revoke(world.key(own[0]), None)
    until(lambda: world.states() == {} and not world.node.residents.letting_go)
    assert world.registry.acknowledged == []
    world.registry.down = False
    world.node.residents.revoke(world.key(own[0]), None, owed=True)
    until(lambda: bool(world.registry.acknowledged))
    assert world.registry.acknowledged == [(str(sw.TENANT_ID), own[0], size)]


def test_many_that_go_at_once_take_few_threads_and_who_waits_holds_up_none(
    world: LoadWorld, own: list[Digest]
) -> None:
    with ExitStack() as leases:
        # More than there are threads wait for requests that run.
        for digest in own[:3]:
            leases.enter_context(world.acquire_held(digest))
        world.use(own[3])
        kept = [Key(sw.TENANT_ID, digest_of(b"%d" % number)) for number in range(50)]
        for key in kept:
            world.node.store.folder(key).mkdir(parents=True)
        most, before = 0, drains()
        for key in (*(world.key(digest) for digest in own[:4]), *kept):
            world.node.residents.revoke(key, None)
            most = max(most, len(drains() - before))
        until(lambda: len(world.registry.acknowledged) == 1 + len(kept))
        assert most <= 2
        assert world.states() == dict.fromkeys(own[:3], "DRAINING")
        # A deadline that is sooner counts for one of them alone.
        world.node.residents.revoke(world.key(own[1]), 0)
    until(lambda: not world.node.residents.letting_go)
    world.clean()
    until(lambda: not drains() - before)


def test_an_answer_that_hangs_when_a_lease_is_given_back_stops_no_load(
    own: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(FEW)
    go, release = threading.Event(), world.registry.placement_release
    asked: list[str] = []

    def hanging(node: str, tenant: str, digest: str) -> None:
        asked.append(digest)
        assert go.wait(60)
        release(node, tenant, digest)

    monkeypatch.setattr(world.registry, "placement_release", hanging)
    for digest in own[:5]:
        world.use(digest)
    # A lease that waits to be given back is kept when its adapter comes back before.
    world.use(own[1])
    assert world.states() == {own[4]: "SERVING", own[1]: "SERVING"}
    assert asked == [own[0]]
    go.set()
    until(lambda: set(world.registry.placements) == {own[4], own[1]})
    until(lambda: not world.node.residents._loading.placements._returns._busy)
    assert own[1] not in asked


def test_a_lease_is_not_taken_while_the_one_before_is_given_back(
    own: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(FEW)
    asked, go = threading.Event(), threading.Event()
    release = world.registry.placement_release

    def slow(node: str, tenant: str, digest: str) -> None:
        asked.set()
        assert go.wait(60)
        release(node, tenant, digest)

    monkeypatch.setattr(world.registry, "placement_release", slow)
    world.use(own[0])
    world.node.residents.placement_lost(world.key(own[0]))
    assert asked.wait(30)
    until(lambda: world.states() == {})
    threading.Timer(0.2, go.set).start()
    world.use(own[0])
    assert world.registry.placements == {own[0]: sw.NODE}


@pytest.mark.parametrize("by", ["adapter", "weights", "content"])
def test_what_a_newer_list_names_is_refused_before_it_is_gone_through(
    world: LoadWorld, own: list[Digest], by: str
) -> None:
    key, other = world.key(own[0]), world.key(own[1])
    world.use(own[1])
    with world.acquire_held(own[0]):
        assert world.node.residents.usable(key)
        weights, content = world.node.store.revocable(key)
        entry = {
            "adapter": Revoked(key.digest, None, None, None, None),
            "weights": Revoked(digest_of(b"twin"), weights, None, None, None),
            "content": Revoked(digest_of(b"twin"), None, content, None, None),
        }[by]
        world.node.follower._held.take(world.registry.list_issue(entry))
        with pytest.raises(NotFoundError):
            world.acquire(own[0])
        assert not world.node.residents.usable(key)
        assert world.node.residents.usable(other)
        assert [item.references for item in world.node.residents.residents()] == [0, 1]
    world.node.residents.listed_revoke()
    until(lambda: own[0] not in world.states())
    assert not world.node.residents.usable(key)
    world.use(own[1])


def test_a_list_that_comes_with_the_end_of_a_load_counts_for_who_waited(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = world.node.residents._queue.settle

    def settle_then_list(ticket: Ticket, error: BaseException | None = None) -> None:
        # Between the load's own look at the list and that of whoever waited; not when the thread
        # makes sure of the end, which may be after the test's.
        if error is None:
            envelope = world.registry.list_issue(Revoked(own[0], None, None, None, None))
            world.node.follower._held.take(envelope)
        settle(ticket, error)

    monkeypatch.setattr(world.node.residents._queue, "settle", settle_then_list)
    with pytest.raises(NotFoundError):
        world.acquire(own[0])
    assert [item.references for item in world.node.residents.residents()] == [0]


def test_one_that_is_only_retired_lets_begin_who_has_a_lease(
    world: LoadWorld, own: list[Digest]
) -> None:
    key = world.key(own[0])
    assert not world.node.residents.usable(key)
    with world.acquire_held(own[0]):
        world.node.residents.placement_lost(key)
        assert world.node.residents.usable(key)
        world.node.residents.revoke(key, None)
        assert not world.node.residents.usable(key)
    until(lambda: world.states() == {})


def test_who_waited_in_vain_for_a_load_that_never_began_leaves_no_entry(
    own: list[Digest], start: START, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = start(FEW)
    go, pull = threading.Event(), world.registry.pull

    def slow(*arguments: Any) -> None:
        assert go.wait(60)
        pull(*arguments)

    monkeypatch.setattr(world.registry, "pull", slow)
    queue = world.node.residents._queue
    running = [threading.Thread(target=world.use, args=(digest,)) for digest in own[:2]]
    for thread in running:
        thread.start()
    # As many loads run as there are threads; the third one waits for its turn.
    until(lambda: len(world.registry.placements) == 2)
    ticket = world.node.residents._filling.ticket
    with world.node.residents._changed:
        waiting = ticket(world.load(own[2]), 1)
    assert (queue.queued, world.states()[own[2]]) == (1, "LOADING")
    with pytest.raises(UnavailableError, match="still being loaded"):
        world.node.residents._filling.wait(waiting, 1, 0.01)
    assert (queue.queued, own[2] in world.states()) == (0, False)
    go.set()
    for thread in running:
        thread.join()
    assert set(world.states()) == set(own[:2])
    world.use(own[2])


def event(index: int, digest: Digest) -> dict[str, Any]:
    """The feed's event of a revocation."""
    return {
        "index": index,
        "kind": "artifact.revoked",
        "tenantId": str(sw.TENANT_ID),
        "subject": digest,
        "body": {},
    }
