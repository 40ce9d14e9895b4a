"""Pacing: the token bucket and the growing pauses, on a clock that the test moves."""

from __future__ import annotations

import pytest

from gpu_worker.serving.pacing import Backoff, TokenBucket


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(per_second=0.5, burst=3)
    assert [bucket.take("a", 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take("a", 0.0) == pytest.approx(2.0)
    assert bucket.take("a", 1.0) == pytest.approx(1.0)
    assert bucket.take("a", 2.0) == 0.0
    assert bucket.take("b", 2.0) == 0.0
    # However long it rested, it holds no more than its burst.
    assert [bucket.take("a", 1000.0) for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(2.0)]


def test_pauses_double_up_to_the_most_and_end_with_a_success() -> None:
    backoff = Backoff(first=1.0, names=10)
    pauses = []
    for now in (0.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        backoff.failed("a", now, 5.0)
        pauses.append(backoff.wait("a", now))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.wait("a", 53.0) == pytest.approx(2.0)
    assert backoff.wait("a", 55.0) == 0.0
    assert backoff.wait("b", 0.0) == 0.0
    backoff.succeeded("a")
    backoff.failed("a", 60.0, 5.0)
    assert backoff.wait("a", 60.0) == 0.0


def test_as_many_names_are_remembered_as_there_is_place_for() -> None:
    backoff = Backoff(first=1.0, names=2)
    for name in ("a", "b", "a", "c"):
        backoff.failed(name, 0.0, 5.0)
    assert backoff.wait("a", 0.0) == 1.0
    backoff.failed("b", 0.0, 5.0)
    assert backoff.wait("b", 0.0) == 0.0
    for _ in range(2000):
        backoff.failed("c", 0.0, 5.0)
    assert backoff.wait("c", 0.0) == 5.0
