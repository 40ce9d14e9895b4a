"""An executor: few threads, however many keys; who waits holds up none, nor does a fault."""

from __future__ import annotations

import threading
from uuid import UUID

import pytest

from gpu_worker.serving.keyed_executor import KeyedExecutor
from gpu_worker.serving.residency import Key
from registry_service.domain.digests import digest_of
from tests.waiting import until


def key(number: int) -> Key:
    return Key(UUID(int=1), digest_of(b"%d" % number))


class Work:
    """What an executor does: it stands until the test lets it, and says who was there at once."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.done: list[Key] = []
        self.gate = threading.Semaphore(0)
        self.pauses: dict[Key, float | None] = {}
        self.at_once = self.most = 0

    def executor(self, most: int) -> KeyedExecutor:
        return KeyedExecutor("executor", most, self.changed, lambda key: self.pauses.get(key, 0.0))

    def do(self, key: Key) -> None:
        with self.changed:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.gate.acquire(timeout=30)
        with self.changed:
            self.at_once -= 1
            self.done.append(key)


def test_many_keys_take_few_threads_which_end_with_them() -> None:
    work = Work()
    executor = work.executor(2)
    for number in range(50):
        executor.submit(key(number), work.do)
    work.gate.release(50)
    assert executor.idle_wait(30)
    assert set(work.done) == {key(number) for number in range(50)}
    assert work.most <= 2
    until(lambda: not any(thread.name == "executor" for thread in threading.enumerate()))
    work.gate.release()
    executor.submit(key(0), work.do)
    assert executor.idle_wait(30)
    assert len(work.done) == 51


def test_who_is_not_ready_holds_up_none_and_comes_when_it_is() -> None:
    work = Work()
    work.pauses = dict.fromkeys(map(key, range(5)), None)
    work.gate.release(10)
    executor = work.executor(1)
    for number in range(7):
        executor.submit(key(number), work.do)
    until(lambda: len(work.done) == 2)
    assert work.done == [key(5), key(6)]
    with work.changed:
        work.pauses = {key(0): 0.05}
        work.changed.notify_all()
    until(lambda: len(work.done) == 6)
    assert key(0) not in work.done
    # After its pause it is looked at again, and nobody needs to say so.
    work.pauses = {}
    until(lambda: len(work.done) == 7)


def test_what_waits_can_be_withdrawn_and_what_is_done_is_waited_for() -> None:
    work = Work()
    executor = work.executor(1)
    executor.submit(key(0), work.do)
    until(lambda: work.at_once == 1)
    executor.submit(key(1), work.do)
    assert executor.withdraw(key(1), 0)
    assert not executor.withdraw(key(0), 0.01)
    assert not executor.idle_wait(0.01)
    work.gate.release(2)
    assert executor.withdraw(key(0), 30)
    assert executor.idle_wait(30)
    assert work.done == [key(0)]


def test_a_fault_is_one_keys_own(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    work.gate.release(2)
    executor = work.executor(1)

    def bad(_: Key) -> None:
        raise RuntimeError("fault")

    executor.submit(key(0), bad)
    executor.submit(key(1), work.do)
    assert executor.idle_wait(30)
    assert work.done == [key(1)]
    assert "executor failed" in caplog.text


def test_without_a_thread_nothing_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    executor = work.executor(2)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError):
            executor.submit(key(0), work.do)
    assert executor.idle_wait(0)
    executor.submit(key(1), work.do)
    until(lambda: work.at_once == 1)
    with monkeypatch.context() as patch:
        # One runs: it does this, too.
        patch.setattr(threading.Thread, "start", failing)
        executor.submit(key(2), work.do)
    work.gate.release(2)
    assert executor.idle_wait(30)
    assert work.done == [key(1), key(2)]
