"""A node as a whole, over HTTP, with an in-memory registry: identity, loading, revocation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch
from fastapi.testclient import TestClient

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving import startup
from gpu_worker.serving.base_load import LoadedBase, base_load
from gpu_worker.serving.eviction import Reason
from gpu_worker.serving.gate import DeniedError
from gpu_worker.serving.openai_bodies import completion_parse
from gpu_worker.serving.residency import Key
from gpu_worker.serving.running import Running
from gpu_worker.serving.web import app_build
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import (
    UnavailableError,
)
from tests.integration import engine_world as ew
from tests.integration import serving_world as sw
from tests.integration.http_world import node_make, options_of
from tests.waiting import until

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

PROMPT = " ".join(f"w{i}" for i in range(1, 9))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return sw.prove(sw.base_make(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def files(base: ProvenBase, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    found = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("adapter")
        sw.peft_make(base.dir, folder, seed, lora_alpha=64)
        found.append(sw.adapter_files(base, folder))
    return found


def body_of(tokens: int, **extra: Any) -> bytes:
    """A completion's body; the likeliest tokens, so that answers can be compared."""
    asked = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, **extra}
    return json.dumps(asked).encode()


def text_of(answer: Any) -> str:
    """What the first choice says."""
    return str(answer.json()["choices"][0]["text"])


@dataclass
class World:
    """A running node, its registry, and what a caller does."""

    registry: sw.FakeRegistry
    node: startup.Node
    http: TestClient
    digests: list[Digest]
    loaded: LoadedBase

    def ask(
        self, digest: Digest | None, *, tokens: int = 6, extra: Any = None, **changes: Any
    ) -> Any:
        body = body_of(tokens, **(extra or {}))
        context = self.registry.context(body, digest, **changes)
        return self.send(body, context)

    def send(self, body: bytes, context: str | None, path: str = "/v1/completions") -> Any:
        headers = {} if context is None else {"Routing-Context": context}
        return self.http.post(path, content=body, headers=headers)

    def start(self, digest: Digest | None, tokens: int) -> Running:
        """A request in the engine's queue, without HTTP."""
        body = body_of(tokens)
        context = self.registry.context(body, digest)
        return self.node.completions.start(context, body, completion_parse, request_id="r-1")

    def begin(self, digest: Digest | None, tokens: int) -> Running:
        """A request that left the queue: what comes now comes in the midst of its answer."""
        running = self.start(digest, tokens)
        until(lambda: bool(running.request.marks.joined))
        return running

    def states(self) -> dict[Digest, str]:
        return {item.key.digest: str(item.state) for item in self.node.residents.residents()}


@pytest.fixture
def registry(base: ProvenBase, files: list[dict[str, bytes]], tmp_path: Path) -> sw.FakeRegistry:
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    for each in files:
        registry.publish(each)
    return registry


@pytest.fixture
def world(registry: sw.FakeRegistry, base: ProvenBase, tmp_path: Path) -> Iterator[World]:
    loaded = base_load(base, "cpu")
    node = node_make(registry, tmp_path, loaded)
    node.start(options_of(tmp_path, base))
    with TestClient(
        app_build(node.completions, node.residency), client=("127.0.0.1", 5000)
    ) as http:
        yield World(registry, node, http, list(registry.artifacts), loaded)
    node.stop()


def test_each_request_runs_what_its_context_says(world: World) -> None:
    first, second = world.digests
    answers = {key: world.ask(key) for key in (None, first, second)}
    assert len({text_of(answer) for answer in answers.values()}) == 3
    ran = {key: answer.json()["system_fingerprint"] for key, answer in answers.items()}
    assert ran == {None: "base", first: first, second: second}
    assert text_of(world.ask(first)) == text_of(answers[first])
    assert world.registry.pulls == 2


