"""From a request's arrival to its first token: who waits, who is refused, and who leaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.running import Running
from gpu_worker.serving.sequence import Generation
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from tests.integration import serving_world as sw
from tests.integration.http_world import HttpWorld, base_with_template, listening
from tests.waiting import until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

OTHER = {"tenant": sw.OTHER, "tenant_id": sw.OTHER_ID}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return base_with_template(tmp_path_factory.mktemp("base"))


@pytest.fixture
def world(
    base: ProvenBase, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpWorld]:
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    for seed, tenant in enumerate((sw.TENANT, sw.TENANT, sw.OTHER)):
        folder = tmp_path_factory.mktemp("adapter")
        sw.peft_make(base.dir, folder, seed)
        registry.publish(sw.adapter_files(base, folder, tenant=tenant), tenant=tenant)
    with listening(registry, base, tmp_path) as world:
        yield world


def digests(world: HttpWorld) -> list[Digest]:
    return list(world.registry.artifacts)


@contextmanager
def slow_registry(world: HttpWorld) -> Iterator[None]:
    """Nothing is pulled meanwhile."""
    answers = threading.Event()
    pull = world.registry.pull

    def slow(*arguments: Any, **named: Any) -> None:
        assert answers.wait(60)
        pull(*arguments, **named)

    world.registry.pull = slow  # type: ignore[method-assign]  # a probe
    try:
        yield
    finally:
        answers.set()


@contextmanager
def engine_held(world: HttpWorld) -> Iterator[None]:
    """The model's thread does nothing meanwhile: what comes waits, as when all lanes are full."""
    go_on, held = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=world.node.engine._call, args=(hold,))
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def opened(world: HttpWorld) -> list[Running]:
    return list(world.node.completions.requests._open)


def begun(world: HttpWorld) -> list[Generation]:
    return [generation for running in opened(world) for generation in running.generations]


def starting(world: HttpWorld) -> int:
    return world.node.completions.requests.counts()["starting"]


def waiting_loads(world: HttpWorld) -> int:
    """Sequences that wait in the load queue."""
    queue = world.node.residents._queue
    with queue._changed:
        return sum(ticket.waiting for ticket in queue._open.values())


def test_waiting_for_adapters_keeps_nobody_else_from_being_served(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, others = digests(world)
    assert world.send(first).status_code == 200
    queue = world.node.residents._queue
    bounds = replace(queue._bounds, waiting=3, waiting_tenant=2)
    monkeypatch.setattr(queue, "_bounds", bounds)
    with ThreadPoolExecutor(3) as pool:
        with slow_registry(world):
            waiting = [pool.submit(world.send, second) for _ in range(2)]
            until(lambda: waiting_loads(world) == 2)
            share = world.send(second)
            assert (share.status_code, share.json()["error"]["code"]) == (429, "too_many_requests")
            waiting.append(pool.submit(world.send, others, claims=OTHER))
            until(lambda: waiting_loads(world) == 3)
            monkeypatch.setattr(queue, "_bounds", replace(bounds, waiting_tenant=3))
            full = world.send(second)
            assert (full.status_code, full.json()["error"]["code"]) == (503, "unavailable")
            assert all(int(answer.headers["retry-after"]) > 0 for answer in (share, full))
            for digest, claims in ((first, {}), (None, {}), (None, OTHER)):
                assert world.send(digest, claims=claims).status_code == 200
        assert {answer.result().status_code for answer in waiting} == {200}
    until(world.idle)
    assert world.send(second).status_code == 200


def test_who_finds_no_thread_is_told_at_once(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of those who wait for loads and renderings there are never so many.
    assert limits.LOAD_WAITS + limits.RENDERINGS < limits.STARTING_REQUESTS
    monkeypatch.setattr(limits, "STARTING_REQUESTS", 1)
    with ThreadPoolExecutor(1) as pool:
        with slow_registry(world):
            waiting = pool.submit(world.send, digests(world)[0])
            until(lambda: starting(world) == 1)
            answer = world.send()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert int(answer.headers["retry-after"]) > 0
        assert waiting.result().status_code == 200
    assert world.send().status_code == 200


def test_who_leaves_before_the_first_token_leaves_the_queue(world: HttpWorld) -> None:
    for stream in (False, True):
        with engine_held(world):
            with world.caller(stream=stream, max_tokens=900):
                until(lambda: len(begun(world)) == 1)
            # Before the engine does anything: whoever left is known to have left.
            until(lambda: [g.cancelled for g in begun(world)] == [True])
        until(world.idle)


def test_who_leaves_while_the_request_starts_is_not_submitted(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []
    monkeypatch.setattr(world.node.engine, "submit", submitted.append)
    for stream, digest in zip((False, True), digests(world), strict=False):
        with slow_registry(world):
            with world.caller(digest, stream=stream):
                until(lambda: starting(world) == 1)
            until(lambda: [running.cancelled for running in opened(world)] == [True])
        until(world.idle)
    assert submitted == []


def test_a_node_whose_engine_died_says_that_it_is_dead(world: HttpWorld) -> None:
    assert world.get("/healthz").status_code == 200
    world.node.engine.stop()
    dead = world.get("/healthz")
    assert (dead.status_code, dead.json()["status"]) == (503, "dead")
    assert world.get("/readyz").status_code == 503


@pytest.mark.parametrize("where", ["sampling", "submit"])
def test_a_fault_before_all_answers_began_leaves_nothing(
    world: HttpWorld, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = digests(world)[0]
    owner: Any = world.node.engine if where == "submit" else world.node.completions._prompts
    whole = getattr(owner, where)
    for index in range(3):
        calls = iter(range(9))

        def failing(*arguments: Any, index: int = index, calls: Any = calls) -> Any:
            if next(calls) == index:
                raise MemoryError
            return whole(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(owner, where, failing)
            assert world.send(digest, n=3, max_tokens=900).status_code == 500
        until(world.idle)
    # All of the tenant's places are there again.
    full = {"n": limits.CHOICES, "max_tokens": 900}
    with ThreadPoolExecutor(8) as pool, engine_held(world):
        asked = [pool.submit(world.send, **full) for _ in range(8)]
        until(lambda: len(begun(world)) == limits.TENANT_SEQUENCES)
        assert world.send().status_code == 429
        for generation in begun(world):
            generation.cancel()
    assert {answer.result().status_code for answer in asked} == {503}


def test_who_leaves_while_the_body_arrives_is_no_fault_of_the_node(
    world: HttpWorld, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(world.url)
    with socket.create_connection((address.host, address.port or 80)) as caller:
        caller.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: n\r\nContent-Length: 99\r\n\r\n{")
    until(
        lambda: 'node_requests_total{route="completions"' in httpx.get(f"{world.url}/metrics").text
    )
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert world.idle()
