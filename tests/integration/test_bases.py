"""Catalogs of bases: agreed by two workers, disputed, and made again with other transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli import main as cli_main
from registry_service.domain.catalog import Catalog
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    RefusedError,
)
from registry_service.domain.manifest import FileEntry, base_manifest_build
from registry_service.trust.keys import public_key_parse
from registry_service.trust.verdict import (
    BaseClaims,
    TrustedVerifier,
    VerdictClaims,
    base_verify,
    verdict_verify,
)
from tests.integration.conftest import World, safetensors_bytes, tiny_catalog

TENANT, ADAPTER = "t-1042", "support-zh"
OLD, NEW = "5.24.0", "6.0.0"
GPTQ = b'{"model_type":"llama","quantization_config":{"quant_method":"gptq","bits":4}}'


def catalog_of(base: Digest, version: str = OLD, **changes: Any) -> Catalog:
    return tiny_catalog(base).model_copy(update={"transformers_version": version, **changes})


def base_add(world: World, name: str, config: bytes = b'{"model_type":"gpt2"}') -> Digest:
    """A further base, with no catalog yet."""
    weights = safetensors_bytes({f"{name}.weight": (2, 2)})
    header = weights[: 8 + int.from_bytes(weights[:8], "little")]
    files = [
        FileEntry(path, digest_of(data), len(data), f"application/vnd.cncf.model.{kind}.v1.raw")
        for path, data, kind in (
            ("config.json", config, "weight.config"),
            ("model.safetensors", weights, "weight"),
        )
    ]
    built = base_manifest_build(name, files, "float32")
    with world.client("operator") as operator:
        operator.base_add(
            name, built.manifest, {"config.json": config}, {"model.safetensors": header}
        )
    return built.digest


def submit(world: World, worker: str, catalog: Catalog) -> dict[str, Any]:
    with world.client(worker) as client:
        return client.catalog_submit(catalog.base_digest, catalog.to_bytes())


def recatalog(world: World) -> dict[str, Any]:
    with world.client("operator") as operator:
        return operator.catalog_remake("tiny", "transformers 6")


def shown(world: World, base: str = "tiny") -> dict[str, Any]:
    with world.client("operator") as operator:
        return operator.base_show(base)


def events(world: World, base: Digest) -> list[dict[str, Any]]:
    world.settle()
    with world.client("operator") as operator:
        return list(operator.audit_list(subject=base))


def statement(world: World) -> BaseClaims:
    with world.client("node") as node:
        envelope = node.base_statement("tiny")
    return base_verify(
        envelope,
        trusted=trusted(world),
        base_digest=world.base_digest,
        now=world.context.clock.now(),
    )


def trusted(world: World) -> tuple[TrustedVerifier, ...]:
    key = public_key_parse(world.context.verdict_signer.public_pem)
    return (TrustedVerifier(key, world.context.verifier_id),)


def verdict(world: World, digest: str) -> VerdictClaims:
    with world.client("node") as node:
        envelope = node.verdict(TENANT, digest)
    return verdict_verify(
        envelope,
        trusted=trusted(world),
        adapter_digest=Digest(digest),
        base_digest=world.base_digest,
        tenant_id=None,
        now=world.context.clock.now(),
    )


def catalog_jobs(world: World) -> list[str]:
    """States of all catalog jobs of the base, newest first."""
    with world.client("operator") as operator:
        return [
            job["state"]
            for job in operator.job_list()
            if (job["kind"], job["baseModelDigest"]) == ("catalog", world.base_digest)
        ]


def test_a_base_shows_what_it_is_and_who_says_so(world: World) -> None:
    base = shown(world)
    assert (base["modelClass"], base["transformersVersion"]) == ("LlamaForCausalLM", OLD)
    assert (base["quantization"], base["recatalog"]) == ("none", None)
    assert base["catalogDigest"] == tiny_catalog(world.base_digest).digest
    assert [
        (made["worker"], made["catalogDigest"], made["transformersVersion"])
        for made in base["catalogs"]
    ] == [(worker, base["catalogDigest"], OLD) for worker in ("worker-1", "worker-2")]
    base_add(world, "fresh")
    fresh = shown(world, "fresh")
    assert (fresh["state"], fresh["modelClass"], fresh["catalogs"]) == ("PENDING", None, [])


def test_another_versions_catalog_is_refused_unless_it_was_asked_for(
    world: World, tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    with pytest.raises(RefusedError, match=r"6\.0\.0.*recatalog"):
        submit(world, "node", catalog_of(world.base_digest, NEW))
    with world.client("operator") as operator:
        assert operator.base_show("tiny")["state"] == "USABLE"
        assert operator.resolve(TENANT, ADAPTER, digest)["adapterDigest"] == digest
        with pytest.raises(ConflictError):
            operator.catalog_drop("tiny", "worker-1", "not needed")


def test_a_conflict_before_admission_is_settled_by_an_operator(world: World) -> None:
    base = base_add(world, "second")
    good, wrong = catalog_of(base), catalog_of(base, NEW)
    assert submit(world, "validator", good)["state"] == "PENDING"
    with pytest.raises(ConflictError):
        submit(world, "validator", wrong)
    assert submit(world, "worker-2", wrong)["state"] == "CONFLICTED"
    with world.client("operator") as operator:
        with pytest.raises(ConflictError, match="CONFLICTED"):
            operator.catalog_remake("second", "hurry")
        assert operator.catalog_drop("second", "worker-2", "old library")["state"] == "PENDING"
        with pytest.raises(NotFoundError):
            operator.catalog_drop("second", "worker-2", "again")
    assert submit(world, "node", good)["state"] == "USABLE"
    assert [event["kind"] for event in events(world, base)][-5:] == [
        "base.conflicted",
        "base.catalog_dropped",
        "base.pending",
        "base.catalogued",
        "base.admitted",
    ]


def test_two_workers_that_agree_on_a_new_version_replace_the_catalog(
    world: World, tmp_path: Path
) -> None:
    digest = world.admit(tmp_path / "a")
    old, new = catalog_of(world.base_digest), catalog_of(world.base_digest, NEW)
    assert recatalog(world)["recatalog"] == "COLLECTING"
    first = submit(world, "validator", new)
    assert (first["state"], first["catalogDigest"]) == ("USABLE", old.digest)
    assert submit(world, "validator", new)["recatalog"] == "COLLECTING"
    second = submit(world, "worker-2", new)
    assert (second["baseModelDigest"], second["catalogDigest"]) == (world.base_digest, new.digest)
    assert (second["transformersVersion"], second["recatalog"]) == (NEW, None)
    with world.client("node") as node:
        assert node.base_catalog("tiny") == new.to_bytes()
        assert node.resolve(TENANT, ADAPTER, digest)["adapterDigest"] == digest
    claims = statement(world)
    assert (claims.catalog_digest, claims.earlier_catalog_digests) == (new.digest, (old.digest,))
    last = events(world, world.base_digest)[-1]
    assert (last["kind"], last["actor"]) == ("base.recatalogued", "worker-2")
    assert last["body"] == {
        "from": {"catalogDigest": old.digest, "transformersVersion": OLD},
        "to": {"catalogDigest": new.digest, "transformersVersion": NEW},
    }


def test_verdicts_name_the_catalog_that_the_scan_went_by(world: World, tmp_path: Path) -> None:
    old, new = catalog_of(world.base_digest), catalog_of(world.base_digest, NEW)
    before = world.admit(tmp_path / "a")
    between = world.publish(tmp_path / "b", fill=2)
    world.settle()
    recatalog(world)
    for worker in ("validator", "worker-2"):
        submit(world, worker, new)
    world.validate()
    world.approve(between)
    after = world.admit(tmp_path / "c", fill=3)
    assert [verdict(world, d).catalog_digest for d in (before, between, after)] == [
        old.digest,
        old.digest,
        new.digest,
    ]
    with world.client("node") as node:
        for digest in (before, between, after):
            assert node.resolve(TENANT, ADAPTER, digest)["adapterDigest"] == digest


def test_a_node_with_an_earlier_catalog_goes_on_and_a_strangers_is_refused(world: World) -> None:
    old, new = catalog_of(world.base_digest), catalog_of(world.base_digest, NEW)
    recatalog(world)
    for worker in ("validator", "worker-2"):
        submit(world, worker, new)
    with world.client("node") as node:
        for catalog in (old, new):
            assert submit(world, "node", catalog)["catalogDigest"] == new.digest
            node.node_register("node-1", world.base_digest, "http://node:1", catalog.digest)
        with pytest.raises(RefusedError, match=new.digest):
            node.node_register("node-1", world.base_digest, "http://node:1", digest_of(b"x"))
    with pytest.raises(RefusedError):
        submit(world, "node", catalog_of(world.base_digest, "7.0.0"))


def test_two_that_differ_on_the_new_version_change_nothing(world: World) -> None:
    old, new = catalog_of(world.base_digest), catalog_of(world.base_digest, NEW)
    wrong = catalog_of(world.base_digest, NEW, model_class="OtherForCausalLM")
    recatalog(world)
    submit(world, "validator", new)
    disputed = submit(world, "worker-2", wrong)
    assert (disputed["state"], disputed["recatalog"]) == ("USABLE", "CONFLICTED")
    assert disputed["catalogDigest"] == old.digest == statement(world).catalog_digest
    assert {(made["worker"], made["catalogDigest"]) for made in disputed["catalogs"]} >= {
        ("worker-1", new.digest),
        ("worker-2", wrong.digest),
    }
    assert catalog_jobs(world) == ["DONE", "DONE"]
    last = events(world, world.base_digest)[-1]
    assert last["kind"] == "base.recatalog_conflicted"
    assert last["body"] == {
        "transformersVersion": NEW,
        "catalogDigests": sorted([new.digest, wrong.digest]),
    }
    # A third that agrees with one of them is no majority: an operator decides.
    assert submit(world, "node", new)["catalogDigest"] == old.digest
    with world.client("operator") as operator:
        settled = operator.catalog_drop("tiny", "worker-2", "patched library")
    assert (settled["catalogDigest"], settled["recatalog"]) == (new.digest, None)


def test_only_agreement_on_one_other_version_replaces_the_catalog(world: World) -> None:
    old = catalog_of(world.base_digest)
    recatalog(world)
    with pytest.raises(RefusedError, match="use that version"):
        submit(world, "validator", catalog_of(world.base_digest, model_class="OtherForCausalLM"))
    for worker in ("validator", "worker-2", "node"):
        assert submit(world, worker, old)["recatalog"] == "COLLECTING"
    for worker, version in (("validator", NEW), ("worker-2", "6.0.1")):
        assert submit(world, worker, catalog_of(world.base_digest, version))["catalogDigest"] == (
            old.digest
        )
    with pytest.raises(ConflictError, match="made before"):
        submit(
            world, "validator", catalog_of(world.base_digest, NEW, model_class="OtherForCausalLM")
        )
    assert submit(world, "node", catalog_of(world.base_digest, "6.0.1"))["transformersVersion"] == (
        "6.0.1"
    )


def test_asking_again_begins_anew_and_can_lead_back(world: World) -> None:
    old, new = catalog_of(world.base_digest), catalog_of(world.base_digest, NEW)
    recatalog(world)
    submit(world, "validator", new)
    recatalog(world)
    assert submit(world, "worker-2", new)["catalogDigest"] == old.digest
    assert submit(world, "validator", new)["catalogDigest"] == new.digest
    recatalog(world)
    assert submit(world, "validator", old)["catalogDigest"] == new.digest
    back = submit(world, "node", old)
    assert (back["catalogDigest"], back["recatalog"]) == (old.digest, None)
    assert statement(world).earlier_catalog_digests == (new.digest,)


def test_each_worker_is_asked_once_and_nobody_once_it_is_settled(world: World) -> None:
    new = json.loads(catalog_of(world.base_digest, NEW).to_bytes())
    assert catalog_jobs(world) == ["DONE"]
    recatalog(world)
    with world.client("validator") as one, world.client("worker-2") as two:
        job = one.job_claim("w", ["catalog"], [world.base_digest])
        assert job is not None
        one.job_complete(job["id"], job["lease"], catalog=new)
        assert one.job_claim("w", ["catalog"], [world.base_digest]) is None
        assert catalog_jobs(world) == ["QUEUED", "DONE", "DONE"]
        job = two.job_claim("w", ["catalog"], [world.base_digest])
        assert job is not None
        two.job_complete(job["id"], job["lease"], catalog=new)
    assert shown(world)["transformersVersion"] == NEW
    assert set(catalog_jobs(world)) == {"DONE"}


def test_a_job_that_waits_is_closed_when_the_catalog_came_another_way(world: World) -> None:
    recatalog(world)
    assert catalog_jobs(world)[0] == "QUEUED"
    for worker in ("worker-2", "node"):
        submit(world, worker, catalog_of(world.base_digest, NEW))
    assert set(catalog_jobs(world)) == {"DONE"}


def test_a_quantized_base_is_told_apart_from_what_an_adapter_was_trained_on(
    world: World, tmp_path: Path
) -> None:
    base = base_add(world, "packed", GPTQ)
    with pytest.raises(RefusedError, match="quantization"):
        submit(world, "validator", catalog_of(base))
    for worker in ("validator", "worker-2"):
        submit(world, worker, catalog_of(base, quantization="gptq"))
    assert (shown(world, "packed")["state"], shown(world, "packed")["quantization"]) == (
        "USABLE",
        "gptq",
    )
    with world.client("operator") as operator:
        operator.base_grant("packed", TENANT)
    found = {}
    for number, trained in enumerate(("gptq", "none"), 1):
        digest = world.publish(
            tmp_path / trained,
            fill=number,
            declare={"base_model_digest": base, "base_quantization": trained},
        )
        world.settle()
        with world.client("operator") as operator:
            assert operator.artifact_show(TENANT, digest)["state"] == "VALIDATING"
            (report,) = operator.report_list(TENANT, digest)
        found[trained] = [
            (item["code"], item["severity"], item["check"], item["expected"], item["got"])
            for item in report["findings"]
        ]
    assert found == {
        "gptq": [],
        "none": [("QUANTIZATION_DIFFERS", "review", 4, "the base's gptq", "none")],
    }


def test_a_base_that_does_not_say_how_it_is_stored_is_refused(world: World) -> None:
    with pytest.raises(RefusedError, match="quant_method"):
        base_add(world, "odd", b'{"quantization_config":{"bits":4}}')
    with pytest.raises(RefusedError, match="auto_map"):
        base_add(world, "odd", b'{"text_config":{"auto_map":{}}}')


def test_a_catalog_of_another_base_or_in_another_form_is_malformed(world: World) -> None:
    other = catalog_of(Digest("sha256:" + "0" * 64))
    spaced = json.dumps(json.loads(catalog_of(world.base_digest).to_bytes())).encode()
    with world.client("validator") as client:
        for content in (other.to_bytes(), spaced):
            with pytest.raises(MalformedError, match="catalog"):
                client.catalog_submit("tiny", content)


def test_an_operator_asks_and_sees_who_made_what(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAPTERCTL_URL", world.url)
    monkeypatch.setenv("ADAPTERCTL_TOKEN", world.tokens["operator"])
    new = catalog_of(world.base_digest, NEW)
    assert cli_main.main(["base", "recatalog", "tiny", "--reason", "transformers 6"]) == 0
    assert "COLLECTING" in capsys.readouterr().out
    submit(world, "validator", new)
    submit(world, "worker-2", catalog_of(world.base_digest, NEW, model_class="OtherForCausalLM"))
    assert cli_main.main(["base", "show", "tiny"]) == 0
    said = capsys.readouterr().out
    for word in ("CONFLICTED", "LlamaForCausalLM", OLD, NEW, "worker-1", "worker-2", "none"):
        assert word in said
    command = ["base", "drop-catalog", "tiny", "worker-2", "--reason", "patched library"]
    assert cli_main.main(command) == 0
    assert shown(world)["recatalog"] == "COLLECTING"
    assert submit(world, "node", new)["transformersVersion"] == NEW
