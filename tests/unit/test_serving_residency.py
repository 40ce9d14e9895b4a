"""The residency state machine: every step, and what each state refuses."""

from __future__ import annotations

from uuid import UUID

import pytest

from gpu_worker.serving.residency import Key, Residency, ResidencyError, ResidentState
from registry_service.domain.digests import digest_of

KEY = Key(UUID(int=1), digest_of(b"a"))
OTHER = Key(UUID(int=2), digest_of(b"a"))


def serving() -> Residency:
    table = Residency()
    table.load_begin(KEY)
    assert table.load_end(KEY, 100) is ResidentState.SERVING
    return table


def test_the_whole_life() -> None:
    table = serving()
    table.acquire(KEY)
    table.acquire(KEY)
    assert table.revoke(KEY, 5.0) is ResidentState.DRAINING
    with pytest.raises(ResidencyError):
        table.acquire(KEY)
    table.release(KEY)
    assert not table.drained(KEY)
    with pytest.raises(ResidencyError):
        table.purge(KEY)
    table.release(KEY)
    assert table.drained(KEY)
    table.purge(KEY)
    assert table.state(KEY) is ResidentState.PURGED
    assert table.unload(KEY) == 100
    assert table.state(KEY) is None
    assert table.residents() == ()


def test_revoked_stays_revoked() -> None:
    table = Residency()
    assert table.revoke(KEY, None) is None
    assert table.is_revoked(KEY)
    with pytest.raises(ResidencyError):
        table.load_begin(KEY)


def test_revoked_while_loading_never_serves() -> None:
    table = Residency()
    table.load_begin(KEY)
    assert table.revoke(KEY, None) is ResidentState.LOADING
    assert table.load_end(KEY, 1) is ResidentState.DRAINING
    with pytest.raises(ResidencyError):
        table.acquire(KEY)
    assert table.drained(KEY)


def test_a_failed_load_leaves_nothing() -> None:
    table = Residency()
    table.load_begin(KEY)
    table.load_failed(KEY)
    assert table.state(KEY) is None
    table.load_begin(KEY)


def test_the_same_digest_of_another_tenant_is_another_key() -> None:
    table = serving()
    with pytest.raises(ResidencyError):
        table.acquire(OTHER)
    table.revoke(OTHER, None)
    table.acquire(KEY)
    assert [(r.key, r.references, r.size) for r in table.residents()] == [(KEY, 1, 100)]


def test_a_retired_key_drains_and_may_be_loaded_again() -> None:
    table = serving()
    table.acquire(KEY)
    table.retire(KEY)
    with pytest.raises(ResidencyError):
        table.acquire(KEY)
    table.release(KEY)
    table.purge(KEY)
    table.unload(KEY)
    assert not table.is_revoked(KEY)
    table.load_begin(KEY)


def test_a_request_takes_and_returns_a_reference_for_each_of_its_sequences() -> None:
    table = serving()
    table.acquire(KEY, 8)
    table.acquire(KEY)
    assert table.residents()[0].references == 9
    table.release(KEY, 8)
    with pytest.raises(ResidencyError, match="more often"):
        table.release(KEY, 2)
    table.release(KEY)
    assert table.residents()[0].references == 0


def test_a_load_ends_with_the_references_of_those_who_waited() -> None:
    table = Residency()
    table.load_begin(KEY)
    table.load_end(KEY, 1, references=3)
    assert table.residents()[0].references == 3
    table.load_begin(OTHER)
    table.revoke(OTHER, None)
    assert table.load_end(OTHER, 1, references=3) is ResidentState.DRAINING
    assert table.drained(OTHER)


def test_whatever_is_done_with_a_key_makes_it_the_last_used() -> None:
    table = serving()
    table.load_begin(OTHER)
    table.load_end(OTHER, 1)

    def last() -> Key:
        return max(table.residents(), key=lambda item: item.used).key

    assert last() == OTHER
    table.acquire(KEY)
    assert last() == KEY
    table.acquire(OTHER)
    assert last() == OTHER
    table.release(KEY)
    assert last() == KEY


def test_a_deadline_only_comes_forward() -> None:
    table = serving()
    for given, expected in ((None, None), (9.0, 9.0), (12.0, 9.0), (None, 9.0), (3.0, 3.0)):
        table.revoke(KEY, given)
        assert table.deadline(KEY) == expected
    assert table.deadline(OTHER) is None


@pytest.mark.parametrize("step", ["load_begin", "load_failed", "release", "purge", "unload"])
def test_steps_that_a_serving_entry_refuses(step: str) -> None:
    table = serving()
    with pytest.raises(ResidencyError):
        getattr(table, step)(KEY)


@pytest.mark.parametrize("step", ["acquire", "release", "load_failed", "purge", "unload"])
def test_steps_that_need_an_entry(step: str) -> None:
    with pytest.raises(ResidencyError):
        getattr(Residency(), step)(KEY)
