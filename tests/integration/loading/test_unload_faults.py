"""Letting go that fails at every step, before it or after it: asked again, it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_worker.serving import keyed_executor
from gpu_worker.serving.bank import Stack
from gpu_worker.serving.eviction import Unloads
from gpu_worker.serving.ledger import Reservation
from gpu_worker.serving.residency import Residency
from registry_service.domain.digests import Digest
from registry_service.domain.errors import NotFoundError, UnavailableError
from tests.integration import serving_world as sw
from tests.integration.load_world import LoadWorld
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

# Every step between the last request and the acknowledgement, in their order.
UNLOAD: dict[str, Callable[[LoadWorld], tuple[object, str]]] = {
    "thread": lambda _: (keyed_executor.threading, "Thread"),
    "drain": lambda _: (Residency, "drained"),
    "detach": lambda world: (world.node.engine, "detach"),
    "row": lambda _: (Stack, "clear"),
    "ledger": lambda _: (Reservation, "release"),
    "placement": lambda world: (world.registry, "placement_release"),
    "table purge": lambda _: (Residency, "purge"),
    "table unload": lambda _: (Residency, "unload"),
    "count": lambda _: (Unloads, "count"),
}
REVOKE = UNLOAD | {
    "blocks": lambda world: (world.node.engine, "purge"),
    "slots": lambda world: (world.node.slots, "remove"),
    "slot pages": lambda world: (world.node.slots._pages, "left_remove"),
    "files": lambda world: (world.node.store, "remove"),
    "acknowledge": lambda world: (world.registry, "node_acknowledge"),
}
# What goes wrong, and whether the step was done by then.
FAULTS = tuple((error, after) for error in (RuntimeError, MemoryError) for after in (False, True))


def faults(step: str, own: list[Digest]) -> Iterator[tuple[Digest, type[Exception], bool]]:
    """Each fault, with an adapter for it. The engine either detached or did not, and says which."""
    for digest, (error, after) in zip(own, FAULTS, strict=False):
        if (step, after) != ("detach", True):
            yield digest, error, after


class Fault:
    """One fault, before a step or after it; the next time, the step is as it was."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        target: Any,
        name: str,
        error: type[Exception],
        *,
        after: bool,
    ) -> None:
        self.happened = False
        real = getattr(target, name)

        def failing(*arguments: Any, **options: Any) -> Any:
            first, self.happened = not self.happened, True
            result = None if first and not after else real(*arguments, **options)
            if first:
                raise error("fault")
            return result

        patch.setattr(target, name, failing)

    def wait(self, world: LoadWorld) -> None:
        """Until it happened, and nothing goes on."""
        until(lambda: self.happened and not world.node.residents.letting_go)


@pytest.mark.parametrize("step", REVOKE)
def test_letting_go_goes_on_where_a_fault_stopped_it(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    target, name = REVOKE[step](world)
    for digest, error, after in faults(step, own):
        if step in UNLOAD:
            world.use(digest)
            with monkeypatch.context() as patch:
                retire(world, digest, Fault(patch, target, name, error, after=after))
            gone_check(world, step)
            assert {world.key(digest)} <= {*world.node.store.keys()}
        world.use(digest)
        world.slot_save(digest)
        size = world.node.residents.residents()[0].size
        with monkeypatch.context() as patch:
            fault = Fault(patch, target, name, error, after=after)
            told = revoke(world, digest, fault, heard=step != "acknowledge")
        heard_twice = (step, after) == ("acknowledge", True)
        assert told == [(str(sw.TENANT_ID), digest, size)] * (2 if heard_twice else 1)
        gone_check(world, step)
        assert world.node.store.keys() == ()
        assert world.node.store.revocable_keys() == ()
        assert world.node.slots.entries() == ()
        with pytest.raises(NotFoundError):
            world.acquire(digest)


def retire(world: LoadWorld, digest: Digest, fault: Fault) -> None:
    """Unload what other nodes hold; what a fault stops goes on with the next heartbeat."""
    world.node.residents.placement_lost(world.key(digest))
    fault.wait(world)
    if digest in world.states():
        # Nobody is given what is half gone.
        with pytest.raises(UnavailableError, match="being unloaded"):
            world.acquire(digest)
    world.node.follower.heartbeat(world.node.residents)
    until(lambda: world.states() == {} and not world.node.residents.letting_go)


def revoke(world: LoadWorld, digest: Digest, fault: Fault, *, heard: bool) -> list[Any]:
    """Revoke, and again as heartbeat and list do until the registry answered; what it heard."""
    world.registry.acknowledged.clear()
    world.node.residents.revoke(world.key(digest), None)
    fault.wait(world)
    with pytest.raises(NotFoundError):
        world.acquire(digest)
    if not (heard and world.registry.acknowledged):
        world.node.residents.revoke(world.key(digest), 0)
        until(lambda: not world.node.residents.letting_go)
    return world.registry.acknowledged


def gone_check(world: LoadWorld, step: str) -> None:
    """Nothing is left on the node."""
    if step == "placement":
        # The lease ends by itself: the node does not report the adapter as held any more.
        assert not {"SERVING", "DRAINING"} & {r["state"] for r in world.node.residents.report()}
        world.registry.placements.clear()
    world.clean()


def test_a_load_whose_undoing_fails_too_holds_nobody_up(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Fault(patch, Residency, "load_end", RuntimeError, after=False)
        Fault(patch, world.node.engine, "detach", MemoryError, after=False)
        with pytest.raises(UnavailableError):
            world.acquire(own[0])
        assert world.states() == {}
        until(lambda: world.registry.placements == {})
        assert world.node.ledgers.device.by_owner() == {}
        world.use(own[0])
    world.unload(own[0])
    world.clean()


def test_who_hears_of_a_hit_and_fails_leaves_no_reference(
    world: LoadWorld, own: list[Digest], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf:
        def hit(self, _: object) -> None:
            raise RuntimeError("fault")

        def loaded(self, _: object, __: float) -> None:
            return None

    world.use(own[0])
    watches: Any = world.node.residents._watches
    monkeypatch.setattr(world.node.residents, "_watches", [*watches, Deaf()])
    with pytest.raises(RuntimeError):
        world.acquire(own[0])
    assert [item.references for item in world.node.residents.residents()] == [0]
