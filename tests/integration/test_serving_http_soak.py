"""Attribution over HTTP: every answer is its own adapter's, and every tuple its request's.

200 requests by default; ``make test-soak`` runs 2,000. 32 callers at once, twelve adapters of two
tenants, the base for both, and an adapter of NaN, on a node with room for eight: adapters come and
go, callers leave, bodies are refused, aliases move, and three adapters are revoked in three ways.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_worker.serving.eviction import Reason
from registry_service.trust.revocation_list import Revoked
from tests.integration import engine_world as ew
from tests.integration import serving_world as sw
from tests.integration import soak_world as soak
from tests.integration.http_world import logged
from tests.integration.load_world import LoadWorld
from tests.integration.soak_asks import Asking, Known, People, events_of
from tests.integration.soak_witness import Witness, blocks_check, pages_check
from tests.integration.soak_world import CANARIES, Cold, Who
from tests.waiting import until

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(1800)]

CALLERS, ROOM = 32, 8
# How often a tenant's alias moves.
MOVES_AFTER = 8


@dataclass(frozen=True)
class Scene:
    """What is published, and what everybody is told alone."""

    registry: sw.FakeRegistry
    people: People
    cold: Cold


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    root = tmp_path_factory.mktemp("soak")
    registry = sw.FakeRegistry(root / "registry", soak.base_make(root / "base"))
    people = People(
        [soak.adapter_publish(registry, root / f"a{n}", n) for n in range(soak.ADAPTERS)],
        [Who(*tenant) for tenant in soak.TENANTS],
        soak.adapter_publish(registry, root / "broken", soak.ADAPTERS, broken=True),
    )
    with ew.one_thread():
        cold = soak.cold_runs(registry, root / "cold", [*people.adapters, *people.bases])
    return Scene(registry, people, cold)


@dataclass
class Soak:
    """One run: callers ask, and meanwhile aliases move and adapters are revoked."""

    world: LoadWorld
    asking: Asking
    known: Known

    def run(self, count: int) -> None:
        """So many requests, in about the order of their numbers."""
        ways = (self.by_deadline, self.at_once, self.by_list)
        revocations = {count * (n + 2) // 6: way for n, way in enumerate(ways)}

        def ask(number: int) -> None:
            if number in revocations:
                self.revoke(number, revocations[number])
            if number % MOVES_AFTER == 0:
                self.alias_move(number)
            self.asking.ask(number)

        with ThreadPoolExecutor(CALLERS) as callers:
            list(callers.map(ask, range(count)))
        until(lambda: self.world.node.engine.references == 0 and not self.busy())

    def busy(self) -> bool:
        """True while something is held for a request, or a session is being saved."""
        node: Any = self.world.node
        references = [item.references for item in node.residents.residents()]
        return any(references) or bool(node.turns._pending) or node.residents.letting_go

    def alias_move(self, number: int) -> None:
        """Let a tenant's alias name another of its adapters from now on."""
        with self.known.lock:
            tenant, _ = soak.TENANTS[number // MOVES_AFTER % len(soak.TENANTS)]
            before = self.known.aliases[tenant]
            own = [who for who in self.asking.window(number) if who.tenant == tenant]
            after = random.Random(number).choice(own or [before])
            self.known.aliases[tenant] = after
            self.asking.count("moved", after != before)

    def revoke(self, number: int, announce: Callable[[Who], bool]) -> None:
        """Revoke an adapter while it answers: the answer is cut, and it never answers again.

        ``announce`` returns when the node has heard, with whether it cancels at once.
        """
        serving, known = self.world.node.residents.serving, self.known
        with known.lock:
            free = [w for w in self.asking.window(number) if w not in known.aliases.values()]
        who = next((who for who in free if serving(who.key)), free[0])
        begun: list[httpx.Response] = []
        until(lambda: self.asking.stream_begins(who, begun))
        with known.lock:
            known.revoking.append(who)
        at_once = announce(who)
        known.revoked.append(who)
        *_, last = events_of(begun[0])
        # Until a deadline an answer may come to its own end.
        assert (last is None and not at_once) or last["error"]["code"] == "cancelled"
        begun[0].close()
        acknowledged = self.world.registry.acknowledged
        until(lambda: who.digest in {digest for _, digest, _ in acknowledged})
        self.asking.count("revoked")

    def by_deadline(self, who: Who) -> bool:
        return self.by_feed(who, 1)

    def at_once(self, who: Who) -> bool:
        return self.by_feed(who, 0)

    def by_feed(self, who: Who, deadline: int) -> bool:
        registry, follower = self.world.registry, self.world.node.follower
        with self.known.lock:
            registry.revoke(who.digest, deadline=deadline)
            index = len(registry.events)
        until(lambda: follower.index >= index)
        return deadline == 0

    def by_list(self, who: Who) -> bool:
        now = datetime.now(UTC).replace(microsecond=0)
        self.world.registry.list_issue(Revoked(who.digest, None, None, None, now))
        self.world.node.follower.list_refresh(self.world.node.residents)
        return True


@contextmanager
def soaking(scene: Scene, root: Path, *, grouped: bool) -> Iterator[Soak]:
    """A node of this run's own, what it is seen to do, and callers who are ready."""
    registry = sw.FakeRegistry(root / "registry", scene.registry.base)
    registry.artifacts = {d: replace(a, revoked=False) for d, a in scene.registry.artifacts.items()}
    known = Known({who.tenant: who for who in scene.people.adapters[:2]})
    with (
        pytest.MonkeyPatch.context() as patch,
        soak.node_of(registry, root, adapters=ROOM, grouped=grouped) as world,
        soak.served(world.node) as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        witness = Witness(world.node, scene.people.all, patch)
        yield Soak(world, Asking(registry, scene.people, scene.cold, known, witness, http), known)


@pytest.mark.parametrize("grouped", [False, True], ids=["mixed", "grouped"])
def test_lorax_pr_62_no_answer_is_another_adapters_under_load(
    request: pytest.FixtureRequest, scene: Scene, tmp_path: Path, grouped: bool
) -> None:
    count = int(request.config.getoption("--soak-requests"))
    # Otherwise a mix-up could not be seen.
    for number in range(soak.PROMPTS):
        said = {who: scene.cold.says[who, number] for who in scene.people.adapters}
        assert [words[0] for words in said.values()] == list(CANARIES)
        assert len({tuple(words[1:]) for words in said.values()}) == soak.ADAPTERS
    before = set(threading.enumerate())
    with ew.one_thread(), logged() as log:
        with soaking(scene, tmp_path, grouped=grouped) as run:
            assert run.world.node.engine.workspace.grouped is grouped
            run.run(count)
            keeps_nothing_foreign(run)
            everything_happened(run, count)
            gives_everything_back(run)
        until(lambda: set(threading.enumerate()) <= before)
    told = log.getvalue()
    run.asking.witness.check([json.loads(line) for line in told.splitlines()])
    texts = [*run.asking.errors, told]
    assert not any(canary in text for text in texts for canary in CANARIES)


def keeps_nothing_foreign(run: Soak) -> None:
    """Nothing of another's in an answer, a shared block or a saved session."""
    assert run.asking.wrong == []
    blocks_check(run.world.node, run.asking.witness, run.asking.cold)
    pages_check(run.world.node, run.asking.people.all, run.known.revoked)


def everything_happened(run: Soak, count: int) -> None:
    """Each kind of event took place, so that it could have gone wrong."""
    asking, witness = run.asking, run.asking.witness
    outcomes = asking.outcomes
    assert outcomes["right"] > count // 2
    assert outcomes["revoked"] == 3
    kinds = ("left", "vanished", "refused", "failed", "denied", "moved")
    assert min(outcomes[kind] for kind in kinds) > 0, outcomes
    assert witness.requests("admitted", "step", "cancelled") > 0
    assert min(witness.reused[place] for place in ("prefix", "slot")) > 0
    assert len(asking.by_alias) > len(soak.TENANTS)
    evicted = Counter(run.world.node.residents.unloads())
    assert evicted.pop(Reason.REVOKED) == 3
    assert evicted.total() > 0


def gives_everything_back(run: Soak) -> None:
    """The ledger is right to the byte with adapters and without; nothing of them is left."""
    world, node = run.world, run.world.node
    world.ledger_check()
    gone = {who.digest for who in run.known.revoked}
    assert not gone & world.states().keys()
    assert not any(node.store.folder(who.key).exists() for who in run.known.revoked)
    for digest in list(world.states()):
        world.unload(digest)
    # What the base alone computed belongs to no adapter.
    node.engine.purge(None)
    world.clean()
