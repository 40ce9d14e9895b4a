"""The revocation list as the service issues it, serves it, and holds approvals against it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from registry_service.domain import limits
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError, RefusedError, UnavailableError
from registry_service.domain.roles import PLATFORM
from registry_service.usecases.context import tenant_transaction
from registry_service.usecases.revocation_list import revocation_list_renew
from tests.integration import revocation_world as rw
from tests.integration.conftest import World, lora_tensors, safetensors_bytes, tiny_catalog
from tests.integration.revocation_world import TENANT, content_of, listed, revoke

# What it shares with the tests of nodes needs the worker's extra.
pytestmark = pytest.mark.torch

OTHER = "t-2001"


def own_revoke(world: World, digest: str, tenant: str = TENANT) -> None:
    """Revoke as the tenant's own operator."""
    key = f"operator:{tenant}"
    if key not in world.tokens:
        with world.client("admin") as admin:
            world.tokens[key] = admin.token_create(f"op-{tenant}", "operator", tenant)["token"]
    with world.client(key) as operator:
        operator.revoke(tenant, digest, "ours")


def renew(world: World) -> None:
    """Issue the list anew although its time has not come."""
    with tenant_transaction(world.context, PLATFORM) as session:
        session.execute(text("UPDATE revocation_list SET number = number + 1, issued_at = 'epoch'"))
    assert revocation_list_renew(world.context)


def named(world: World) -> list[str]:
    """The adapters that the list of now names, oldest first."""
    return [entry.adapter_digest for entry in listed(world).entries]


def test_a_revocation_issues_the_list_at_once_with_all_three_digests(
    world: World, tmp_path: Path
) -> None:
    files = world.folder(tmp_path / "a")
    weights = files["adapter_model.safetensors"]
    content = content_of(weights)
    digest = world.publish(tmp_path / "a")
    world.settle()
    rw.validate(world, content)
    world.approve(digest)
    before = listed(world)
    assert before.entries == ()
    revoke(world, digest, 30)
    after = listed(world)
    (entry,) = after.entries
    assert after.number == before.number + 1
    assert (entry.adapter_digest, entry.content_digest, entry.tenant_id) == (digest, content, None)
    assert entry.weights_digest == digest_of(weights)
    assert entry.cancel_at is not None
    assert (after.expires_at - after.issued_at).total_seconds() == 600


def test_without_a_measured_content_digest_the_list_names_the_two_others(
    world: World, tmp_path: Path
) -> None:
    revoke(world, world.admit(tmp_path / "a"))
    (entry,) = listed(world).entries
    assert entry.content_digest is None
    assert entry.weights_digest is not None


def test_a_report_with_a_content_digest_in_another_form_is_refused(
    world: World, tmp_path: Path
) -> None:
    world.publish(tmp_path / "a")
    world.settle()
    with pytest.raises(MalformedError, match="contentDigest"):
        rw.validate(world, "sha256:short")


def test_revocations_at_once_lose_none_and_number_each(world: World, tmp_path: Path) -> None:
    digests = [world.admit(tmp_path / str(n), fill=n) for n in range(1, 7)]
    before = listed(world).number
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda digest: revoke(world, digest), digests))
    after = listed(world)
    assert after.number == before + 6
    assert {entry.adapter_digest for entry in after.entries} == set(digests)


