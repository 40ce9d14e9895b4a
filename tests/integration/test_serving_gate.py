"""What the gate tells whoever it refuses: denied for good, or to ask again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.gate import DeniedError, Gate
from gpu_worker.serving.withdrawn import Grant
from registry_service.domain import limits
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import UnavailableError
from registry_service.trust.routing_context import RoutingContext
from tests.integration import serving_world as sw

pytestmark = pytest.mark.torch

BODY = b"{}"
ADAPTER = digest_of(b"adapter")
START = datetime(2026, 12, 1, 12, tzinfo=UTC)


class World:
    """A gate by a clock that the test moves, and a registry that mints by another."""

    def __init__(self, folder: Path, base: ProvenBase) -> None:
        self.registry = sw.FakeRegistry(folder, base)
        self.time = START
        self.gate = Gate(
            self.registry.trust(),
            sw.identity(base),
            node=sw.NODE,
            started_at=START - timedelta(hours=1),
            now=lambda: self.time,
        )

    def enter(self, digest: Any = ADAPTER, ahead: float = 0, **changes: Any) -> RoutingContext:
        minted = self.time + timedelta(seconds=ahead)
        times = {"issued_at": minted, "expires_at": minted + timedelta(seconds=60)}
        return self.gate.enter(self.registry.context(BODY, digest, **times, **changes), BODY)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return sw.prove(sw.base_make(tmp_path_factory.mktemp("gate") / "base"))


@pytest.fixture
def world(base: ProvenBase, tmp_path: Path) -> World:
    return World(tmp_path, base)


@pytest.mark.parametrize("ahead", [0, 5])
def test_after_a_gap_one_is_told_when_to_ask_again_and_is_let_in_then(
    world: World, ahead: float
) -> None:
    before = world.enter(ahead=ahead)
    world.time += timedelta(seconds=1)
    world.gate.withdrawn.missed()
    with pytest.raises(UnavailableError, match="ask again"):
        world.gate.recheck(before)
    with pytest.raises(UnavailableError, match="ask again") as refused:
        world.enter(ahead=ahead)
    # A base is nobody's grant of an adapter.
    assert world.enter(None, ahead=ahead)
    assert refused.value.retry_after
    world.time += timedelta(seconds=refused.value.retry_after)
    assert world.enter(ahead=ahead)


def test_what_a_clock_ahead_minted_before_a_gap_does_not_come_in_after_it(world: World) -> None:
    minted = START + timedelta(seconds=limits.CLOCK_SKEW_SECONDS)
    world.time += timedelta(seconds=1)
    world.gate.withdrawn.missed()
    world.time = minted
    with pytest.raises(UnavailableError, match="ask again"):
        world.enter()


def test_what_was_heard_to_be_withdrawn_is_denied_also_after_a_gap(world: World) -> None:
    context = world.enter()
    assert context.adapter is not None
    world.gate.withdrawn.add(Grant(context.tenant_id, context.adapter, context.subject), 2)
    world.gate.withdrawn.missed()
    for ask in (lambda: world.gate.recheck(context), world.enter):
        with pytest.raises(DeniedError):
            ask()
