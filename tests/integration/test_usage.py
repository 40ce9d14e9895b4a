"""Usage on the real service: nodes tell totals, and each tenant sees its own alone."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.adapter_statistics import AdapterStatistics
from gpu_worker.serving.meter import Amount, RequestTuple
from gpu_worker.serving.metrics import Looks, Metrics
from gpu_worker.serving.recorder import Recorder
from gpu_worker.serving.tracing import Tracer, provider_open
from gpu_worker.serving.usage_report import UsageReport
from registry_service.client import RegistryClient
from registry_service.domain import limits, wire
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import (
    ForbiddenError,
    MalformedError,
    NotFoundError,
    UnavailableError,
)
from tests.integration.conftest import World
from tests.integration.revocation_world import tenant_id
from tests.integration.test_wire import fits

A, B = digest_of(b"a"), digest_of(b"b")


def item(tenant: uuid.UUID, digest: str, number: int) -> dict[str, Any]:
    return {
        "tenantId": str(tenant),
        "adapterDigest": digest,
        "requests": number,
        "promptTokens": 10 * number,
        "completionTokens": 2 * number,
        "reusedTokens": number,
    }


@pytest.fixture
def node(world: World) -> RegistryClient:
    """A registered node's client."""
    client = world.client("node")
    with world.client("operator") as operator:
        catalog = operator.base_show("tiny")["catalogDigest"]
    client.node_register("node-1", world.base_digest, "http://127.0.0.1:1", catalog)
    return client


def used(world: World, role: str, tenant: str) -> dict[str, int]:
    with world.client(role) as client:
        found = list(client.usage_list(tenant))
    for each in found:
        fits(wire.Usage, each)
    return {each["adapterDigest"]: each["requests"] for each in found}


def test_a_tenant_sees_its_own_and_no_other(world: World, node: RegistryClient) -> None:
    mine, theirs = tenant_id(world, "t-1042"), tenant_id(world, "t-2001")
    items = [item(mine, A, 3), item(mine, "base", 1), item(theirs, B, 5)]
    node.usage_report("node-1", str(uuid.uuid4()), items)
    assert used(world, "publisher:t-1042", "t-1042") == {A: 3, "base": 1}
    assert used(world, "publisher:t-2001", "t-2001") == {B: 5}
    assert used(world, "operator", "t-1042") == {A: 3, "base": 1}
    with pytest.raises(NotFoundError):
        used(world, "publisher:t-1042", "t-2001")


def test_runs_are_added_and_what_is_told_twice_or_late_counts_once(
    world: World, node: RegistryClient
) -> None:
    mine = tenant_id(world, "t-1042")
    first, second = str(uuid.uuid4()), str(uuid.uuid4())
    for run, number in ((first, 2), (first, 7), (first, 7), (first, 4), (second, 1)):
        node.usage_report("node-1", run, [item(mine, A, number)])
    assert used(world, "operator", "t-1042") == {A: 8}


def test_only_a_node_tells_and_only_of_itself(world: World, node: RegistryClient) -> None:
    mine = tenant_id(world, "t-1042")
    with world.client("admin") as admin:
        world.tokens["node-2"] = admin.token_create("node-2", "node", None)["token"]
    run = str(uuid.uuid4())
    with world.client("node-2") as other, pytest.raises(ForbiddenError):
        other.usage_report("node-1", run, [item(mine, A, 1)])
    with pytest.raises(NotFoundError):
        node.usage_report("node-1", run, [item(uuid.uuid4(), A, 1)])
    for wrong in ({"requests": -1}, {"adapterDigest": "../x"}, {"requests": 2**63}):
        with pytest.raises(MalformedError):
            node.usage_report("node-1", run, [item(mine, A, 1) | wrong])
    assert used(world, "operator", "t-1042") == {}


def test_a_list_is_paged(world: World, node: RegistryClient) -> None:
    mine = tenant_id(world, "t-1042")
    made = [item(mine, digest_of(bytes([number])), number) for number in range(120)]
    node.usage_report("node-1", str(uuid.uuid4()), made)
    assert len(used(world, "operator", "t-1042")) == 120


