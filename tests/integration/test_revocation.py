"""Nodes on the real service: what is revoked goes, also from whoever was cut off or restarted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from gpu_worker.serving.residency import Key
from gpu_worker.serving.trust import trust_parse
from registry_service.client import RegistryClient
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import UnavailableError, UntrustedError
from registry_service.domain.roles import PLATFORM
from registry_service.trust.routing_context import RoutingContext, routing_context_verify
from registry_service.usecases import maintenance
from registry_service.usecases.context import tenant_transaction
from tests.integration import revocation_world as rw
from tests.integration.conftest import World, lora_tensors, safetensors_bytes
from tests.integration.revocation_world import (
    ADAPTER,
    TENANT,
    ServingNode,
    content_of,
    listed,
    revoke,
)
from tests.waiting import until

pytestmark = pytest.mark.torch


@pytest.fixture
def nodes(world: World, tmp_path: Path) -> Iterator[list[ServingNode]]:
    world.settle()
    trust = tmp_path / "keys" / "trust.json"
    yield from rw.ending(rw.nodes_make(world, tmp_path, ["n-1", "n-2"], trust))


@pytest.fixture
def background(world: World) -> Iterator[Callable[[], None]]:
    """Starts the service's background, once what is needed has been admitted."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    yield lambda: threads.append(rw.background(world, stop))
    stop.set()
    for thread in threads:
        thread.join()


