"""The life of an artifact: one table. What is not in it is refused.

The same rows stand in the database's ``transition`` table, which every move references.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType

from registry_service.domain.errors import IllegalMoveError


class State(StrEnum):
    """Where an artifact stands."""

    NEW = "NEW"
    SCANNING = "SCANNING"
    VALIDATING = "VALIDATING"
    STALLED = "STALLED"
    IN_REVIEW = "IN_REVIEW"
    APPROVED = "APPROVED"
    REJECTED = "REJECTED"
    REVOKING = "REVOKING"
    REVOKED = "REVOKED"


class Event(StrEnum):
    """What moves an artifact."""

    SUBMITTED = "submitted"
    SCAN_PASSED = "scan_passed"
    SCAN_FAILED = "scan_failed"
    SCAN_LOST = "scan_lost"
    VALIDATION_PASSED = "validation_passed"
    VALIDATION_FAILED = "validation_failed"
    VALIDATION_LOST = "validation_lost"
    REQUEUED = "requeued"
    REOPENED = "reopened"
    APPROVED = "approved"
    REJECTED = "rejected"
    WITHDRAWN = "withdrawn"
    REVOKED = "revoked"
    DRAINED = "drained"


# REJECTED comes from findings and people only, never from a fault: equal bytes have an equal
# digest, so a transient error must not burn it.
TRANSITIONS: MappingProxyType[tuple[State, Event], State] = MappingProxyType(
    {
        (State.NEW, Event.SUBMITTED): State.SCANNING,
        (State.SCANNING, Event.SCAN_PASSED): State.VALIDATING,
        (State.SCANNING, Event.SCAN_FAILED): State.REJECTED,
        (State.SCANNING, Event.SCAN_LOST): State.STALLED,
        (State.VALIDATING, Event.VALIDATION_PASSED): State.IN_REVIEW,
        (State.VALIDATING, Event.VALIDATION_FAILED): State.REJECTED,
        (State.VALIDATING, Event.VALIDATION_LOST): State.STALLED,
        (State.STALLED, Event.REQUEUED): State.SCANNING,
        (State.REJECTED, Event.REOPENED): State.SCANNING,
        (State.IN_REVIEW, Event.APPROVED): State.APPROVED,
        (State.IN_REVIEW, Event.REJECTED): State.REJECTED,
        (State.IN_REVIEW, Event.WITHDRAWN): State.REJECTED,
        (State.APPROVED, Event.REVOKED): State.REVOKING,
        (State.IN_REVIEW, Event.REVOKED): State.REVOKING,
        (State.STALLED, Event.REVOKED): State.REVOKING,
        (State.VALIDATING, Event.REVOKED): State.REVOKING,
        (State.SCANNING, Event.REVOKED): State.REVOKING,
        (State.REVOKING, Event.DRAINED): State.REVOKED,
    }
)

# To resolve, pull and generate, these answer like an artifact that never existed.
WITHDRAWN_STATES = frozenset({State.REVOKING, State.REVOKED})


def advance(state: State, event: Event) -> State:
    """The state after ``event``.

    Raises:
        IllegalMoveError: the table has no such row.
    """
    try:
        return TRANSITIONS[(state, event)]
    except KeyError:
        allowed = sorted(e.value for s, e in TRANSITIONS if s is state)
        raise IllegalMoveError(
            f"an artifact in {state} cannot be {event}; "
            f"from here: {', '.join(allowed) or 'nothing'}"
        ) from None