def recorder_make() -> Recorder:
    metrics = Metrics(Looks(dict, dict, dict))
    return Recorder(metrics, AdapterStatistics(metrics), Tracer(provider_open(None, node="n")))


def test_what_was_not_heard_is_told_again(world: World, node: RegistryClient) -> None:
    recorder = recorder_make()
    who = RequestTuple(tenant_id(world, "t-1042"), world.base_digest, A, digest_of(b"t"))
    report = UsageReport(node, recorder, "node-1")
    recorder._meter.count(who, Amount(1, 10, 2, 0))
    with RegistryClient("http://127.0.0.1:1", world.tokens["node"]) as nobody:
        report._client = nobody
        with pytest.raises(UnavailableError):
            report.send()
    report._client = node
    report.send()
    report.send()
    assert used(world, "operator", "t-1042") == {A: 1}
    recorder._meter.count(who, Amount(1, 10, 2, 0))
    report.send()
    assert used(world, "operator", "t-1042") == {A: 2}


def test_what_a_node_forgot_is_counted_once(
    world: World, node: RegistryClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "USAGE_TUPLES", 1)
    recorder = recorder_make()
    report = UsageReport(node, recorder, "node-1")
    one, two = (
        RequestTuple(tenant_id(world, "t-1042"), world.base_digest, digest, digest_of(b"t"))
        for digest in (A, B)
    )
    for who in (one, one, two, one):
        recorder._meter.count(who, Amount(1, 10, 2, 0))
        report.send()
    assert used(world, "operator", "t-1042") == {A: 3, B: 1}
    assert set(recorder._meter.used()) == {one}


class Sums:
    """A registry's side of reports: it may be down, or its answer lost, and requests go on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.kept: dict[tuple[str, str, str], int] = {}
        self.lost = ""
        self.meanwhile: list[RequestTuple] = []

    def requests_end(self) -> None:
        while self.meanwhile:
            self._recorder._meter.count(self.meanwhile.pop(), Amount(1))

    def usage_report(self, _node: str, run: str, items: list[dict[str, Any]]) -> None:
        self.requests_end()
        if self.lost == "report":
            raise UnavailableError("down")
        for each in items:
            key = (run, each["tenantId"], each["adapterDigest"])
            self.kept[key] = max(self.kept.get(key, 0), each["requests"])
        if self.lost == "answer":
            raise UnavailableError("lost")

    def sums(self) -> Counter[tuple[str, str]]:
        """The runs of a node are added up."""
        found: Counter[tuple[str, str]] = Counter()
        for (_, tenant, digest), requests in self.kept.items():
            found[tenant, digest] += requests
        return found


TUPLES = [
    RequestTuple(uuid.UUID(int=tenant), A, digest, digest_of(b"t"))
    for tenant in (1, 2)
    for digest in (A, B)
]
USES = st.lists(st.sampled_from(TUPLES), max_size=4)
ROUNDS = st.lists(st.tuples(USES, USES, st.sampled_from(["", "", "report", "answer"])), max_size=8)


@given(ROUNDS)
def test_whatever_is_lost_or_forgotten_everything_is_counted_once(
    rounds: list[tuple[list[RequestTuple], list[RequestTuple], str]],
) -> None:
    recorder = recorder_make()
    client: Any = Sums(recorder)
    report = UsageReport(client, recorder, "node-1")
    with patch.object(limits, "USAGE_TUPLES", 1):
        for before, meanwhile, lost in [*rounds, ([], [], "")]:
            for who in before:
                recorder._meter.count(who, Amount(1))
            client.meanwhile, client.lost = list(meanwhile), lost
            report._try()
            assert lost or len(recorder._meter.used()) <= 1
            client.requests_end()
        report.send()
    asked = [who for before, meanwhile, _ in rounds for who in (*before, *meanwhile)]
    assert client.sums() == Counter((str(who.tenant_id), who.adapter_digest) for who in asked)