def test_a_node_lets_go_of_the_same_bytes_in_another_package(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    plain = safetensors_bytes(lora_tensors(), 5)
    again = safetensors_bytes(dict(reversed(lora_tensors().items())), 5)
    first = world.publish(tmp_path / "a", weights=plain)
    world.settle()
    rw.validate(world, content_of(plain))
    world.approve(first)
    twin = world.admit(tmp_path / "b", weights=again, tenant="t-2001", adapter="copy")
    other = world.admit(tmp_path / "c", tenant="t-2001", adapter="own", fill=9)
    holder, fresh = nodes
    of_twin = {"adapter": "copy", "tenant": "t-2001"}
    assert holder.accepts(twin, **of_twin)
    assert holder.accepts(other, adapter="own", tenant="t-2001")
    revoke(world, first)
    for node in nodes:
        node.follower.list_refresh(node.residents)
    assert not holder.accepts(twin, **of_twin)
    until(lambda: twin not in holder.states())
    assert not fresh.accepts(twin, **of_twin)
    assert fresh.engine.attached == set()
    assert holder.accepts(other, adapter="own", tenant="t-2001")


def test_a_list_that_comes_while_the_same_bytes_are_loaded_ends_them(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    first = world.admit(tmp_path / "a", fill=5)
    twin = world.admit(tmp_path / "b", fill=5, adapter="copy")
    (node, _) = nodes

    def meanwhile() -> None:
        revoke(world, first)
        node.follower.list_refresh(node.residents)

    node.engine.on_attach = meanwhile
    assert not node.accepts(twin, adapter="copy")
    until(lambda: node.states() == {} and not node.residents.letting_go)
    assert node.engine.attached == set()


def test_what_a_tenant_revokes_stops_no_other_tenant(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    own = world.admit(tmp_path / "a", fill=5)
    theirs = world.admit(tmp_path / "b", fill=5, tenant="t-2001")
    with world.client("admin") as admin:
        world.tokens["op-1042"] = admin.token_create("op-1042", "operator", TENANT)["token"]
    with world.client("op-1042") as operator:
        operator.revoke(TENANT, own, "leaks names")
    (entry,) = listed(world).entries
    assert entry.tenant_id == rw.tenant_id(world, TENANT)
    (node, _) = nodes
    node.follower.list_refresh(node.residents)
    assert not node.accepts(own)
    assert node.accepts(theirs, tenant="t-2001")


# Nodes


def test_two_nodes_refuse_drain_purge_unload_and_acknowledge(
    world: World, background: Callable[[], None], nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a", declare={"max_replicas": 2})
    background()
    key = Key(rw.tenant_id(world, TENANT), digest)  # type: ignore[arg-type]  # from the wire
    slots = [node.slots.save(digest) for node in nodes]
    for node in nodes:
        node.follow()
        assert node.accepts(digest)
    held = nodes[0].lease(digest)
    shown = revoke(world, digest)
    assert shown["state"] == "REVOKING"
    until(lambda: not any(node.accepts(digest) for node in nodes))
    until(lambda: nodes[1].states() == {})
    assert nodes[0].states() == {digest: "DRAINING"}
    assert nodes[0].engine.steps == []
    with world.client("operator") as operator:

        def state(name: str) -> str:
            rows = operator.revocation_show(TENANT, digest)["nodes"]
            return next(str(row["state"]) for row in rows if row["node"] == name)

        until(lambda: state("n-2") == "ACKNOWLEDGED")
        assert state("n-1") == "OUTSTANDING"
        held.release()
        until(lambda: operator.artifact_show(TENANT, digest)["state"] == "REVOKED")
        rows = operator.revocation_show(TENANT, digest)["nodes"]
    assert {(row["freedBytes"], row["purgedBlocks"]) for row in rows} == {
        (rw.ADAPTER_BYTES, rw.BLOCKS)
    }
    for node, slot in zip(nodes, slots, strict=True):
        assert node.engine.steps == ["purge", "unload"]
        assert not slot.exists()
        assert not node.store.folder(key).exists()


def test_a_node_that_is_cut_off_serves_until_its_list_expires_and_again_when_it_is_back(
    world: World, background: Callable[[], None], nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest, other = (world.admit(tmp_path / str(n), fill=n) for n in (1, 2))
    background()
    (node, _) = nodes
    node.follow()
    assert node.accepts(digest)
    assert node.accepts(other)
    node.link.cut = True
    revoke(world, digest)
    assert node.accepts(digest), "it cannot know yet"
    node.clock.ahead = 300
    assert node.accepts(other)
    node.clock.ahead = 601
    assert not node.accepts(other)
    assert "expired" in (node.follower.stale_reason or "")
    with world.client("operator") as operator:
        assert operator.artifact_show(TENANT, digest)["state"] == "REVOKING"
    node.clock.ahead = 0
    node.link.cut = False
    until(lambda: digest not in node.states())
    assert not node.accepts(digest)
    assert node.accepts(other)


def test_an_older_list_that_somebody_replays_is_refused_also_after_a_restart(
    world: World, nodes: list[ServingNode], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = world.admit(tmp_path / "a")
    (node, _) = nodes
    with world.client("auditor") as auditor:
        older = auditor.revocation_list()
    assert older is not None
    revoke(world, digest)
    node.follower.list_refresh(node.residents)
    node.link.replies["/v1/revocation-list"] = older
    with pytest.raises(UntrustedError, match="or more"):
        node.follower.list_refresh(node.residents)
    assert "revocation list refused" in caplog.text
    assert node.held.number == listed(world).number
    node.die()
    again = node.restarted()
    again.link.replies["/v1/revocation-list"] = older
    with pytest.raises(UntrustedError, match="or more"):
        again.begin()
    assert not again.accepts(digest)
    again.link.replies.clear()
    again.begin()
    assert again.follower.stale_reason is None
    again.end()


def test_a_restart_in_the_middle_of_a_drain_continues_it(
    world: World, background: Callable[[], None], nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    background()
    node, other = nodes
    other.follow()
    node.follow()
    slot = node.slots.save(digest)
    node.lease(digest)
    revoke(world, digest)
    until(lambda: node.states().get(digest) == "DRAINING")
    node.die()
    assert slot.exists()
    key = Key(rw.tenant_id(world, TENANT), digest)  # type: ignore[arg-type]  # from the wire
    assert node.store.folder(key).exists()
    again = node.restarted()
    again.begin()
    assert not again.accepts(digest)
    with world.client("operator") as operator:
        until(lambda: operator.artifact_show(TENANT, digest)["state"] == "REVOKED")
    assert not slot.exists()
    assert not again.store.folder(key).exists()
    again.end()


def test_a_purge_that_fails_is_tried_again_and_not_acknowledged(
    world: World,
    background: Callable[[], None],
    nodes: list[ServingNode],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest = world.admit(tmp_path / "a")
    background()
    (node, other) = nodes
    other.follow()
    assert node.accepts(digest)

    def broken(_: object) -> int:
        raise UnavailableError("the disk does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(node.slots, "remove", broken)
        revoke(world, digest)
        node.follower.reconcile(node.residents)
        until(lambda: "purge" in node.engine.steps)
        assert not node.accepts(digest)
        with world.client("operator") as operator:
            assert operator.artifact_show(TENANT, digest)["state"] == "REVOKING"
    until(lambda: not node.residents.letting_go)
    node.follower.reconcile(node.residents)
    with world.client("operator") as operator:
        until(lambda: operator.artifact_show(TENANT, digest)["state"] == "REVOKED")


def test_a_node_that_stops_leaves_its_place_to_another_at_once(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a", declare={"max_replicas": 1})
    old, new = nodes
    for node in nodes:
        node.follow()
    assert old.accepts(digest)
    with pytest.raises(UnavailableError, match="no place in the pool"):
        new.lease(digest)
    old.end()
    assert new.accepts(digest)


def test_old_revocations_are_acknowledged_only_where_the_service_waits_for_it(
    world: World, background: Callable[[], None], nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    background()
    for node in nodes:
        node.follow()
    # Nothing of it is anywhere: both say so, and none of them purges anything for it.
    revoke(world, digest)
    with world.client("operator") as operator:
        until(lambda: operator.artifact_show(TENANT, digest)["state"] == "REVOKED")
        rows = operator.revocation_show(TENANT, digest)["nodes"]
    assert {(row["node"], row["state"], row["freedBytes"]) for row in rows} == {
        ("n-1", "ACKNOWLEDGED", 0),
        ("n-2", "ACKNOWLEDGED", 0),
    }
    assert [node.engine.steps for node in nodes] == [[], []]
    # A node that comes later reads of it in the log, and has nothing to say.
    (later,) = rw.nodes_make(world, tmp_path, ["n-3"], tmp_path / "keys" / "trust.json")
    later.follow()
    until(lambda: later.follower.index == nodes[0].follower.index)
    assert not later.residents.letting_go
    assert not later.accepts(digest)
    assert later.engine.steps == []
    later.end()


def test_a_second_revocation_with_a_deadline_cancels_what_the_first_let_run(
    world: World, background: Callable[[], None], nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    background()
    for node in nodes:
        node.follow()
    held = nodes[0].lease(digest)
    nodes[0].engine.on_cancel = held.release
    revoke(world, digest)
    until(lambda: nodes[0].states().get(digest) == "DRAINING")
    number = listed(world).number
    revoke(world, digest, 0)
    assert listed(world).number == number + 1
    until(lambda: nodes[0].states() == {})
    with world.client("operator") as operator:
        shown = revoke(world, digest, 3600)
        assert shown["deadlineSeconds"] is not None
        assert int(str(shown["deadlineSeconds"])) < 60, "a deadline is never put off"
        world.settle()
        kinds = [event["kind"] for event in operator.audit_list(subject=digest)]
    assert kinds.count("revocation.hastened") == 1


def test_a_revocation_waits_for_a_node_that_is_unheard_and_may_be_serving(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    with tenant_transaction(world.context, PLATFORM) as session:
        session.execute(text("UPDATE node SET lease_until = now() - interval '1 hour'"))
    shown = revoke(world, digest)
    assert shown["state"] == "REVOKING"
    assert maintenance.revocations_sweep(world.context) == 0
    with tenant_transaction(world.context, PLATFORM) as session:
        session.execute(text("UPDATE node SET fresh_until = now() - interval '1 hour'"))
    assert maintenance.revocations_sweep(world.context) == 1


# The feed


def test_a_node_that_read_further_than_the_log_compares_everything(
    world: World,
    background: Callable[[], None],
    nodes: list[ServingNode],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    digest = world.admit(tmp_path / "a")
    background()
    (node, _) = nodes
    assert node.accepts(digest)
    node.store.feed_index_write(10_000)
    node.die()
    again = node.restarted()
    again.begin()
    assert again.follower.index == 10_000
    with world.client("operator") as operator:
        last = max(event["index"] for event in operator.feed(0)["items"])
    again.follower.feed_read(again.residents, 0)
    assert "comparing everything" in caplog.text
    assert again.store.feed_index() == again.follower.index >= last
    revoke(world, digest)
    again.follow()
    until(lambda: not again.accepts(digest))
    again.end()


def test_after_a_gap_or_an_event_that_cannot_be_read_everything_is_compared(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a", declare={"max_replicas": 2})
    (node, other) = nodes
    assert node.accepts(digest)
    assert other.accepts(digest)
    revoke(world, digest)
    world.settle()
    for each, spoil in ((node, missing), (other, unreadable)):
        client: RegistryClient = each.client
        page = client.feed(each.follower.index, 0)
        while page["items"] and page["items"][-1]["kind"] != "artifact.revoked":
            each.follower.feed_read(each.residents, 0)
            page = client.feed(each.follower.index, 0)
        each.link.replies["/v1/feed"] = spoil(page)
        each.follower.feed_read(each.residents, 0)
        assert not each.accepts(digest)
        assert each.store.feed_index() == page["next"]


def test_a_withdrawn_grant_ends_contexts_from_before_at_every_node(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a", declare={"max_replicas": 2})
    with world.client("operator") as operator:
        operator.grant_set(TENANT, ADAPTER, "app")
        before = [context_of(world, node, digest) for node in nodes]
        listen(world, nodes)
        covered = [node.withdrawn.knows(one) for node, one in zip(nodes, before, strict=True)]
        assert covered == [False, False]
        operator.grant_withdraw(TENANT, ADAPTER, "app")
        operator.grant_set(TENANT, ADAPTER, "app")
    after = [context_of(world, node, digest) for node in nodes]
    listen(world, nodes)
    for node, old, new in zip(nodes, before, after, strict=True):
        assert node.withdrawn.knows(old)
        assert not node.withdrawn.knows(new)


def test_who_missed_that_a_grant_was_withdrawn_refuses_contexts_from_before(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    node = nodes[0]
    with world.client("operator") as operator:
        operator.grant_set(TENANT, ADAPTER, "app")
        before = context_of(world, node, digest)
        listen(world, [node])
        operator.grant_withdraw(TENANT, ADAPTER, "app")
    world.settle()
    page = node.client.feed(node.follower.index, 0)
    spoiled = [
        item | ({"body": {}} if item["kind"] == "grant.withdrawn" else {}) for item in page["items"]
    ]
    assert spoiled != page["items"]
    node.link.replies["/v1/feed"] = json.dumps(page | {"items": spoiled}).encode()
    node.follower.feed_read(node.residents, 0)
    assert node.withdrawn.unsure_seconds(before) > 0


def context_of(world: World, node: ServingNode, digest: str) -> RoutingContext:
    """A routing context of a granted subject, as the node reads it."""
    body = b"{}"
    with world.client("gateway") as gateway:
        minted = gateway.routing_context(
            tenant=TENANT,
            adapter=ADAPTER,
            reference=digest,
            node=node.name,
            body_digest=digest_of(body),
            session_id="s",
            subject="app",
        )
    trust = trust_parse(node.trust_file.read_bytes())
    return routing_context_verify(
        minted["routingContext"],
        public_key=trust.routing_key,
        issuer=trust.routing_issuer,
        node=node.name,
        base_digest=node.base.digest,
        body=body,
        now=datetime.now(UTC),
    )


def listen(world: World, nodes: list[ServingNode]) -> None:
    """Have nodes read the feed to its end."""
    world.settle()
    for node in nodes:
        while node.client.feed(node.follower.index, 0)["items"]:
            node.follower.feed_read(node.residents, 0)


def test_what_is_not_approved_is_let_go_of_at_the_start(
    world: World, nodes: list[ServingNode], tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    (node, _) = nodes
    stranger = Key(PLATFORM, digest)  # type: ignore[arg-type]  # from the wire
    node.client.pull(TENANT, ADAPTER, digest, node.store.folder(stranger))
    node.follower.reconcile(node.residents)
    until(lambda: not node.store.folder(stranger).exists())
    assert node.accepts(digest)


def missing(page: dict[str, object]) -> bytes:
    """The page without the event that revokes."""
    items = [item for item in page["items"] if item["kind"] != "artifact.revoked"]  # type: ignore[attr-defined]  # JSON
    return json.dumps(page | {"items": items}).encode()


def unreadable(page: dict[str, object]) -> bytes:
    """The page with an event that revokes nobody knows what."""
    items = [
        item | ({"subject": "?"} if item["kind"] == "artifact.revoked" else {})
        for item in page["items"]  # type: ignore[attr-defined]  # JSON
    ]
    return json.dumps(page | {"items": items}).encode()
