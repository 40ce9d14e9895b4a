"""The path of an artifact through the running service, from publishing to revocation."""

from __future__ import annotations

from pathlib import Path

import pytest

from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    RefusedError,
)
from registry_service.domain.roles import PLATFORM
from registry_service.trust.keys import public_key_parse
from registry_service.trust.verdict import TrustedVerifier, verdict_verify
from registry_service.usecases.maintenance import revocations_sweep
from tests.integration.conftest import (
    World,
    lora_tensors,
    report,
    safetensors_bytes,
)

TENANT, ADAPTER = "t-1042", "support-zh"


def test_a_good_adapter_is_admitted_pulled_and_proven_offline(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a", label="v1")
    with world.client("operator") as operator:
        assert operator.artifact_show(TENANT, digest)["state"] == "SCANNING"
        world.settle()
        assert operator.artifact_show(TENANT, digest)["state"] == "VALIDATING"
        world.validate()
        shown = operator.artifact_show(TENANT, digest)
        assert (shown["state"], shown["admitted"], shown["labels"]) == ("IN_REVIEW", False, ["v1"])
        with pytest.raises(NotFoundError):
            operator.resolve(TENANT, ADAPTER, "v1")
        world.approve(digest)
        assert operator.artifact_show(TENANT, digest)["admitted"] is True
        operator.alias_set(TENANT, ADAPTER, "prod", digest, 0, "first")
    with world.client("node") as node:
        found = node.resolve(TENANT, ADAPTER, "prod")
        assert (found["adapterDigest"], found["kind"], found["generation"]) == (digest, "alias", 1)
        manifest = node.pull(TENANT, ADAPTER, digest, tmp_path / "pulled")
        envelope = node.verdict(TENANT, digest)
    key = public_key_parse(world.context.verdict_signer.public_pem)
    claims = verdict_verify(
        envelope,
        trusted=(TrustedVerifier(key, world.context.verifier_id),),
        adapter_digest=Digest(digest),
        base_digest=world.base_digest,
        tenant_id=None,
        now=world.context.clock.now(),
    )
    assert {path for path, _ in claims.files} == {file.path for file in manifest.files}
    assert (tmp_path / "pulled" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "a" / "adapter_model.safetensors"
    ).read_bytes()


def test_another_width_is_rejected_with_expected_and_got(world: World, tmp_path: Path) -> None:
    wide = safetensors_bytes(lora_tensors(width=24))
    digest = world.publish(tmp_path / "a", weights=wide)
    world.settle()
    with world.client("publisher:t-1042") as publisher:
        assert publisher.artifact_show(TENANT, digest)["state"] == "REJECTED"
        (scan,) = publisher.report_list(TENANT, digest)
    shapes = [f for f in scan["findings"] if f["code"] == "SHAPE_MISMATCH"]
    assert len(shapes) == 8
    assert {"where", "expected", "got"} <= set(shapes[0])
    assert any(f["expected"] == "(4, 16)" and f["got"] == "(4, 24)" for f in shapes)


def test_a_worker_finding_that_refuses_rejects(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a")
    world.settle()
    world.validate(
        {
            "check": 10,
            "code": "VALUE_NOT_FINITE",
            "where": "x.lora_A.weight",
            "expected": "finite values",
            "got": "NaN",
            "severity": "refuse",
        }
    )
    with world.client("operator") as operator:
        assert operator.artifact_show(TENANT, digest)["state"] == "REJECTED"


def test_nobody_reviews_their_own_artifact(world: World, tmp_path: Path) -> None:
    with world.client("admin") as admin:
        world.tokens["self"] = admin.token_create("pipeline-1", "reviewer", None)["token"]
    digest = world.publish(tmp_path / "a")
    world.settle()
    world.validate()
    with world.client("self") as reviewer, pytest.raises(ForbiddenError):
        reviewer.review_submit(TENANT, digest, "approve", "mine")


def test_an_alias_moves_by_compare_and_swap_and_keeps_its_history(
    world: World, tmp_path: Path
) -> None:
    first = world.admit(tmp_path / "a", fill=1)
    second = world.admit(tmp_path / "b", fill=2)
    with world.client("operator") as operator:
        operator.alias_set(TENANT, ADAPTER, "prod", first, 0, "first")
        with pytest.raises(ConflictError):
            operator.alias_set(TENANT, ADAPTER, "prod", second, 0, "stale")
        operator.alias_set(TENANT, ADAPTER, "prod", second, 1, "second")
        history = list(operator.alias_history(TENANT, ADAPTER, "prod"))
        assert [(h["generation"], h["adapterDigest"]) for h in history] == [
            (2, second),
            (1, first),
        ]
        assert history[0]["previousDigest"] == first


def test_an_alias_never_points_at_what_is_not_approved(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a")
    with world.client("operator") as operator, pytest.raises(RefusedError):
        operator.alias_set(TENANT, ADAPTER, "prod", digest, 0, "too early")


def test_revocation_is_refused_at_once_and_ends_when_the_node_acknowledges(
    world: World, tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    with world.client("node") as node, world.client("operator") as operator:
        catalog = operator.base_show("tiny")["catalogDigest"]
        node.node_register("node-1", world.base_digest, "http://127.0.0.1:9", catalog)
        shown = operator.revoke(TENANT, digest, "leaked data", None)
        assert shown["state"] == "REVOKING"
        assert [n["node"] for n in shown["nodes"]] == ["node-1"]
        for attempt in (
            lambda: node.resolve(TENANT, ADAPTER, digest),
            lambda: node.manifest(TENANT, ADAPTER, digest),
            lambda: node.verdict(TENANT, digest),
        ):
            with pytest.raises(NotFoundError):
                attempt()
        beat = node.node_heartbeat("node-1", 0, [])
        assert [r["adapterDigest"] for r in beat["revocations"]] == [digest]
        assert revocations_sweep(world.context) == 0
        tenant_id = operator.artifact_show(TENANT, digest)["ownerTenant"]
        node.node_acknowledge("node-1", tenant_id, digest, 1024, 0)
        assert operator.artifact_show(TENANT, digest)["state"] == "REVOKED"
        world.settle()
        kinds = [e["kind"] for e in operator.audit_list(subject=digest)]
    assert kinds[0] == "artifact.created"
    assert kinds[-3:] == ["artifact.revoked", "revocation.acknowledged", "artifact.drained"]


def test_a_dead_node_keeps_an_artifact_in_revoking_until_its_list_has_expired(
    world: World, tmp_path: Path
) -> None:
    from sqlalchemy import text

    from registry_service.usecases.context import tenant_transaction

    digest = world.admit(tmp_path / "a")
    with world.client("node") as node, world.client("operator") as operator:
        catalog = operator.base_show("tiny")["catalogDigest"]
        node.node_register("node-1", world.base_digest, "http://127.0.0.1:9", catalog)
        operator.revoke(TENANT, digest, "leaked data", None)
        with tenant_transaction(world.context, PLATFORM) as session:
            session.execute(text("UPDATE node SET lease_until = now() - interval '1 second'"))
        assert revocations_sweep(world.context) == 0
        (row,) = operator.revocation_show(TENANT, digest)["nodes"]
        assert row["state"] == "OUTSTANDING"
        # A minute for its clock, which may be behind.
        for seconds, swept in ((59, 0), (61, 1)):
            age = f"UPDATE node SET fresh_until = now() - interval '{seconds} seconds'"
            with tenant_transaction(world.context, PLATFORM) as session:
                session.execute(text(age))
            assert revocations_sweep(world.context) == swept
        (row,) = operator.revocation_show(TENANT, digest)["nodes"]
        assert row["state"] == "LOST"
        assert operator.artifact_show(TENANT, digest)["state"] == "REVOKED"


def test_the_feed_has_no_gaps_and_every_event_once(world: World, tmp_path: Path) -> None:
    world.admit(tmp_path / "a")
    with world.client("node") as node:
        indexes, after = [], 0
        while items := node.feed(after, 0)["items"]:
            indexes += [item["index"] for item in items]
            after = indexes[-1]
    assert indexes == list(range(1, len(indexes) + 1))


def test_publishing_again_is_safe_and_a_label_never_moves(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a", label="v1", fill=1)
    assert world.publish(tmp_path / "a", label="v1", fill=1) == digest
    with pytest.raises(ConflictError):
        world.publish(tmp_path / "b", label="v1", fill=2)


def test_a_context_needs_a_grant(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a")
    body = "sha256:" + "0" * 64
    with (
        world.client("gateway") as gateway,
        world.client("operator") as operator,
        world.client("node") as node,
    ):
        catalog = operator.base_show("tiny")["catalogDigest"]
        node.node_register("node-1", world.base_digest, "http://127.0.0.1:9", catalog)
        ask = {
            "tenant": TENANT,
            "adapter": ADAPTER,
            "reference": digest,
            "node": "node-1",
            "body_digest": body,
            "session_id": "s1",
            "subject": "app-1",
        }
        with pytest.raises(NotFoundError):
            gateway.routing_context(**ask)
        operator.grant_set(TENANT, ADAPTER, "app-1")
        assert gateway.routing_context(**ask)["adapterDigest"] == digest
        operator.grant_withdraw(TENANT, ADAPTER, "app-1")
        with pytest.raises(NotFoundError):
            gateway.routing_context(**ask)


def test_a_lost_worker_gives_the_job_back_and_stalls_at_the_end(
    world: World, tmp_path: Path
) -> None:
    from sqlalchemy import text

    from registry_service.domain.errors import LeaseLostError
    from registry_service.usecases.context import system_transaction
    from registry_service.usecases.maintenance import jobs_sweep

    digest = world.publish(tmp_path / "a")
    world.settle()

    def expire() -> None:
        with system_transaction(world.context) as session:
            session.execute(text("UPDATE job SET lease_until = now() - interval '1 second'"))

    with world.client("validator") as one, world.client("worker-2") as two:
        first = one.job_claim("w1", ["validate"], [world.base_digest])
        assert two.job_claim("w2", ["validate"], [world.base_digest]) is None
        expire()
        second = two.job_claim("w2", ["validate"], [world.base_digest])
        assert (second["id"], second["lease"]) == (first["id"], first["lease"] + 1)
        with pytest.raises(LeaseLostError):
            one.job_complete(first["id"], first["lease"], report=report())
        expire()
        assert one.job_claim("w1", ["validate"], [world.base_digest])["attempt"] == 3
        expire()
        assert one.job_claim("w1", ["validate"], [world.base_digest]) is None
        assert jobs_sweep(world.context) == 1
    with world.client("operator") as operator:
        assert operator.artifact_show(TENANT, digest)["state"] == "STALLED"
        operator.artifact_requeue(TENANT, digest, "the worker is mended")
        world.settle()
        assert operator.artifact_show(TENANT, digest)["state"] == "VALIDATING"


def test_a_nodes_token_names_one_node(world: World) -> None:
    with world.client("node") as node, world.client("operator") as operator:
        catalog = operator.base_show("tiny")["catalogDigest"]
        with pytest.raises(ForbiddenError):
            node.node_register("node-2", world.base_digest, "http://127.0.0.1:9", catalog)


def test_tags_are_listed_whole_whatever_is_not_admitted(world: World, tmp_path: Path) -> None:
    import httpx

    from tests.integration.conftest import basic

    for number, label in enumerate(("a", "b", "d")):
        world.publish(tmp_path / label, fill=number + 1, label=label)
    world.settle()
    for _ in range(3):
        world.validate()
    world.admit(tmp_path / "c", fill=9, label="c")
    headers = basic(world.tokens["node"])
    url = f"{world.url}/v2/{TENANT}/{ADAPTER}/tags/list"
    answer = httpx.get(url, params={"n": 1}, headers=headers, timeout=60)
    assert answer.json()["tags"] == ["c"]


def test_a_label_names_nothing_that_is_refused_or_revoked(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a")
    with world.client("operator") as operator:
        operator.revoke(TENANT, digest, "bad", None)
    with pytest.raises(RefusedError):
        world.publish(tmp_path / "a", label="v9")


def test_a_new_process_continues_an_upload(world: World, tmp_path: Path) -> None:
    import httpx

    from registry_service.client_transfer import PublishFile
    from tests.integration.conftest import basic

    world.folder(tmp_path / "a", weights=safetensors_bytes(lora_tensors(width=4096)))
    weights = tmp_path / "a" / "adapter_model.safetensors"
    headers = basic(world.tokens["publisher:t-1042"])
    uploads = f"{world.url}/v2/{TENANT}/{ADAPTER}/blobs/uploads/"
    begun_at = httpx.post(uploads, headers=headers, timeout=60)
    location = world.url + begun_at.headers["location"]
    httpx.patch(location, headers=headers, content=weights.read_bytes()[:100_000], timeout=60)
    file = PublishFile("adapter_model.safetensors", weights)
    begun = {f"{world.url} {TENANT} {file.name}": location}
    files = [file] + [
        PublishFile(name, tmp_path / "a" / name)
        for name in ("adapter_config.json", "adapter-declaration.json")
    ]
    steps: list[int] = []
    with world.client("publisher:t-1042") as client:

        def note(name: str, done: int, _: int) -> None:
            if name == file.path:
                steps.append(done)

        first = client.push(TENANT, ADAPTER, files, None, note, begun)
        assert steps[-1] == weights.stat().st_size
        assert httpx.get(location, headers=headers, timeout=60).status_code == 404
        steps.clear()
        # Whole blobs are not sent again, nor taken for granted: the file is hashed anew.
        assert client.push(TENANT, ADAPTER, files, None, note, begun) == first
        assert steps == []
