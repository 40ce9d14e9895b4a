"""Open requests: when their tokens came, who waits for them, and how they end."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from uuid import UUID

import pytest

from gpu_worker.serving.meter import RequestTuple
from gpu_worker.serving.openai_bodies import completion_parse
from gpu_worker.serving.running import (
    AnswerCancelledError,
    Caller,
    Marks,
    OpenRequests,
    Request,
    Running,
)
from gpu_worker.serving.sequence import LENGTH, Generation, Output
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import TooManyRequestsError

WHO = RequestTuple(UUID(int=1), digest_of(b"base"), digest_of(b"a"), digest_of(b"tokenizer"))


def running_make(ended: list[Running] | None = None, *, n: int = 1) -> Running:
    body = completion_parse(b'{"prompt": "hello", "n": %d}' % n)
    seen = [] if ended is None else ended
    return Running(Request("r-1", WHO, body, Marks()), seen.append)


def test_tokens_have_the_engines_times_however_late_they_are_read() -> None:
    running = running_make()
    generation = Generation()
    running.add(generation)
    for at in (3_000_000_000, 3_250_000_000, 4_000_000_000):
        generation.emit(Output(1, at=at))
    generation.end(LENGTH, None)
    paces: list[float] = []
    assert len(list(running.outputs(0, paces.append))) == 3
    assert paces == [0.25, 0.75]
    marks = running.request.marks
    assert (marks.first, marks.last) == (3_000_000_000, 4_000_000_000)


def test_a_second_answers_tokens_are_not_later_because_they_are_read_later() -> None:
    running = running_make(n=2)
    for times in ((30, 50), (20, 40)):
        generation = Generation()
        running.add(generation)
        for at in times:
            generation.emit(Output(1, at=at))
        generation.end(LENGTH, None)
    for index in range(2):
        list(running.outputs(index))
    assert (running.request.marks.first, running.request.marks.last) == (20, 50)


def test_an_output_is_stamped_when_it_is_made() -> None:
    before = Output(1)
    after = Output(1)
    assert 0 < before.at <= after.at
    assert before == after


def test_what_is_held_is_let_go_of_with_the_last_of_starter_and_sequences() -> None:
    ended: list[Running] = []
    running = running_make(ended, n=2)
    let_go: list[str] = []
    running.held.callback(let_go.append, "lease")
    running.less()
    running.less()
    assert (ended, let_go) == ([], [])
    running.less()
    assert (ended, let_go) == ([running], ["lease"])


def test_what_is_cancelled_begins_nothing_more() -> None:
    running = running_make(n=2)
    early, late = Generation(), Generation()
    running.add(early)
    running.cancel()
    running.add(late)
    assert early.cancelled
    assert late.cancelled
    with pytest.raises(AnswerCancelledError):
        running.go_check()


@pytest.mark.parametrize("first", ["follow", "leave"])
def test_a_caller_that_leaves_cancels_its_request_in_either_order(first: str) -> None:
    running, caller = running_make(), Caller()
    if first == "follow":
        caller.follow(running)
    caller.leave()
    caller.follow(running)
    assert running.cancelled


def test_a_request_that_starts_is_open() -> None:
    requests = OpenRequests()
    running = running_make()
    with requests.held(running):
        assert requests.counts() == {"starting": 1, "waiting": 0, "running": 0}
        assert not requests.idle_wait(0)
        running.request.marks.queued = 1
        assert requests.counts() == {"starting": 0, "waiting": 1, "running": 0}
        running.joined()
        assert requests.counts() == {"starting": 0, "waiting": 0, "running": 1}
    assert requests.idle_wait(0)


def test_a_tenant_has_as_many_answers_as_it_may() -> None:
    requests = OpenRequests(tenant_most=3)
    with requests.held(running_make(n=2)):
        with pytest.raises(TooManyRequestsError):
            requests.held(running_make(n=2)).__enter__()
        with requests.held(running_make()):
            pass


def test_once_all_are_cancelled_none_opens_any_more() -> None:
    requests = OpenRequests()
    running = running_make()
    with ExitStack() as held:
        held.enter_context(requests.held(running))
        assert requests.cancel_all() == 1
        assert running.cancelled
        assert requests.over
        with pytest.raises(AnswerCancelledError):
            held.enter_context(requests.held(running_make()))
    assert requests.idle_wait(0)


def test_whoever_waits_for_the_last_one_hears_of_it() -> None:
    requests = OpenRequests()
    found: list[bool] = []
    with requests.held(running_make()):
        thread = threading.Thread(target=lambda: found.append(requests.idle_wait(60)))
        thread.start()
    thread.join(60)
    assert found == [True]