def test_whatever_is_not_allowed_gets_one_answer(world: World) -> None:
    known, revoked = world.digests
    world.registry.revoke(revoked)
    body = body_of(2)
    context = world.registry.context
    used = context(body, None)
    assert world.send(body, used).status_code == 200
    past = datetime.now(UTC) - timedelta(seconds=90)
    answers = [
        world.send(body, None),
        world.send(body, "nonsense"),
        world.send(body, used),
        world.send(body + b" ", context(body, known)),
        world.send(body, context(body, known)[:-8] + "AAAAAAAA"),
        world.send(body, context(body, known, node="node-2")),
        world.send(body, context(body, known, base_digest=digest_of(b"x"))),
        world.send(body, context(body, known, tokenizer_digest=digest_of(b"x"))),
        world.send(body, context(body, known, chat_template_digest=digest_of(b"x"))),
        world.send(body, context(body, None, chat_template_digest=digest_of(b"x"))),
        world.send(
            body,
            context(body, known, issued_at=past, expires_at=past + timedelta(seconds=50)),
        ),
        world.send(body, context(body, digest_of(b"unknown"))),
        world.send(body, context(body, revoked)),
        world.send(body, context(body, known, tenant=sw.OTHER, tenant_id=sw.OTHER_ID)),
        world.send(body, context(body, known, adapter="another")),
        world.send(body, context(body, known, tenant_id=UUID(int=5))),
    ]
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.content for answer in answers}) == 1
    assert not world.node.engine.cancel(Key(sw.TENANT_ID, revoked))


@pytest.mark.parametrize(
    "extra",
    [
        {"frequency_penalty": 0.5},
        {"model": 5},
        {"model": "x" * 257},
        {"adapter": "../x"},
        {"lora_path": "/tmp/x"},
        {"max_tokens": 0},
        {"max_tokens": "3"},
        {"max_tokens": 4097},
        {"prompt": ""},
        {"prompt": "w1 " * 1022},
        {"prompt": 5},
        {"stream": 1},
    ],
)
def test_a_body_that_says_more_is_400(world: World, extra: dict[str, Any]) -> None:
    answer = world.ask(None, extra=extra)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == next(iter(extra))


def test_query_and_size(world: World) -> None:
    body = b"{}"
    context = world.registry.context(body, None)
    assert world.send(body, context, "/v1/completions?adapter=x").status_code == 400
    headers = {"Routing-Context": context, "X-Adapter-Id": "x"}
    answer = world.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    big = b" " * (1024 * 1024 + 1)
    assert world.send(big, world.registry.context(big, None)).status_code == 413


@pytest.mark.parametrize(
    "changes",
    [
        {"catalog_digest": digest_of(b"other")},
        {"not_after": datetime(2020, 1, 1, tzinfo=UTC)},
        {"verifier_id": "urn:other"},
        {"tenant_id": sw.OTHER_ID},
        {"base_digest": digest_of(b"other")},
        {"adapter": "another"},
        {"files": (("adapter_config.json", digest_of(b"x")),)},
    ],
)
def test_a_verdict_that_does_not_hold_loads_nothing(world: World, changes: dict[str, Any]) -> None:
    world.registry.verdict_changes = changes
    assert world.ask(world.digests[0]).status_code == 403
    assert world.states() == {}
    world.registry.verdict_changes = {}
    assert world.ask(world.digests[0]).status_code == 200


@pytest.mark.usefixtures("lasting")
def test_a_resident_whose_verdict_expired_is_loaded_again_under_a_newer_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.digests[0]
    assert world.ask(first).status_code == 200
    running = world.begin(first, 1000)
    with monkeypatch.context() as patched:
        later = datetime.now(UTC) + timedelta(days=2)
        patched.setattr(world.node.residents, "_now", lambda: later)
        refused = world.ask(first)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert not running.generations[0].ended
    running.cancel()
    until(lambda: world.states() == {})
    assert world.node.residents.unloads() == {Reason.VERDICT_EXPIRED: 1}
    assert world.ask(first).status_code == 200
    # And not at all where there is none.
    world.registry.verdict_changes = {"not_after": datetime(2020, 1, 1, tzinfo=UTC)}
    with monkeypatch.context() as patched:
        patched.setattr(world.node.residents, "_now", lambda: later)
        assert world.ask(first).status_code == 503
    until(lambda: world.states() == {})
    assert world.ask(first).status_code == 403


_OTHER = digest_of(b"other")


