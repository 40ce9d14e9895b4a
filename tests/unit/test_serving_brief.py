"""What computes on a thread that ends: its result, its error, and nothing that stays."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress

import pytest

from gpu_worker.serving.brief import compute_briefly


def test_it_runs_on_a_thread_of_its_own_that_has_ended_then() -> None:
    thread = compute_briefly(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_an_error_is_the_one_that_was_raised() -> None:
    error = KeyError("what was raised")

    def fail() -> None:
        raise error

    with pytest.raises(KeyError) as told:
        compute_briefly(fail)
    assert told.value is error


def test_an_error_that_was_handled_keeps_nothing() -> None:
    class Tensor:
        pass

    kept = []

    def fail() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        raise ValueError

    gc.collect()
    gc.disable()
    try:
        with suppress(ValueError):
            compute_briefly(fail)
        assert kept[0]() is None
    finally:
        gc.enable()