def test_a_revocation_that_is_repeated_issues_no_list(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a")
    revoke(world, digest)
    before = listed(world)
    with world.client("operator") as operator:
        operator.revoke(TENANT, digest, "again")
    assert listed(world) == before


def test_the_list_is_renewed_before_half_of_its_life_and_not_sooner(world: World) -> None:
    revocation_list_renew(world.context)
    first = listed(world)
    assert not revocation_list_renew(world.context)
    for age, renewed in ((120, False), (241, True)):
        with tenant_transaction(world.context, PLATFORM) as session:
            session.execute(
                text(
                    "UPDATE revocation_list SET number = number + 1, "
                    f"issued_at = now() - interval '{age} seconds', "
                    f"expires_at = now() + interval '{600 - age} seconds'"
                )
            )
        assert revocation_list_renew(world.context) is renewed
    assert listed(world).number == first.number + 3


def test_a_list_that_nobody_renewed_is_not_given_out(world: World) -> None:
    with world.client("auditor") as auditor:
        with pytest.raises(UnavailableError, match="background"):
            auditor.revocation_list()
        revocation_list_renew(world.context)
        assert auditor.revocation_list() is not None
        with tenant_transaction(world.context, PLATFORM) as session:
            session.execute(
                text("UPDATE revocation_list SET number = number + 1, expires_at = now()")
            )
        with pytest.raises(UnavailableError, match="background"):
            auditor.revocation_list()


def test_the_list_is_served_as_it_stands_and_not_twice(world: World) -> None:
    revocation_list_renew(world.context)
    with world.client("auditor") as auditor:
        first, second = auditor.revocation_list(), auditor.revocation_list()
        assert first == second
        assert auditor.revocation_list(listed(world).number) is None
        assert auditor.revocation_list(listed(world).number + 1) == first
    token = {"Authorization": f"Bearer {world.tokens['auditor']}"}
    answer = httpx.get(f"{world.url}/v1/revocation-list", headers=token, timeout=60)
    assert answer.headers["etag"] == f'"{listed(world).number}"'
    assert answer.headers["content-type"] == "application/vnd.dsse.envelope.v1+json"


def test_the_database_refuses_a_number_that_does_not_grow(world: World) -> None:
    revocation_list_renew(world.context)
    for change in ("number = number", "number = 0", "issued_at = now()"):
        with (
            pytest.raises(DBAPIError, match="cannot follow"),
            tenant_transaction(world.context, PLATFORM) as session,
        ):
            session.execute(text(f"UPDATE revocation_list SET {change}"))
    for statement in ("DELETE FROM revocation_list", "INSERT INTO revocation_list DEFAULT VALUES"):
        with (
            pytest.raises(DBAPIError, match="permission denied"),
            tenant_transaction(world.context, PLATFORM) as session,
        ):
            session.execute(text(statement))


def test_revoked_bytes_in_another_package_are_not_approved(world: World, tmp_path: Path) -> None:
    plain = safetensors_bytes(lora_tensors(), 5)
    again = safetensors_bytes(dict(reversed(lora_tensors().items())), 5)
    assert plain != again
    content = [content_of(each) for each in (plain, again)]
    assert content[0] == content[1]
    first = world.publish(tmp_path / "a", weights=plain)
    world.settle()
    rw.validate(world, content[0])
    world.approve(first)
    revoke(world, first)
    second = world.publish(tmp_path / "b", weights=again, tenant="t-2001")
    world.settle()
    rw.validate(world, content[1])
    with (
        world.client("reviewer") as reviewer,
        pytest.raises(RefusedError, match="another package"),
    ):
        reviewer.review_submit("t-2001", second, "approve", "looks right")
    with world.client("operator") as operator:
        assert operator.artifact_show("t-2001", second)["state"] == "IN_REVIEW"


def test_what_no_node_can_load_is_not_listed_and_its_bytes_are_not_approved(
    world: World, tmp_path: Path
) -> None:
    never = world.publish(tmp_path / "a", fill=3)
    own_revoke(world, never)
    assert named(world) == []
    again = world.publish(tmp_path / "b", fill=3, declare={"training_data_version": "2026-12"})
    world.settle()
    world.validate()
    with (
        world.client("reviewer") as reviewer,
        pytest.raises(RefusedError, match="another package"),
    ):
        reviewer.review_submit(TENANT, again, "approve", "looks right")
    with world.client("operator") as operator:
        operator.revoke(TENANT, again, "for everybody")
    assert named(world) == [again]


def test_bytes_that_run_in_another_package_are_listed(world: World, tmp_path: Path) -> None:
    running = world.admit(tmp_path / "a", fill=3)
    again = world.publish(tmp_path / "b", fill=3, declare={"training_data_version": "2026-12"})
    foreign = world.publish(tmp_path / "c", fill=3, tenant=OTHER)
    own_revoke(world, again)
    own_revoke(world, foreign, OTHER)
    assert named(world) == [again]
    own_revoke(world, running)
    assert named(world) == [running]


def test_a_full_list_leaves_out_the_oldest_of_each_tenants_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = [world.admit(tmp_path / f"a{n}", fill=n) for n in range(1, 5)]
    other = world.admit(tmp_path / "b", fill=5, tenant=OTHER)
    platform = world.admit(tmp_path / "c", fill=6)
    revoke(world, platform)
    own_revoke(world, other, OTHER)
    monkeypatch.setattr(limits, "REVOCATION_LIST_ENTRIES", 4)
    for digest in own:
        own_revoke(world, digest)
    # The platform's stays; of the others as many of each tenant, the newest first.
    assert named(world) == [platform, other, *own[2:]]
    events = [getattr(record, "event", None) for record in caplog.records]
    assert events.count("revocation_list.half_full") == 2
    assert events.count("revocation_list.full") == 2


def test_what_a_node_may_still_hold_stays_in_a_full_list(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, *later = [world.admit(tmp_path / f"a{n}", fill=n) for n in range(1, 5)]
    with world.client("node") as node:
        node.node_register(
            "node-1",
            world.base_digest,
            "http://127.0.0.1:1",
            tiny_catalog(world.base_digest).digest,
        )
        own_revoke(world, held)
        for digest in later:
            own_revoke(world, digest)
            node.node_acknowledge("node-1", str(rw.tenant_id(world, TENANT)), digest, 0, 0)
        monkeypatch.setattr(limits, "REVOCATION_LIST_ENTRIES", 2)
        renew(world)
        assert named(world) == [held, later[-1]]
        node.node_acknowledge("node-1", str(rw.tenant_id(world, TENANT)), held, 0, 0)
        renew(world)
        assert named(world) == later[-2:]


def test_bytes_that_run_are_the_last_to_be_left_out(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.admit(tmp_path / "a", fill=3)
    again = world.publish(tmp_path / "b", fill=3, declare={"training_data_version": "2026-12"})
    own_revoke(world, again)
    later = world.admit(tmp_path / "c", fill=4)
    own_revoke(world, later)
    assert named(world) == [again, later]
    monkeypatch.setattr(limits, "REVOCATION_LIST_ENTRIES", 1)
    renew(world)
    assert named(world) == [again]


def test_a_revocation_that_nodes_would_not_take_is_refused_and_the_list_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (world.admit(tmp_path / str(n), fill=n) for n in (1, 2))
    monkeypatch.setattr(limits, "REVOCATION_LIST_ENTRIES", 1)
    revoke(world, first)
    with pytest.raises(RefusedError, match="expected at most 1 entries that have to stay, got 2"):
        revoke(world, second)
    with world.client("operator") as operator:
        assert operator.artifact_show(TENANT, second)["state"] == "APPROVED"
    renew(world)
    assert named(world) == [first]
