"""Faults of ours: nothing is lost, nothing is half-written, and no artifact is burnt by them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from sqlalchemy import text

from registry_service.domain import limits
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import RefusedError, UnavailableError
from registry_service.usecases.context import reading, tenant_transaction
from registry_service.usecases.maintenance import blobs_sweep, orphans_sweep
from tests.conftest import TestDatabase, _execute
from tests.integration.conftest import World, basic

REPOSITORY = "/v2/t-1042/support-zh"


def publisher(world: World) -> httpx.Client:
    headers = basic(world.tokens["publisher:t-1042"])
    return httpx.Client(base_url=world.url, headers=headers, timeout=60)


def tenant_of(world: World) -> UUID:
    with reading(world.context) as session:
        found = session.execute(text("SELECT id FROM tenant WHERE name = 't-1042'"))
        return UUID(str(found.scalar_one()))


def test_a_scan_that_cannot_read_the_store_stalls_and_is_requeued(
    world: World, tmp_path: Path
) -> None:
    digest = world.publish(tmp_path / "a")
    weights = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    tenant = tenant_of(world)
    world.context.blobs.delete(tenant, digest_of(weights))
    for _ in range(limits.JOB_ATTEMPTS):
        with tenant_transaction(world.context, tenant) as session:
            session.execute(text("UPDATE job SET lease_until = now() - interval '1 second'"))
        world.settle()
    with world.client("operator") as operator:
        assert operator.artifact_show("t-1042", digest)["state"] == "STALLED"
        # Publishing the same bytes again puts the blob back, and the artifact is not burnt.
        with publisher(world) as client:
            location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
            client.patch(location, content=weights)
            assert client.put(location, params={"digest": digest_of(weights)}).status_code == 201
        operator.artifact_requeue("t-1042", digest, "the store is mended")
        world.settle()
        assert operator.artifact_show("t-1042", digest)["state"] == "VALIDATING"


def test_death_between_blob_and_row_is_mended_by_repeating(world: World) -> None:
    content = b"x" * 1000
    with publisher(world) as client:
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        client.patch(location, content=content)
        upload = UUID(location.rsplit("/", 1)[1])
        # The bytes became a blob, and the service died before the row.
        world.context.blobs.upload_commit(tenant_of(world), upload, digest_of(content), None)
        assert client.head(f"{REPOSITORY}/blobs/{digest_of(content)}").status_code == 404
        retry = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        client.patch(retry, content=content)
        assert client.put(retry, params={"digest": digest_of(content)}).status_code == 201
        assert client.get(f"{REPOSITORY}/blobs/{digest_of(content)}").content == content


def test_a_full_store_is_unavailable_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> object:
        raise UnavailableError("the blob store is full; try again later", retry_after=30)

    with publisher(world) as client:
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        with monkeypatch.context() as patch:
            patch.setattr(world.context.blobs, "upload_writer", full)
            answer = client.patch(location, content=b"abc")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        status = client.get(location)
        assert (status.status_code, status.headers["range"]) == (204, "0-0")
        assert client.patch(location, content=b"abc").status_code == 202


def test_a_blob_that_the_store_spoiled_is_not_served(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a")
    weights = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    digits = digest_of(weights).removeprefix("sha256:")
    (path,) = Path(world.context.blobs._root).rglob(digits)  # type: ignore[attr-defined]  # a stand-in, or wrong on purpose
    path.chmod(0o600)
    path.write_bytes(weights[:-1] + b"\xff")
    with world.client("node") as node, pytest.raises(UnavailableError):
        node.pull("t-1042", "support-zh", digest, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_the_sweeper_takes_unreferenced_blobs_and_no_others(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a")
    with publisher(world) as client:
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        client.patch(location, content=b"orphan")
        client.put(location, params={"digest": digest_of(b"orphan")})
    assert blobs_sweep(world.context) == 0
    tenant = tenant_of(world)
    with tenant_transaction(world.context, tenant) as session:
        past = world.context.clock.now() - timedelta(seconds=1)
        session.execute(text("UPDATE blob SET lease_until = :past"), {"past": past})
    assert blobs_sweep(world.context) == 1
    assert world.context.blobs.size(tenant, digest_of(b"orphan")) is None
    world.settle()
    with world.client("operator") as operator:
        assert operator.artifact_show("t-1042", digest)["state"] == "VALIDATING"


def test_stored_bytes_without_a_row_are_swept_once_they_are_old(world: World) -> None:
    content, tenant = b"never got a row", tenant_of(world)
    with publisher(world) as client:
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        client.patch(location, content=content)
    digest = digest_of(content)
    upload = UUID(location.rsplit("/", 1)[1])
    world.context.blobs.upload_commit(tenant, upload, digest, None)
    assert orphans_sweep(world.context) == 0

    class Later:
        def now(self) -> datetime:
            return world.context.clock.now() + timedelta(seconds=limits.BLOB_LEASE_SECONDS + 60)

    assert orphans_sweep(replace(world.context, clock=Later())) == 1
    assert world.context.blobs.size(tenant, digest) is None


def test_a_database_that_is_down_is_unavailable(world: World, database: TestDatabase) -> None:
    token = {"Authorization": f"Bearer {world.tokens['operator']}"}
    assert httpx.get(f"{world.url}/v1/ready", timeout=60).status_code == 200
    name = database.superuser_url.rpartition("/")[2].partition("?")[0]
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
    other = database.superuser_url.replace(f"/{name}", "/postgres")
    _execute(other, f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    _execute(other, f"{kill} AND datname = '{name}'")
    try:
        for path in ("/v1/artifacts", "/v1/ready", "/v2/", "/v2/t-1042/support-zh/manifests/v1"):
            answer = httpx.get(world.url + path, headers=token, timeout=60)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5"), path
    finally:
        _execute(other, f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def test_a_hash_of_other_bytes_is_not_taken_for_the_upload(world: World) -> None:
    tenant = tenant_of(world)
    with publisher(world) as client:
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        client.patch(location, content=b"benign")
        upload = UUID(location.rsplit("/", 1)[1])
        writer = world.context.blobs.upload_writer(tenant, upload, 6)
        writer.write(b"EVIL")
        writer.close()
        # What was hashed on the way was six bytes; ten are there.
        known = (6, digest_of(b"benign"))
        with pytest.raises(RefusedError):
            world.context.blobs.upload_commit(tenant, upload, digest_of(b"benign"), known)
        assert client.put(location, params={"digest": digest_of(b"benign")}).status_code == 400
        assert client.put(location, params={"digest": digest_of(b"benignEVIL")}).status_code == 201


def test_staged_bytes_without_a_row_are_swept_once_they_are_old(world: World) -> None:
    tenant = tenant_of(world)
    orphan = UUID(int=7)
    world.context.blobs.upload_begin(tenant, orphan)

    class Later:
        def now(self) -> datetime:
            return world.context.clock.now() + timedelta(seconds=limits.BLOB_LEASE_SECONDS + 60)

    assert orphans_sweep(world.context) == 0
    assert orphans_sweep(replace(world.context, clock=Later())) == 1
    assert world.context.blobs.upload_size(tenant, orphan) is None


def test_a_scan_waits_for_a_base_that_is_not_agreed(world: World, tmp_path: Path) -> None:
    with world.context.database.app.begin() as session:
        session.execute(
            text("UPDATE base SET state = 'PENDING', catalog_digest = NULL, statement = NULL")
        )
    digest = world.publish(tmp_path / "a")
    tenant = tenant_of(world)
    for _ in range(limits.JOB_ATTEMPTS + 2):
        world.settle()
        with tenant_transaction(world.context, tenant) as session:
            session.execute(text("UPDATE job SET lease_until = now() - interval '1 second'"))
    with world.client("operator") as operator:
        assert operator.artifact_show("t-1042", digest)["state"] == "SCANNING"


def test_quota_is_reserved_as_declared_and_given_back(world: World) -> None:
    tenant = tenant_of(world)

    def reserved() -> int:
        with reading(world.context) as session:
            found = session.execute(
                text("SELECT reserved_bytes FROM tenant WHERE id = :id"), {"id": tenant}
            )
            return int(found.scalar_one())

    with publisher(world) as client:
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        client.patch(location, content=b"x" * 500)
        assert reserved() == 500
        client.delete(location)
        for wrong in (digest_of(b"other"), "sha256:zz"):
            answer = client.post(
                f"{REPOSITORY}/blobs/uploads/", params={"digest": wrong}, content=b"y" * 500
            )
            assert answer.status_code == 400
        assert reserved() == 0
        with world.context.database.app.begin() as session:
            session.execute(
                text("UPDATE tenant SET quota_bytes = stored_bytes + 10 WHERE id = :id"),
                {"id": tenant},
            )
        location = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        assert client.patch(location, content=b"z" * 11).status_code == 403
        assert client.patch(location, content=b"z" * 10).status_code == 202
        more = client.post(f"{REPOSITORY}/blobs/uploads/").headers["location"]
        # Of undeclared length, too: a byte that does not fit is refused, one that does is not.
        assert client.patch(more, content=iter([b"a"])).status_code == 403
        client.delete(location)
        assert client.patch(more, content=iter([b"a"])).status_code == 202
