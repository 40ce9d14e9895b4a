"""The revocation list as the service issues it, serves it, and holds approvals against it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError, RefusedError, UnavailableError
from registry_service.domain.roles import PLATFORM
from registry_service.usecases.context import tenant_transaction
from registry_service.usecases.revocation_list import revocation_list_renew
from tests.integration import revocation_world as rw
from tests.integration.conftest import World, lora_tensors, safetensors_bytes
from tests.integration.revocation_world import TENANT, content_of, listed, revoke

# What it shares with the tests of nodes needs the worker's extra.
pytestmark = pytest.mark.torch


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
    for age, renewed in ((239, False), (241, True)):
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
    answer = httpx.get(f"{world.url}/v1/revocation-list", headers=token)
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