@pytest.mark.parametrize(
    "changes",
    [
        {"catalog_digest": _OTHER},
        {"earlier_catalog_digests": (digest_of(b"third"),)},
        {"earlier_catalog_digests": (_OTHER,), "verifier_id": "urn:other"},
        {"earlier_catalog_digests": (_OTHER,), "base_digest": digest_of(b"x")},
    ],
)
def test_a_verdict_over_a_catalog_that_the_base_has_not_is_refused(
    world: World, changes: dict[str, Any]
) -> None:
    world.registry.verdict_changes = {"catalog_digest": _OTHER}
    world.registry.statement_changes = changes
    assert world.ask(world.digests[0]).status_code == 403


def test_a_verdict_over_another_catalog_of_the_base_holds(world: World) -> None:
    own = world.node.base.catalog_digest
    world.registry.verdict_changes = {"catalog_digest": _OTHER}
    world.registry.statement_changes = {"catalog_digest": _OTHER, "earlier_catalog_digests": (own,)}
    assert world.ask(world.digests[0]).status_code == 200
    world.registry.statement_changes = {"earlier_catalog_digests": (_OTHER,)}
    assert world.ask(world.digests[1]).status_code == 200


def test_files_that_changed_on_disk_are_not_loaded(world: World, base: ProvenBase) -> None:
    digest = world.digests[0]
    key = Key(sw.TENANT_ID, digest)
    folder = world.node.store.folder(key)
    world.registry.pull(sw.TENANT, sw.ADAPTER, digest, folder)
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(world.registry.artifacts[world.digests[1]].files[weights.name])
    assert text_of(world.ask(digest)) != text_of(world.ask(world.digests[1]))
    assert digest_of(weights.read_bytes()) == digest_of(
        world.registry.artifacts[digest].files[weights.name]
    )


@pytest.mark.usefixtures("lasting")
def test_a_base_that_changed_answers_nobody_any_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = world.begin(None, 900)
    attach = world.node.engine.attach
    _, weight = next(iter(world.loaded.parameters))

    def harmful(name: Any, adapter: Any) -> Any:
        with torch.inference_mode():
            weight.add_(1)
        return attach(name, adapter)

    monkeypatch.setattr(world.node.engine, "attach", harmful)
    assert world.ask(world.digests[0]).status_code in (403, 503)
    assert len(list(running.generations[0].tokens())) < 900
    ready = world.http.get("/readyz")
    assert ready.status_code == 503
    assert "the engine is stopped" in ready.text
    for digest in (None, *world.digests):
        assert world.ask(digest).status_code == 503


def test_revocation_drains_purges_unloads_and_acknowledges(world: World) -> None:
    digest, other = world.digests
    key = Key(sw.TENANT_ID, digest)
    assert world.ask(digest).status_code == 200
    with ew.lasting(world.node.engine):
        running = world.begin(digest, 300)
        world.registry.revoke(digest)
        until(lambda: world.states().get(digest) == "DRAINING")
        assert world.ask(digest).status_code == 403
        assert world.ask(other).status_code == 200
        assert not world.registry.acknowledged
    assert len(list(running.generations[0].tokens())) == 300
    until(lambda: bool(world.registry.acknowledged))
    tenant_id, acknowledged, freed = world.registry.acknowledged[0]
    assert (tenant_id, acknowledged) == (str(sw.TENANT_ID), digest)
    assert freed > 0
    assert digest not in world.states()
    assert not world.node.store.folder(key).exists()
    assert world.node.store.feed_index() == 1
    world.registry.artifacts[digest].revoked = False
    assert world.ask(digest).status_code == 403


@pytest.mark.usefixtures("lasting")
def test_a_tenant_whose_answers_are_long_leaves_lanes_to_the_others(world: World) -> None:
    crowd = [world.start(None, 1000) for _ in range(limits.NODE_RUNNING)]
    lanes = world.node.engine._runner.lanes
    until(lambda: lanes.free == limits.NODE_RUNNING - limits.TENANT_RUNNING)
    other = world.ask(None, tenant=sw.OTHER, tenant_id=sw.OTHER_ID)
    assert other.status_code == 200
    assert not any(one.generations[0].ended for one in crowd)
    list(map(Running.cancel, crowd))


