"""What a node tells of its requests: the one tuple everywhere, and nothing that was said."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import NoOpTracerProvider

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.lanes import Lanes
from gpu_worker.serving.meter import Amount, RequestTuple
from gpu_worker.serving.residency import Key
from gpu_worker.serving.running import Running
from gpu_worker.serving.tracing import provider_open
from registry_service.domain.digests import Digest
from registry_service.trust.routing_context import BASE_MARKER
from tests.integration import serving_world as sw
from tests.integration.http_world import HttpWorld, base_with_template, listening, logged
from tests.waiting import until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

CANARY, SESSION = "xylophone-canary", "session-canary"
SPANS = {"request", "admit", "load", "queue", "prefill", "decode"}
FIELDS = ("tenantId", "baseDigest", "adapterDigest", "tokenizerDigest")


class Collector(ThreadingHTTPServer):
    """Takes traces as an OTLP collector does."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self) -> list[Any]:
        found = []
        for content in self.received:
            request = ExportTraceServiceRequest.FromString(content)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return base_with_template(tmp_path_factory.mktemp("base"))


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    with logged() as written:
        yield written


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def world(
    base: ProvenBase,
    collector: Collector,
    log: io.StringIO,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[HttpWorld]:
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    for seed, tenant in enumerate((sw.TENANT, sw.TENANT, sw.OTHER)):
        folder = tmp_path_factory.mktemp("adapter")
        sw.peft_make(base.dir, folder, seed)
        registry.publish(sw.adapter_files(base, folder, tenant=tenant), tenant=tenant)
    with listening(registry, base, tmp_path, traces=collector.url) as world:
        yield world


class Steps:
    """Looks at every step of an engine: what each row runs, and whose it is."""

    def __init__(self, world: HttpWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[RequestTuple] = Counter()
        self.wrong: list[Any] = []
        engine = world.node.engine
        forward = engine._runner.forward

        def watched(step: Any) -> Any:
            owners = {row: key for key, row in engine._rows.items()}
            for sequence in step.sequences:
                job = sequence.job
                running: Any = job.on_end
                who = running.__self__.request.who
                own = None
                if who.adapter_digest != BASE_MARKER:
                    own = Key(who.tenant_id, who.adapter_digest)
                ran = owners.get(sequence.bank_row)
                if (job.adapter, ran, job.tenant) != (own, own, who.tenant_id):
                    self.wrong.append((who, job.adapter, ran))
                self.seen[who] += 1
            return forward(step)

        monkeypatch.setattr(engine._runner, "forward", watched)


def callers(world: HttpWorld) -> list[tuple[RequestTuple, Digest | None, dict[str, Any]]]:
    """Who asks: two tenants, three adapters, and the base for both."""
    base = world.registry.base
    found = []
    for artifact in world.registry.artifacts.values():
        claims = {"tenant": artifact.tenant, "tenant_id": artifact.tenant_id}
        found.append((artifact.digest, claims))
    for tenant, tenant_id in ((sw.TENANT, sw.TENANT_ID), (sw.OTHER, sw.OTHER_ID)):
        found.append((None, {"tenant": tenant, "tenant_id": tenant_id}))
    return [
        (
            RequestTuple(
                claims["tenant_id"], base.digest, digest or BASE_MARKER, base.tokenizer_digest
            ),
            digest,
            {**claims, "session_id": SESSION},
        )
        for digest, claims in found
    ]


def ask(world: HttpWorld, number: int) -> tuple[RequestTuple, Any]:
    """One of many requests: completions and chats, one or two answers, some left in the middle."""
    people = callers(world)
    who, digest, claims = people[number % len(people)]
    client = world.client(digest, **claims)
    text = f"{CANARY} w{number % 90} " * 3
    options: dict[str, Any] = {"model": CANARY, "max_tokens": 6, "n": 1 + number % 2}
    if number % 3 == 0:
        return who, client.chat.completions.create(
            messages=[{"role": "user", "content": text}], **options
        )
    if number % 7 == 0:
        stream = client.completions.create(prompt=text, stream=True, **options)
        next(iter(stream))
        stream.response.close()
        return who, None
    return who, client.completions.create(prompt=text, **options)


def lines_of(log: io.StringIO, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return [line for line in lines if line.get("event") == event]


def tuple_of(fields: dict[str, Any]) -> tuple[str, ...]:
    return tuple(fields[name] for name in FIELDS)


def test_the_tuple_is_one_and_the_same_everywhere(
    world: HttpWorld,
    collector: Collector,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 40
    steps = Steps(world, monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(world, number), range(count)))
    until(lambda: world.idle() and len(lines_of(log, "request.ended")) == count)
    asked = Counter(who for who, _ in answers)
    assert steps.wrong == []
    assert set(steps.seen) == set(asked)
    metered, _ = world.node.completions.recorder.used_since(0)
    assert {who: amount.requests for who, amount in metered.items()} == asked
    for who in asked:
        whole = [answer.usage for other, answer in answers if other == who and answer is not None]
        told = Amount(
            prompt=sum(usage.prompt_tokens for usage in whole),
            completion=sum(usage.completion_tokens for usage in whole),
        )
        left = [answer for other, answer in answers if other == who and answer is None]
        # Whoever left in the middle used what they used, which no answer told.
        assert metered[who].prompt >= told.prompt
        assert metered[who].completion >= told.completion
        assert left or (metered[who].prompt, metered[who].completion) == (
            told.prompt,
            told.completion,
        )
    world.node.usage.send()
    reported = {
        (item["tenantId"], item["adapterDigest"]): item["requests"]
        for item in world.registry.used.values()
    }
    assert reported == {
        (str(who.tenant_id), who.adapter_digest): number for who, number in asked.items()
    }
    logged = Counter(tuple_of(line) for line in lines_of(log, "request.ended"))
    expected = Counter({tuple_of(who.fields()): number for who, number in asked.items()})
    assert logged == expected
    traced = world.node.traces
    assert not isinstance(traced, NoOpTracerProvider)
    traced.force_flush()  # type: ignore[attr-defined]  # that of the SDK
    spans = collector.spans()
    assert {span.name for span in spans} == SPANS
    roots = [span for span in spans if span.name == "request"]
    assert Counter(tuple_of(attributes(span)) for span in roots) == expected
    for span in spans:
        root = next(other for other in roots if other.trace_id == span.trace_id)
        assert tuple_of(attributes(span)) == tuple_of(attributes(root))


def attributes(span: Any) -> dict[str, Any]:
    return {pair.key: pair.value.string_value for pair in span.attributes}


def test_nothing_that_was_said_or_is_secret_is_told(
    world: HttpWorld, collector: Collector, log: io.StringIO, tmp_path: Path
) -> None:
    contexts: list[str] = []
    mint = world.registry.context

    def minted(*arguments: Any, **changes: Any) -> str:
        contexts.append(mint(*arguments, **changes))
        return contexts[-1]

    world.registry.context = minted  # type: ignore[method-assign]  # a probe
    texts = []
    for number in range(12):
        _, answer = ask(world, number)
        for choice in answer.choices if answer is not None else ():
            texts.append(getattr(choice, "text", None) or choice.message.content)
    wrong = world.client(None, session_id=SESSION).completions
    for fields in ({"extra_body": {CANARY: CANARY}}, {"stop": [CANARY] * 5}):
        with pytest.raises(openai.BadRequestError):
            wrong.create(model="any", prompt=CANARY, **fields)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(openai.PermissionDeniedError):
        world.client(None, node="node-2").completions.create(model="any", prompt=CANARY)
    until(world.idle)
    world.node.traces.force_flush()  # type: ignore[attr-defined]  # that of the SDK
    told = {
        "log": log.getvalue(),
        "metrics": world.get("/metrics").text,
        "residency": world.get("/v1/residency").text,
        "traces": b"".join(collector.received).decode("latin-1"),
    }
    key = (tmp_path / "store" / "node.key").read_bytes()
    secrets = [CANARY, SESSION, key.hex(), *contexts, *(text for text in texts if text)]
    assert len(secrets) > 20
    found = {place: secret for place, text in told.items() for secret in secrets if secret in text}
    assert found == {}
    assert all(told.values())


def test_metrics_count_and_have_no_digest_or_tenant(world: HttpWorld) -> None:
    first = next(iter(world.registry.artifacts))
    for _ in range(2):
        world.complete(first, prompt=" ".join(["w1"] * 80))
    with pytest.raises(openai.BadRequestError):
        world.complete(n=9)
    until(world.idle)
    until(lambda: "node_load_seconds_count 1.0" in world.get("/metrics").text)
    text = world.get("/metrics").text
    numbers = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    assert numbers['node_requests_total{route="completions",status="2xx"}'] == 2
    assert numbers['node_requests_total{route="completions",status="4xx"}'] == 1
    assert numbers['node_tokens_total{kind="prompt"}'] == 160
    assert numbers['node_tokens_total{kind="completion"}'] == 16
    assert numbers['node_tokens_total{kind="reused"}'] >= 64
    assert numbers["node_first_token_seconds_count"] == 2
    assert numbers["node_token_seconds_count"] == 14
    assert numbers["node_load_seconds_count"] == 1
    assert numbers['node_queue_length{queue="running"}'] == 0
    assert numbers['node_resident_bytes{category="ADAPTER"}'] > 0
    assert numbers['node_resident_bytes{category="BASE"}'] > 0
    # What is taken, not the room that blocks may take.
    memory = world.node.engine.memory()
    assert memory.blocks > 0
    assert numbers['node_resident_bytes{category="KV"}'] == memory.lanes + memory.blocks
    assert "sha256" not in text
    assert not any(name in text for name in (sw.TENANT, str(sw.TENANT_ID), sw.ADAPTER))


def test_operators_see_each_adapter(world: HttpWorld) -> None:
    first, second, _ = world.registry.artifacts
    long = " ".join(["w1"] * 80)
    for _ in range(3):
        world.complete(first, prompt=long)
    world.complete(second, prompt=long)
    block = world.node.engine.memory().blocks // 2
    world.registry.revoke(second, deadline=0)
    until(lambda: bool(world.registry.acknowledged))
    until(lambda: sum(item["loads"] for item in world.residency()) == 2)
    items = {item["adapterDigest"]: item for item in world.residency()}
    assert set(items) == {first, second}
    here, gone = items[first], items[second]
    assert (here["state"], here["loads"], here["hits"], here["references"]) == ("SERVING", 1, 2, 0)
    assert here["loadSeconds"] > 0
    assert here["secondsPerToken"] > 0
    assert here["residentBytes"] > 0
    assert here["kvBytes"] == block > 0
    assert (gone["state"], gone["unloads"]) == (None, {"REVOKED": 1})
    assert (gone["residentBytes"], gone["kvBytes"]) == (0, 0)


def test_operators_see_how_often_an_adapter_came_back(world: HttpWorld) -> None:
    first = next(iter(world.registry.artifacts))
    for swap_ins in range(3):
        world.complete(first)
        until(lambda loads=swap_ins + 1: world.residency()[0]["loads"] == loads)
        assert [(i["swapIns"], i["hits"]) for i in world.residency()] == [(swap_ins, 0)]
        until(world.idle)
        world.node.residents.placement_lost(Key(sw.TENANT_ID, first))
        until(lambda: not world.node.residents.residents())


def test_a_session_whose_page_no_lane_takes_is_answered_cold_and_the_log_says_so(
    world: HttpWorld, log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = next(iter(world.registry.artifacts))
    cold = world.complete(digest)
    until(lambda: len(world.node.slots.entries()) == 1)

    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "restore", broken)
        again = world.complete(digest, n=2)
    assert [choice.text for choice in again.choices] == [cold.choices[0].text] * 2
    assert again.usage.prompt_tokens_details.cached_tokens == 0
    until(lambda: [entry.page for entry in world.node.slots.entries()] == [2])
    assert log.getvalue().count("slot page 1: refused") == 1


def test_a_load_that_fails_is_counted(world: HttpWorld) -> None:
    digest = next(iter(world.registry.artifacts))
    world.registry.verdict_changes = {"adapter": "another"}
    with pytest.raises(openai.PermissionDeniedError):
        world.complete(digest)
    until(lambda: bool(world.residency()))
    (item,) = world.residency()
    assert (item["loadFailures"], item["loads"], item["loadSeconds"]) == (1, 0, None)
    assert "node_load_failures_total 1.0" in world.get("/metrics").text


def test_a_refusal_is_logged_with_the_tuple_once_it_is_known(
    world: HttpWorld, log: io.StringIO
) -> None:
    who, digest, claims = callers(world)[0]
    ask = world.client(digest, **claims).completions.create
    with pytest.raises(openai.BadRequestError):
        ask(model="any", prompt="w1", n=9)
    with pytest.raises(openai.BadRequestError):
        ask(model="any", prompt="w1 " * 1200)
    with pytest.raises(openai.PermissionDeniedError):
        world.client(digest, node="node-2", **claims).completions.create(model="any", prompt="w1")
    form, length, denied = lines_of(log, "request.refused")
    assert (form["code"], length["code"]) == ("MALFORMED", "CONTEXT_LENGTH_EXCEEDED")
    assert tuple_of(form) == tuple_of(length) == tuple_of(who.fields())
    # Nothing that a context says is believed before it holds.
    assert not set(FIELDS) & set(denied)


def test_what_happens_to_pages_is_logged_with_the_tuple(world: HttpWorld, log: io.StringIO) -> None:
    who, digest, claims = callers(world)[0]
    ask = world.client(digest, **claims).completions.create
    said = "w1 w2 w3 w4"
    for _ in range(2):
        ask(model="any", prompt=said, max_tokens=2)
    until(lambda: len(lines_of(log, "slot.saved")) == 2)
    assert digest is not None
    world.registry.revoke(digest, deadline=0)
    until(lambda: len(lines_of(log, "slot.removed")) == 1)
    events = [line for line in map(json.loads, log.getvalue().splitlines()) if "page" in line]
    assert [line["event"] for line in events] == [
        "slot.saved",
        "slot.restored",
        "slot.saved",
        "slot.removed",
    ]
    assert {tuple_of(line) for line in events} == {tuple_of(who.fields())}
    assert [line["page"] for line in events] == [1, 1, 2, 2]
    assert events[1]["tokens"] > 0


def test_without_a_collector_nothing_is_traced() -> None:
    assert isinstance(provider_open(None, node=sw.NODE), NoOpTracerProvider)


def test_an_exceptions_own_words_stay_out_of_the_log(log: io.StringIO) -> None:
    try:
        raise ValueError(f"cannot read {CANARY}")
    except ValueError:
        logging.getLogger("gpu_worker.serving").exception("a request failed")
    (line,) = [json.loads(line) for line in log.getvalue().splitlines()]
    assert CANARY not in json.dumps(line)
    assert line["exception"].startswith("ValueError\n")
    assert "test_serving_observed.py" in line["exception"]


@pytest.mark.usefixtures("lasting")
def test_who_ran_is_known_of_a_request_that_was_cancelled(
    world: HttpWorld, log: io.StringIO
) -> None:
    who, digest, claims = callers(world)[0]
    started: list[Running] = []
    ended = world.node.completions.recorder.ended

    def seen(running: Running) -> None:
        started.append(running)
        ended(running)

    world.node.completions.recorder.ended = seen  # type: ignore[method-assign]  # a probe
    stream = world.client(digest, **claims).completions.create(
        model="any", prompt="w1", max_tokens=900, stream=True
    )
    next(iter(stream))
    world.registry.revoke(digest, deadline=0)
    with pytest.raises(openai.APIError):
        list(stream)
    until(lambda: bool(started))
    (line,) = lines_of(log, "request.ended")
    assert line["outcome"] == "cancelled"
    assert tuple_of(line) == tuple_of(started[0].request.who.fields()) == tuple_of(who.fields())
    metered, _ = world.node.completions.recorder.used_since(0)
    assert set(metered) == {who}


@pytest.mark.usefixtures("lasting")
def test_every_request_is_told_of_once_and_traced_once_it_is_known(
    world: HttpWorld, collector: Collector, log: io.StringIO
) -> None:
    who, digest, claims = callers(world)[0]
    good = world.registry.verdict_changes
    world.registry.verdict_changes = {"adapter": "another"}
    refused = [world.send(digest, claims=claims)]
    world.registry.verdict_changes = good
    base = {"tenant": claims["tenant"], "tenant_id": claims["tenant_id"]}
    refused += [
        world.send(claims=base, n=9),
        world.send(claims=base, prompt="w1 " * 1200),
        world.send(claims={**base, "node": "node-2"}),
    ]
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(world.send, claims=base, max_tokens=1000)
        until(lambda: bool(world.node.completions.requests.counts()["running"]))
        world.node.completions.requests.cancel_all()
        failed = later.result()
    assert [answer.status_code for answer in refused] == [403, 400, 400, 403]
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "cancelled")
    ids = [answer.headers["x-request-id"] for answer in refused]
    assert [line["requestId"] for line in lines_of(log, "request.refused")] == ids
    (ended,) = lines_of(log, "request.ended")
    assert (ended["requestId"], ended["outcome"]) == (failed.headers["x-request-id"], "cancelled")
    world.node.traces.force_flush()  # type: ignore[attr-defined]  # that of the SDK
    roots = [attributes(span) for span in collector.spans() if span.name == "request"]
    # The fourth is nobody's: its context did not hold.
    assert [(root["requestId"], root["outcome"]) for root in roots] == [
        (ids[0], "forbidden"),
        (ids[1], "malformed"),
        (ids[2], "context_length_exceeded"),
        (failed.headers["x-request-id"], "cancelled"),
    ]
    assert tuple_of(roots[0]) == tuple_of(who.fields())
    assert {root["tenantId"] for root in roots} == {who.fields()["tenantId"]}
