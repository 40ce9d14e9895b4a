"""The transition table: what is in it, and that all else is refused."""

from __future__ import annotations

import itertools

import pytest

from registry_service.domain.errors import IllegalMoveError
from registry_service.domain.lifecycle import TRANSITIONS, WITHDRAWN_STATES, Event, State, advance

PAIRS = list(itertools.product(State, Event))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: value.value)
def test_a_move_is_in_the_table_or_refused(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert advance(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalMoveError) as caught:
            advance(state, event)
        assert caught.value.code == "ILLEGAL_MOVE"


def test_only_findings_and_people_reject() -> None:
    rejecting = {event for (_, event), to in TRANSITIONS.items() if to is State.REJECTED}
    assert rejecting == {
        Event.SCAN_FAILED,
        Event.VALIDATION_FAILED,
        Event.REJECTED,
        Event.WITHDRAWN,
    }
    lost = {event: to for (_, event), to in TRANSITIONS.items() if event.value.endswith("_lost")}
    assert set(lost.values()) == {State.STALLED}


def test_approval_comes_from_review_only_and_revocation_is_final() -> None:
    assert [key for key, to in TRANSITIONS.items() if to is State.APPROVED] == [
        (State.IN_REVIEW, Event.APPROVED)
    ]
    assert not [key for key in TRANSITIONS if key[0] is State.REVOKED]
    assert {State.REVOKING, State.REVOKED} == WITHDRAWN_STATES


def test_every_state_can_be_reached_and_new_never_again() -> None:
    reached, frontier = {State.NEW}, [State.NEW]
    while frontier:
        state = frontier.pop()
        steps = {to for (start, _), to in TRANSITIONS.items() if start is state} - reached
        reached |= steps
        frontier += steps
    assert reached == set(State)
    assert State.NEW not in TRANSITIONS.values()


def test_the_message_says_what_is_possible() -> None:
    with pytest.raises(IllegalMoveError, match="approved, rejected, revoked, withdrawn"):
        advance(State.IN_REVIEW, Event.DRAINED)
