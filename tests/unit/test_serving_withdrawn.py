"""Which contexts a withdrawn grant ends, and for how long that has to be known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving.withdrawn import Grant, Withdrawn
from registry_service.domain import limits
from registry_service.domain.digests import digest_of
from registry_service.trust.routing_context import BASE_MARKER, RoutingContext

TENANT, OTHER = UUID(int=1), UUID(int=2)
GRANT = Grant(TENANT, "support", "app")
START = datetime(2026, 11, 30, tzinfo=UTC)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> datetime:
        return self.time


def covers(withdrawn: Withdrawn, context: RoutingContext) -> bool:
    """True when a context's grant was withdrawn after it was minted, or may have been."""
    return withdrawn.knows(context) or withdrawn.unsure_seconds(context) > 0


def context(**changes: Any) -> RoutingContext:
    values: dict[str, Any] = {
        "tenant_id": TENANT,
        "tenant": "t-1",
        "subject": "app",
        "session_id": "s",
        "adapter": "support",
        "base_digest": digest_of(b"base"),
        "adapter_digest": digest_of(b"adapter"),
        "tokenizer_digest": digest_of(b"tokenizer"),
        "chat_template_digest": digest_of(b"template"),
        "grant_epoch": 3,
        "node": "node-1",
        "jti": "1",
        "issued_at": START,
        "expires_at": START + timedelta(minutes=1),
        "body_digest": digest_of(b"body"),
    }
    return RoutingContext(**values | changes)


def test_contexts_of_an_earlier_epoch_end_and_later_ones_hold() -> None:
    withdrawn = Withdrawn(Clock())
    assert not covers(withdrawn, context())
    withdrawn.add(GRANT, 4)
    assert covers(withdrawn, context())
    assert not covers(withdrawn, context(grant_epoch=4))
    # An event that is told again, or late, brings nothing back.
    withdrawn.add(GRANT, 2)
    assert covers(withdrawn, context())


@pytest.mark.parametrize(
    "changes", [{"tenant_id": OTHER}, {"adapter": "sales"}, {"subject": "other"}], ids=str
)
def test_another_grants_contexts_hold(changes: dict[str, Any]) -> None:
    withdrawn = Withdrawn(Clock())
    withdrawn.add(GRANT, 4)
    assert not covers(withdrawn, context(**changes))


def test_what_was_withdrawn_is_known_as_long_as_a_context_from_before_may_hold() -> None:
    clock = Clock()
    withdrawn = Withdrawn(clock)
    withdrawn.add(GRANT, 4)
    clock.time += timedelta(seconds=limits.ROUTING_CONTEXT_SECONDS + limits.CLOCK_SKEW_SECONDS)
    withdrawn.add(Grant(OTHER, "support", "app"), 1)
    assert covers(withdrawn, context())
    clock.time += timedelta(seconds=limits.CLOCK_SKEW_SECONDS + 1)
    withdrawn.add(Grant(OTHER, "support", "app"), 2)
    assert not covers(withdrawn, context())


def test_after_a_gap_contexts_from_before_end_but_for_those_of_a_base() -> None:
    clock = Clock()
    withdrawn = Withdrawn(clock)
    clock.time += timedelta(seconds=10)
    withdrawn.missed()
    skew = timedelta(seconds=limits.CLOCK_SKEW_SECONDS)
    for minted in (START, clock.time, clock.time + skew - timedelta(seconds=1)):
        assert covers(withdrawn, context(issued_at=minted))
    assert not covers(withdrawn, context(issued_at=clock.time + skew))
    base = context(adapter=None, adapter_digest=BASE_MARKER, grant_epoch=0)
    assert not covers(withdrawn, base)
    assert not withdrawn.unsure_seconds(base)


def test_after_a_gap_it_is_said_when_to_come_again_and_what_was_heard_stays_known() -> None:
    clock = Clock()
    withdrawn = Withdrawn(clock)
    withdrawn.missed()
    early = context()
    assert not withdrawn.knows(early)
    for gone in (0, 30, 59.5, 60, 90):
        clock.time = START + timedelta(seconds=gone)
        wait = withdrawn.unsure_seconds(early)
        assert wait >= 1
        # By a clock like this one.
        later = clock.time + timedelta(seconds=wait)
        assert not withdrawn.unsure_seconds(context(issued_at=later))
    withdrawn.add(GRANT, 4)
    assert withdrawn.knows(early)
    assert withdrawn.knows(context(issued_at=START + timedelta(hours=1)))