@pytest.mark.usefixtures("lasting")
def test_what_was_revoked_while_it_waited_does_not_begin(world: World) -> None:
    first = world.digests[0]
    crowd = [world.start(None, 1000) for _ in range(limits.NODE_RUNNING)]
    waiting = world.start(first, 5)
    world.registry.revoke(first)
    until(lambda: not world.node.residents.usable(Key(sw.TENANT_ID, first)))
    list(map(Running.cancel, crowd))
    with pytest.raises(DeniedError):
        list(waiting.generations[0].tokens())
    until(lambda: bool(world.registry.acknowledged))


@pytest.mark.usefixtures("lasting")
def test_a_withdrawn_grant_ends_contexts_from_before_and_nobody_elses(world: World) -> None:
    first = world.digests[0]
    crowd = [world.start(None, 1000) for _ in range(limits.NODE_RUNNING)]
    waiting = world.start(first, 5)
    world.registry.withdraw("app", 2)
    until(lambda: bool(world.node.completions._gate.withdrawn._epochs))
    assert world.ask(first, tokens=1).status_code == 403
    list(map(Running.cancel, crowd))
    with pytest.raises(DeniedError):
        list(waiting.generations[0].tokens())
    assert world.ask(first, subject="other").status_code == 200
    assert world.ask(None).status_code == 200
    # It was given again.
    assert world.ask(first, grant_epoch=2).status_code == 200


@pytest.mark.usefixtures("lasting")
def test_who_waited_for_longer_than_the_context_holds_is_told_to_ask_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = [world.start(None, 1000) for _ in range(limits.NODE_RUNNING)]
    waiting = world.start(None, 5)
    later = datetime.now(UTC) + timedelta(seconds=60)
    monkeypatch.setattr(world.node.completions._gate, "_now", lambda: later)
    list(map(Running.cancel, crowd))
    with pytest.raises(UnavailableError, match="ask again") as refused:
        list(waiting.generations[0].tokens())
    assert refused.value.retry_after == 1


@pytest.mark.usefixtures("lasting")
def test_a_deadline_cancels(world: World) -> None:
    digest = world.digests[0]
    running = world.begin(digest, 1000)
    world.registry.revoke(digest, deadline=0)
    assert len(list(running.generations[0].tokens())) < 1000
    assert running.generations[0].finish_reason == "cancelled"
    until(lambda: bool(world.registry.acknowledged))


def test_a_digest_that_is_not_resident_is_acknowledged_too(world: World) -> None:
    world.registry.revoke(world.digests[0])
    until(lambda: bool(world.registry.acknowledged))
    assert world.registry.acknowledged[0][2] == 0


def test_what_the_heartbeat_names_is_let_go_of(world: World) -> None:
    digest = world.digests[0]
    assert world.ask(digest).status_code == 200
    world.registry.overdue = [
        {"tenantId": str(sw.TENANT_ID), "adapterDigest": digest, "deadlineSeconds": 0}
    ]
    world.node.follower.heartbeat(world.node.residents)
    assert world.ask(digest).status_code == 403
    until(lambda: bool(world.registry.acknowledged))


def test_a_node_whose_revocation_list_expires_refuses_new_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.http.get("/readyz").status_code == 200
    world.registry.down = True
    assert world.ask(None).status_code == 200
    held = world.node.follower._held
    monkeypatch.setattr(held, "_elapsed", lambda: time.monotonic() + 100_000)
    answer = world.ask(None)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    ready = world.http.get("/readyz")
    assert ready.status_code == 503
    assert "revocation list 1 expired" in ready.json()["reason"]
    assert world.http.get("/healthz").status_code == 200
    world.registry.down = False
    world.registry.list_issue()
    world.node.follower.list_refresh(world.node.residents)
    assert world.ask(None).status_code == 200


def test_a_registry_that_is_down_is_503_and_leaves_nothing(world: World) -> None:
    world.registry.down = True
    assert world.ask(world.digests[0]).status_code == 503
    assert world.states() == {}
    world.registry.down = False
    assert world.ask(world.digests[0]).status_code == 200


def test_a_context_from_before_this_process_is_refused(world: World) -> None:
    gate = world.node.completions._gate
    gate._started_at = datetime.now(UTC).replace(microsecond=0)
    issued = gate._started_at - timedelta(seconds=1)
    expires = issued + timedelta(seconds=59)
    assert world.ask(None, issued_at=issued, expires_at=expires).status_code == 403
