"""What a tenant's adapters may hold: who sets it, where it is kept, and when it counts."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    MalformedError,
    NotFoundError,
)
from registry_service.domain.policy import POLICY, AdmissionPolicy
from tests.integration.conftest import WIDTH, World, lora_tensors, safetensors_bytes

STRICT, OPEN = POLICY.digest, AdmissionPolicy(full_tensors=True).digest
# The tiny base's second layer as a whole, beside LoRA on the first.
SAVED = "model.layers.1.self_attn.q_proj"


def full(path: Path, world: World, **options: Any) -> str:
    """Publish an adapter that saves a whole module of the base."""
    tensors = {name: shape for name, shape in lora_tensors().items() if f".{SAVED}." not in name}
    tensors[f"base_model.model.{SAVED}.weight"] = (WIDTH, WIDTH)
    config = {"modules_to_save": [SAVED], "exclude_modules": [SAVED]}
    return world.publish(path, weights=safetensors_bytes(tensors, 1), config=config, **options)


def allow(world: World, full_tensors: bool, tenant: str = "t-1042") -> dict[str, Any]:
    with world.client("operator") as operator:
        return operator.tenant_policy_set(tenant, full_tensors=full_tensors, reason="agreed")


def state(world: World, digest: str) -> str:
    with world.client("operator") as operator:
        return str(operator.artifact_show("t-1042", digest)["state"])


def policy_digest(world: World, digest: str) -> str:
    """The policy's digest in the signed verdict."""
    with world.client("operator") as operator:
        envelope = json.loads(operator.verdict("t-1042", digest))
    statement = json.loads(base64.b64decode(envelope["payload"]))
    return "sha256:" + str(statement["predicate"]["policy"]["digest"]["sha256"])


def test_full_tensors_are_refused_until_the_operator_allows_them(
    world: World, tmp_path: Path
) -> None:
    refused = full(tmp_path / "a", world)
    world.settle()
    assert state(world, refused) == "REJECTED"
    assert allow(world, True)["fullTensors"] is True
    taken = full(tmp_path / "b", world, adapter="other")
    world.settle()
    assert state(world, taken) == "VALIDATING"
    elsewhere = full(tmp_path / "c", world, tenant="t-2001")
    world.settle()
    with world.client("operator") as operator:
        assert operator.artifact_show("t-2001", elsewhere)["state"] == "REJECTED"


def test_the_verdict_names_the_rules_that_the_scan_ran_under(world: World, tmp_path: Path) -> None:
    strict = world.publish(tmp_path / "a")
    world.settle()
    world.validate()
    allow(world, True)
    world.approve(strict)
    assert policy_digest(world, strict) == STRICT
    opened = world.admit(tmp_path / "b", adapter="other", fill=2)
    assert policy_digest(world, opened) == OPEN != STRICT


def test_what_was_scanned_under_laxer_rules_is_not_approved_under_stricter_ones(
    world: World, tmp_path: Path
) -> None:
    allow(world, True)
    digest = full(tmp_path / "a", world)
    world.settle()
    world.validate()
    allow(world, False)
    with pytest.raises(ConflictError, match="while full tensors were allowed"):
        world.approve(digest)
    assert state(world, digest) == "IN_REVIEW"
    allow(world, True)
    world.approve(digest)
    assert state(world, digest) == "APPROVED"


def test_a_change_stands_in_the_tenants_own_log_once(world: World) -> None:
    allow(world, True)
    allow(world, True)
    allow(world, False)
    world.settle()
    with world.client("admin") as admin:
        world.tokens["audits"] = admin.token_create("audits", "auditor", "t-1042")["token"]
    with world.client("audits") as auditor:
        events = [e for e in auditor.audit_list() if e["kind"] == "tenant.policy_set"]
    assert [event["body"]["fullTensors"] for event in events] == [True, False]
    assert {event["actor"] for event in events} == {"olga"}
    assert {event["body"]["reason"] for event in events} == {"agreed"}
    assert {event["tenant"] for event in events} == {"t-1042"}


def test_a_tenants_own_operator_cannot_change_its_policy(world: World) -> None:
    with world.client("admin") as admin:
        world.tokens["own"] = admin.token_create("own", "operator", "t-1042")["token"]
    for key, error in (("own", NotFoundError), ("publisher:t-1042", ForbiddenError)):
        with world.client(key) as client, pytest.raises(error):
            client.tenant_policy_set("t-1042", full_tensors=True, reason="please")
    with world.client("admin") as admin:
        assert {tenant["fullTensors"] for tenant in admin.tenant_list()} == {False}


@pytest.mark.parametrize("tenant", ["t-9999", "platform"])
def test_a_policy_belongs_to_a_tenant_that_there_is(world: World, tenant: str) -> None:
    with pytest.raises((NotFoundError, MalformedError)):
        allow(world, True, tenant)


def test_the_command_line_sets_and_shows_it(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    service = ["--url", world.url, "--token", world.tokens["operator"], "tenant"]
    assert main([*service, "policy", "t-1042", "-m", "why"]) == 2
    assert "--full-tensors" in capsys.readouterr().err
    assert main([*service, "policy", "t-1042", "--full-tensors", "-m", "why", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fullTensors"] is True
    assert main([*service, "list"]) == 0
    lines = {line.split()[0]: line.split()[2] for line in capsys.readouterr().out.splitlines()}
    assert lines["t-1042"] == "yes" and lines["t-2001"] == "no"
    assert main([*service, "policy", "t-1042", "--no-full-tensors", "-m", "why"]) == 0
    assert "fullTensors" in capsys.readouterr().out
