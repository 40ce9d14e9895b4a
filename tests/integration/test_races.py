"""Two at once: one wins, the other is told, and what is stored stays whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from sqlalchemy import text

from registry_service.domain.digests import digest_of
from registry_service.domain.errors import RegistryError
from registry_service.usecases.context import reading, tenant_transaction
from registry_service.usecases.maintenance import blobs_sweep
from tests.integration.conftest import World, report
from tests.integration.test_data_plane import REPOSITORY, begin, publisher

TENANT, ADAPTER = "t-1042", "support-zh"


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """Start all together; each one's answer, or the code of its refusal."""
    barrier = Barrier(len(acts))

    def run(act: Callable[[], Any]) -> Any:
        barrier.wait()
        try:
            return act()
        except RegistryError as error:
            return error.code

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, acts))


def test_of_alias_writers_with_one_generation_one_wins(world: World, tmp_path: Path) -> None:
    first = world.admit(tmp_path / "a", fill=1)
    second = world.admit(tmp_path / "b", fill=2)

    def setter(digest: str) -> Callable[[], Any]:
        def act() -> Any:
            with world.client("operator") as operator:
                return operator.alias_set(TENANT, ADAPTER, "prod", digest, 0, "mine")

        return act

    answers = at_once(*(setter(digest) for digest in (first, second) * 4))
    won = [answer for answer in answers if isinstance(answer, dict)]
    assert len(won) == 1
    assert {answer for answer in answers if isinstance(answer, str)} <= {
        "STALE_GENERATION",
        "CONFLICT",
    }
    with world.client("operator") as operator:
        assert operator.alias_show(TENANT, ADAPTER, "prod") == won[0]
        assert len(list(operator.alias_history(TENANT, ADAPTER, "prod"))) == 1


def test_publishers_of_equal_bytes_make_one_artifact(world: World, tmp_path: Path) -> None:
    digests = at_once(*(lambda n=n: world.publish(tmp_path / str(n), label="v1") for n in range(4)))
    assert len(set(digests)) == 1
    world.settle()
    with world.client("operator") as operator:
        shown = operator.artifact_show(TENANT, digests[0])
        assert (shown["state"], shown["labels"]) == ("VALIDATING", ["v1"])
        kinds = [event["kind"] for event in operator.audit_list(subject=digests[0])]
    assert kinds.count("artifact.submitted") == 1


def test_approval_and_revocation_leave_no_admitted_artifact(world: World, tmp_path: Path) -> None:
    for number in range(4):
        digest = world.publish(tmp_path / str(number), fill=number)
        world.settle()
        world.validate()

        def approve(digest: str = digest) -> Any:
            with world.client("reviewer") as reviewer:
                return reviewer.review_submit(TENANT, digest, "approve", "good")

        def revoke(digest: str = digest) -> Any:
            with world.client("operator") as operator:
                return operator.revoke(TENANT, digest, "bad", None)

        at_once(approve, revoke)
        world.settle()
        with world.client("operator") as operator:
            shown = operator.artifact_show(TENANT, digest)
        assert (shown["state"], shown["admitted"]) == ("REVOKED", False)


def test_chunks_sent_at_once_never_interleave(world: World) -> None:
    chunks = [bytes([n]) * 2_000_000 for n in range(4)]
    with publisher(world) as client:
        location = begin(client)

        def patch(chunk: bytes) -> int:
            with publisher(world) as other:
                return other.patch(location, content=chunk).status_code

        codes = at_once(*(lambda chunk=chunk: patch(chunk) for chunk in chunks))
        assert 202 in codes
        assert set(codes) <= {202, 409, 416}
        size = int(client.get(location).headers["range"].split("-")[1]) + 1
        assert size == codes.count(202) * 2_000_000
        # Whatever the order: the bytes are whole chunks, and only their own digest fits.
        assert client.put(location, params={"digest": digest_of(b"other")}).status_code == 400


def test_of_two_workers_one_gets_the_job(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path / "a")
    world.settle()

    def claim(role: str) -> Any:
        with world.client(role) as worker:
            return worker.job_claim(role, ["validate"], [world.base_digest])

    jobs = at_once(lambda: claim("validator"), lambda: claim("worker-2"))
    assert sum(job is not None for job in jobs) == 1


def test_reserved_bytes_are_given_back(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path / "a")
    with publisher(world) as client:
        location = begin(client)
        client.patch(location, content=b"x" * 1000)
        assert client.delete(location).status_code == 204
        finished = begin(client)
        client.patch(finished, content=b"y" * 1000)
        client.put(finished, params={"digest": digest_of(b"y" * 1000)})
        again = begin(client)
        client.patch(again, content=b"y" * 1000)
        client.put(again, params={"digest": digest_of(b"y" * 1000)})
        assert client.get(f"{REPOSITORY}/blobs/{digest_of(b'y' * 1000)}").status_code == 200
    with reading(world.context) as session:
        stored, reserved, blobs = session.execute(
            text(
                "SELECT t.stored_bytes, t.reserved_bytes, "
                "(SELECT sum(size) FROM artifact_blob WHERE tenant_id = t.id) + 1000 "
                "FROM tenant t WHERE name = 't-1042'"
            )
        ).one()
    assert reserved == 0
    assert stored == blobs


def test_a_revocation_and_a_report_never_wait_for_each_other(world: World, tmp_path: Path) -> None:
    for number in range(6):
        digest = world.publish(tmp_path / str(number), fill=number)
        world.settle()

        with world.client("validator") as worker:
            job = worker.job_claim("w", ["validate"], [world.base_digest])

        def finish(job: Any = job) -> Any:
            with world.client("validator") as worker:
                return worker.job_complete(job["id"], job["lease"], report=report())

        def revoke(digest: str = digest) -> Any:
            with world.client("operator") as operator:
                return operator.revoke(TENANT, digest, "bad", None)["state"]

        finished, revoked = at_once(finish, revoke)
        assert revoked == "REVOKED", (finished, revoked)


def test_a_blob_that_is_pushed_while_it_is_swept_stays_whole(world: World) -> None:
    content = b"swept" * 1000
    digest = digest_of(content)
    with reading(world.context) as session:
        tenant = session.execute(text("SELECT id FROM tenant WHERE name = :n"), {"n": TENANT})
        tenant_id = tenant.scalar_one()

    def push() -> int:
        with publisher(world) as client:
            location = begin(client)
            client.patch(location, content=content)
            return client.put(location, params={"digest": digest}).status_code

    def sweep() -> int:
        return sum(blobs_sweep(world.context) for _ in range(20))

    for _ in range(5):
        push()
        with tenant_transaction(world.context, tenant_id) as session:
            session.execute(text("UPDATE blob SET lease_until = now() - interval '1 second'"))
        pushed, _ = at_once(push, sweep)
        assert pushed == 201
        with publisher(world) as client:
            assert client.get(f"{REPOSITORY}/blobs/{digest}").content == content
