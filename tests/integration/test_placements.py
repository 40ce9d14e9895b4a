"""Placement leases on real PostgreSQL: no more nodes hold an artifact than it declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event, text

from gpu_worker.serving.placements import NoPlaceError, Placements
from gpu_worker.serving.residency import Key
from registry_service.client import RegistryClient
from registry_service.domain import wire
from registry_service.domain.digests import digest_of, digest_parse
from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)
from registry_service.domain.roles import PLATFORM
from registry_service.store import nodes as store
from registry_service.usecases.context import reading, tenant_transaction
from tests.integration.conftest import World
from tests.integration.test_races import at_once
from tests.integration.test_wire import fits

TENANT = "t-1042"
NODES = ("node-1", "node-2", "node-3")


@pytest.fixture
def nodes(world: World) -> Iterator[dict[str, RegistryClient]]:
    """Three registered nodes of one base."""
    with ExitStack() as stack:
        admin = stack.enter_context(world.client("admin"))
        catalog = admin.base_show("tiny")["catalogDigest"]
        found = {}
        for name in NODES:
            if name != "node-1":
                world.tokens[name] = admin.token_create(name, "node", None)["token"]
            role = "node" if name == "node-1" else name
            found[name] = stack.enter_context(world.client(role))
            found[name].node_register(name, world.base_digest, "http://127.0.0.1:1", catalog)
        yield found


def admit(world: World, path: Path, replicas: int = 1, **options: Any) -> str:
    return world.admit(path, declare={"max_replicas": replicas}, **options)


def tenant_id(world: World, name: str = TENANT) -> str:
    with world.client("admin") as admin:
        return next(item["id"] for item in admin.tenant_list() if item["name"] == name)


def beat(node: RegistryClient, name: str, owner: str, digest: str, state: str = "SERVING") -> Any:
    held = {"tenantId": owner, "adapterDigest": digest, "state": state}
    return node.node_heartbeat(name, 0, [held])["lostPlacements"]


def holders(world: World, digest: str) -> dict[str, datetime]:
    with reading(world.context) as session:
        rows = session.execute(
            text("SELECT node, lease_until FROM placement WHERE artifact_digest = :d"),
            {"d": digest},
        )
        return {row.node: row.lease_until for row in rows}


def lapse(world: World, owner: str, node: str) -> None:
    """The node was heard of, and renewed nothing for as long as its lease ran."""
    with tenant_transaction(world.context, owner) as session:  # type: ignore[arg-type]  # as text
        session.execute(
            text("UPDATE placement SET lease_until = now() - interval '1 ms' WHERE node = :n"),
            {"n": node},
        )


def silence(world: World, node: str, *, fresh: timedelta) -> None:
    """The node was not heard of while its own lease ran; its list holds as long as said."""
    with tenant_transaction(world.context, PLATFORM) as session:
        session.execute(
            text(
                "UPDATE node SET lease_until = now() - interval '1 ms', "
                "fresh_until = now() + :fresh WHERE name = :n"
            ),
            {"n": node, "fresh": fresh},
        )


def cut_off(world: World, owner: str, node: str) -> None:
    """The node was not heard of for so long that it serves nothing any more."""
    lapse(world, owner, node)
    silence(world, node, fresh=-timedelta(minutes=10))


def two_for_one_place(world: World, folder: Path) -> tuple[str, list[str]]:
    """A pool with one place; a tenant, and two artifacts of it."""
    pool_limit(world, adapters=1)
    return tenant_id(world), [admit(world, folder / str(n), fill=n) for n in range(2)]


def test_as_many_nodes_hold_it_as_it_declares(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest = admit(world, tmp_path / "a", replicas=2)
    for name in NODES[:2]:
        placement = nodes[name].placement_take(name, TENANT, digest)
        fits(wire.Placement, placement)
        assert nodes[name].placement_take(name, TENANT, digest)["node"] == name
    with pytest.raises(ConflictError, match="expected fewer than 2 other nodes"):
        nodes["node-3"].placement_take("node-3", TENANT, digest)
    nodes["node-1"].placement_release("node-1", TENANT, digest)
    nodes["node-1"].placement_release("node-1", TENANT, digest)
    nodes["node-3"].placement_take("node-3", TENANT, digest)
    assert set(holders(world, digest)) == {"node-2", "node-3"}


def test_of_nodes_that_race_for_the_last_lease_exactly_one_gets_it(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    for number in range(6):
        digest = admit(world, tmp_path / str(number), fill=number)
        answers = at_once(
            *(partial(nodes[name].placement_take, name, TENANT, digest) for name in NODES)
        )
        assert sum(isinstance(answer, dict) for answer in answers) == 1, answers
        assert sorted(a for a in answers if isinstance(a, str)) == ["PLACEMENT_TAKEN"] * 2
        assert len(holders(world, digest)) == 1


def test_a_lease_is_renewed_with_the_heartbeat_and_a_dead_nodes_runs_out(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest, owner = admit(world, tmp_path / "a"), tenant_id(world)
    nodes["node-1"].placement_take("node-1", TENANT, digest)
    before = holders(world, digest)["node-1"]
    for state in ("LOADING", "SERVING", "DRAINING"):
        assert beat(nodes["node-1"], "node-1", owner, digest, state) == []
        after = holders(world, digest)["node-1"]
        assert after > before
        before = after
    # What lies on disk only holds nothing.
    assert beat(nodes["node-1"], "node-1", owner, digest, "STORED") == []
    assert holders(world, digest)["node-1"] == before
    lapse(world, owner, "node-1")
    nodes["node-2"].placement_take("node-2", TENANT, digest)
    assert set(holders(world, digest)) == {"node-2"}


def test_the_place_of_a_silent_node_is_free_when_its_list_has_expired_and_not_before(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest, owner = admit(world, tmp_path / "a"), tenant_id(world)
    nodes["node-1"].placement_take("node-1", TENANT, digest)
    lapse(world, owner, "node-1")
    silence(world, "node-1", fresh=timedelta(minutes=1))
    with pytest.raises(ConflictError, match="expected fewer than 1 other nodes"):
        nodes["node-2"].placement_take("node-2", TENANT, digest)
    # It is heard again, and has never lost its place.
    assert beat(nodes["node-1"], "node-1", owner, digest) == []
    with pytest.raises(ConflictError, match="expected fewer than 1 other nodes"):
        nodes["node-2"].placement_take("node-2", TENANT, digest)
    cut_off(world, owner, "node-1")
    nodes["node-2"].placement_take("node-2", TENANT, digest)
    assert set(holders(world, digest)) == {"node-2"}


def test_a_node_whose_place_was_taken_is_told_to_unload(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest, owner = admit(world, tmp_path / "a"), tenant_id(world)
    nodes["node-1"].placement_take("node-1", TENANT, digest)
    lapse(world, owner, "node-1")
    # Nobody came meanwhile: the lease is given back.
    assert beat(nodes["node-1"], "node-1", owner, digest) == []
    lapse(world, owner, "node-1")
    nodes["node-2"].placement_take("node-2", TENANT, digest)
    lost = [{"tenantId": owner, "adapterDigest": digest}]
    assert beat(nodes["node-1"], "node-1", owner, digest) == lost
    assert beat(nodes["node-2"], "node-2", owner, digest) == []
    # One that loads has its lease already, or asks for it: there is nothing to unload yet.
    assert beat(nodes["node-1"], "node-1", owner, digest, "LOADING") == []
    held = {"tenantId": owner, "adapterDigest": digest, "state": "SERVING"}
    fits(wire.Renewal, nodes["node-1"].node_heartbeat("node-1", 0, [held]))


def test_a_renewal_and_a_grant_at_one_moment_never_make_one_lease_too_many(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest, owner = admit(world, tmp_path / "a"), tenant_id(world)
    for _ in range(8):
        lapse(world, owner, "node-1")
        at_once(
            lambda: beat(nodes["node-1"], "node-1", owner, digest),
            lambda: nodes["node-2"].placement_take("node-2", TENANT, digest),
            lambda: nodes["node-3"].placement_take("node-3", TENANT, digest),
        )
        assert len(holders(world, digest)) == 1
        for name in NODES:
            nodes[name].placement_release(name, TENANT, digest)
        nodes["node-1"].placement_take("node-1", TENANT, digest)


def pool_limit(world: World, **most: int) -> None:
    """Limits of the pool, as the settings give them."""
    for name, value in most.items():
        object.__setattr__(world.context, f"pool_{name}", value)


def test_the_nodes_of_a_base_hold_no_more_than_the_pools_limit(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    pool_limit(world, adapters=2)
    digests = [admit(world, tmp_path / str(n), replicas=2, fill=n) for n in range(2)]
    nodes["node-1"].placement_take("node-1", TENANT, digests[0])
    nodes["node-2"].placement_take("node-2", TENANT, digests[0])
    with pytest.raises(ConflictError, match="expected fewer than 2 adapters on the nodes"):
        nodes["node-3"].placement_take("node-3", TENANT, digests[1])
    # Whoever holds a lease goes on.
    nodes["node-2"].placement_take("node-2", TENANT, digests[0])
    nodes["node-1"].placement_release("node-1", TENANT, digests[0])
    nodes["node-3"].placement_take("node-3", TENANT, digests[1])


def test_a_tenant_has_a_part_of_the_pool_and_others_have_theirs(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    pool_limit(world, adapters=3, tenant_adapters=1)
    digests = [admit(world, tmp_path / str(n), replicas=2, fill=n) for n in range(2)]
    foreign = admit(world, tmp_path / "foreign", tenant="t-2001", fill=5)
    nodes["node-1"].placement_take("node-1", TENANT, digests[0])
    for name, digest in (("node-2", digests[0]), ("node-1", digests[1])):
        with pytest.raises(ConflictError, match="expected fewer than 1 adapters of this tenant"):
            nodes[name].placement_take(name, TENANT, digest)
    nodes["node-2"].placement_take("node-2", "t-2001", foreign)


def test_in_the_pool_a_silent_node_counts_until_it_serves_nothing(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    owner, digests = two_for_one_place(world, tmp_path)
    nodes["node-1"].placement_take("node-1", TENANT, digests[0])
    lapse(world, owner, "node-1")
    silence(world, "node-1", fresh=timedelta(minutes=1))
    with pytest.raises(ConflictError, match="on the nodes of this base"):
        nodes["node-2"].placement_take("node-2", TENANT, digests[1])
    silence(world, "node-1", fresh=-timedelta(minutes=10))
    nodes["node-2"].placement_take("node-2", TENANT, digests[1])


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "heard"])
def test_a_lease_that_the_pool_did_not_count_comes_back_only_where_there_is_a_place(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path, silent: bool
) -> None:
    owner, digests = two_for_one_place(world, tmp_path)
    end = cut_off if silent else lapse
    nodes["node-1"].placement_take("node-1", TENANT, digests[0])
    end(world, owner, "node-1")
    assert beat(nodes["node-1"], "node-1", owner, digests[0]) == []
    end(world, owner, "node-1")
    nodes["node-2"].placement_take("node-2", TENANT, digests[1])
    for state in ("LOADING", "DRAINING"):
        assert beat(nodes["node-1"], "node-1", owner, digests[0], state) == []
    lost = [{"tenantId": owner, "adapterDigest": digests[0]}]
    assert beat(nodes["node-1"], "node-1", owner, digests[0]) == lost
    nodes["node-2"].placement_release("node-2", TENANT, digests[1])
    nodes["node-3"].placement_take("node-3", TENANT, digests[1])


def test_a_list_that_comes_before_the_heartbeat_brings_no_lease_back(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    owner, digests = two_for_one_place(world, tmp_path)
    nodes["node-1"].placement_take("node-1", TENANT, digests[0])
    cut_off(world, owner, "node-1")
    nodes["node-2"].placement_take("node-2", TENANT, digests[1])
    # With a new list it may serve again, as if it had never been away.
    silence(world, "node-1", fresh=timedelta(minutes=10))
    lost = [{"tenantId": owner, "adapterDigest": digests[0]}]
    assert beat(nodes["node-1"], "node-1", owner, digests[0]) == lost
    assert set(holders(world, digests[0])) == set()
    nodes["node-2"].placement_take("node-2", TENANT, digests[1])


def test_a_renewal_and_a_grant_of_another_at_one_moment_never_make_one_lease_too_many(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    owner, digests = two_for_one_place(world, tmp_path)
    for _ in range(6):
        nodes["node-1"].placement_take("node-1", TENANT, digests[0])
        cut_off(world, owner, "node-1")
        at_once(
            partial(beat, nodes["node-1"], "node-1", owner, digests[0]),
            partial(nodes["node-2"].placement_take, "node-2", TENANT, digests[1]),
        )
        assert sum(len(holders(world, digest)) for digest in digests) == 1
        for name, digest in zip(NODES, digests, strict=False):
            nodes[name].placement_release(name, TENANT, digest)


def test_a_node_knows_a_full_pool_from_an_adapter_that_others_hold(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digests = [admit(world, tmp_path / str(n), fill=n) for n in range(2)]
    owner = UUID(tenant_id(world))
    nodes["node-1"].placement_take("node-1", TENANT, digests[0])
    placements = Placements(nodes["node-2"], "node-2")

    def refusal(digest: str) -> UnavailableError:
        with pytest.raises(UnavailableError, match="no place in the pool") as caught:
            placements.take(TENANT, Key(owner, digest_parse(digest)))
        return caught.value

    for limits, of_tenant in (
        ({"adapters": 1}, False),
        ({"adapters": 1, "tenant_adapters": 1}, True),
    ):
        pool_limit(world, **limits)
        full = refusal(digests[1])
        assert isinstance(full, NoPlaceError)
        assert full.of_tenant is of_tenant
        # In a full pool too, what helps is not another adapter's place.
        assert not isinstance(refusal(digests[0]), NoPlaceError)


def test_of_nodes_that_race_for_the_pools_last_place_exactly_one_gets_it(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    pool_limit(world, adapters=1)
    digests = [admit(world, tmp_path / str(n), fill=n) for n in range(3)]
    for _ in range(6):
        takes = [
            partial(nodes[name].placement_take, name, TENANT, digest)
            for name, digest in zip(NODES, digests, strict=True)
        ]
        answers = at_once(*takes)
        assert sum(isinstance(answer, dict) for answer in answers) == 1, answers
        assert sum(len(holders(world, digest)) for digest in digests) == 1
        for name, digest in zip(NODES, digests, strict=True):
            nodes[name].placement_release(name, TENANT, digest)


def test_only_what_may_run_there_is_placed(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest = admit(world, tmp_path / "a")
    waiting = world.publish(tmp_path / "b", fill=7)
    take = nodes["node-1"].placement_take
    for unknown in (waiting, digest_of(b"unknown")):
        with pytest.raises(NotFoundError):
            take("node-1", TENANT, unknown)
    with pytest.raises(NotFoundError):
        take("node-1", "t-2001", digest)
    with pytest.raises(NotFoundError):
        take("node-9", TENANT, digest)
    with pytest.raises(ForbiddenError):
        take("node-2", TENANT, digest)
    with pytest.raises(ForbiddenError):
        nodes["node-1"].placement_release("node-2", TENANT, digest)
    with world.client("operator") as operator:
        operator.revoke(TENANT, digest, "leaks", 0)
    with pytest.raises(NotFoundError):
        take("node-1", TENANT, digest)
    with world.client("admin") as admin:
        admin.tenant_suspend(TENANT, "unpaid")
    with pytest.raises(RefusedError):
        take("node-1", TENANT, digest)


def test_a_lease_ends_after_the_time_that_the_answer_names(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    digest = admit(world, tmp_path / "a")
    before = world.context.clock.now()
    placement = nodes["node-1"].placement_take("node-1", TENANT, digest)
    after = world.context.clock.now()
    ends = datetime.fromisoformat(placement["expiresAt"])
    lease = timedelta(seconds=placement["leaseSeconds"])
    assert before <= ends - lease <= after


def test_what_is_not_approved_is_named_by_one_query_however_much_a_node_reports(
    world: World, nodes: dict[str, RegistryClient], tmp_path: Path
) -> None:
    approved, gone = admit(world, tmp_path / "a"), admit(world, tmp_path / "b", fill=2)
    owner, foreign = tenant_id(world), tenant_id(world, "t-2001")
    with world.client("operator") as operator:
        operator.revoke(TENANT, gone, "leaks")
    unknown = [(owner, digest_of(b"%d" % number)) for number in range(300)]
    reported = [(owner, approved), *unknown, (owner, gone), (foreign, approved)]
    statements: list[str] = []

    def heard(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    engines = world.context.database.engines
    for engine in engines:
        event.listen(engine, "before_cursor_execute", heard)
    answer = nodes["node-1"].node_heartbeat(
        "node-1",
        0,
        [{"tenantId": t, "adapterDigest": d, "state": "STORED"} for t, d in reported],
    )
    for engine in engines:
        event.remove(engine, "before_cursor_execute", heard)
    named = [(item["tenantId"], item["adapterDigest"]) for item in answer["revocations"]]
    assert named[0] == (owner, gone)
    assert named[1:] == [*unknown, (foreign, approved)]
    assert len(statements) < 12


def test_what_is_revoked_while_a_heartbeat_is_answered_keeps_its_deadline(
    world: World,
    nodes: dict[str, RegistryClient],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digest, reads = admit(world, tmp_path / "a"), []

    def revoked_between(read: Callable[..., Any]) -> Callable[..., Any]:
        def between(*arguments: Any) -> Any:
            found = read(*arguments)
            reads.append(read.__name__)
            if len(reads) == 1:
                with world.client("operator") as operator:
                    operator.revoke(TENANT, digest, "leaks")
            return found

        return between

    for name in ("residents_unapproved", "revocations_of_node"):
        monkeypatch.setattr(store, name, revoked_between(getattr(store, name)))
    resident = {"tenantId": tenant_id(world), "adapterDigest": digest, "state": "SERVING"}
    answer = nodes["node-1"].node_heartbeat("node-1", 0, [resident])
    assert len(reads) == 2
    assert [item["deadlineSeconds"] for item in answer["revocations"]] in ([], [None])
