"""What the running service answers fits the models, and the schemas made from them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from registry_service.client import RegistryClient
from registry_service.domain import limits, wire, wire_statements
from schemas import generate
from tests.integration.conftest import World

TENANT, ADAPTER = "t-1042", "support-zh"
NAMES = {model: name for name, model in generate.MODELS.items()}


def fits(model: type[wire.Wire], document: Any) -> None:
    """The model reads it whole, and so does the schema in the repository."""
    model.model_validate_json(json.dumps(document))
    if model in NAMES:
        schema = json.loads((generate.ROOT / "schemas" / f"{NAMES[model]}.json").read_text())
        checker = Draft202012Validator.FORMAT_CHECKER
        Draft202012Validator(schema, format_checker=checker).validate(document)


def payload(envelope: bytes) -> Any:
    return json.loads(base64.b64decode(json.loads(envelope)["payload"]))


@pytest.fixture
def admitted(world: World, tmp_path: Path) -> Iterator[tuple[World, str, RegistryClient]]:
    digest = world.publish(tmp_path / "a", label="v1")
    world.settle()
    finding = {"check": 10, "code": "SPECTRUM", "where": "q_proj", "expected": "at most 1"}
    job = world.validate(finding | {"got": "2", "severity": "review"})
    fits(wire.Job, job)
    world.approve(digest)
    with world.client("operator") as operator:
        yield world, digest, operator


def test_artifacts_and_what_was_found_and_decided(
    admitted: tuple[World, str, RegistryClient],
) -> None:
    world, digest, operator = admitted
    fits(wire.Artifact, operator.artifact_show(TENANT, digest))
    reports = operator.report_list(TENANT, digest)
    assert {report["stage"] for report in reports} == {"scan", "validate"}
    for report in reports:
        fits(wire.Report, report)
    for review in operator.review_list(TENANT, digest):
        fits(wire.Review, review)
    fits(wire_statements.VerdictStatement, payload(operator.verdict(TENANT, digest)))
    token = {"Authorization": f"Bearer {world.tokens['operator']}"}
    statement = httpx.get(f"{world.url}/v1/bases/tiny/statement", headers=token, timeout=60)
    fits(wire_statements.BaseStatement, payload(statement.content))
    operator.revoke(TENANT, digest, "leaks", 30)
    listed = operator.revocation_list()
    assert listed is not None
    fits(wire.RevocationList, payload(listed))


def test_names_grants_nodes_and_revocations(admitted: tuple[World, str, RegistryClient]) -> None:
    world, digest, operator = admitted
    fits(wire.Alias, operator.alias_set(TENANT, ADAPTER, "prod", digest, 0, "first"))
    for move in operator.alias_history(TENANT, ADAPTER, "prod"):
        fits(wire.AliasMove, move)
    for reference in ("prod", "v1", digest):
        fits(wire.Resolution, operator.resolve(TENANT, ADAPTER, reference))
    fits(wire.Grant, operator.grant_set(TENANT, ADAPTER, "web"))
    catalog = operator.base_show("tiny")["catalogDigest"]
    with world.client("node") as node:
        node.node_register("node-1", world.base_digest, "http://127.0.0.1:1", catalog)
        owner = operator.artifact_show(TENANT, digest)["ownerTenant"]
        held = {"tenantId": owner, "adapterDigest": digest, "state": "RESIDENT"}
        node.node_heartbeat("node-1", 0, [held])
    for shown in operator.node_list():
        fits(wire.Node, shown)
    fits(wire.Revocation, operator.revoke(TENANT, digest, "leaks", 30))
    fits(wire.Artifact, operator.artifact_show(TENANT, digest))


def test_platform_documents_and_the_feed(admitted: tuple[World, str, RegistryClient]) -> None:
    world, _, operator = admitted
    for base in operator.base_list():
        fits(wire.Base, base)
    with world.client("admin") as admin:
        for tenant in admin.tenant_list():
            fits(wire.Tenant, tenant)
        for token in admin.token_list():
            fits(wire.Token, token)
        fits(wire.NewToken, admin.token_create("someone", "auditor", None))
    feed = operator.feed(0)
    fits(wire.Feed, feed)
    assert [event["index"] for event in feed["items"]] == list(range(1, len(feed["items"]) + 1))
    for event in feed["items"]:
        fits(wire.FeedEvent, event)


def test_problems(world: World) -> None:
    token = {"Authorization": f"Bearer {world.tokens['operator']}"}
    for answer in (
        httpx.get(f"{world.url}/v1/whoami", timeout=60),
        httpx.get(f"{world.url}/v1/bases/none", headers=token, timeout=60),
        httpx.post(f"{world.url}/v1/bases", headers=token, json={"surprise": 1}, timeout=60),
    ):
        assert answer.headers["content-type"] == "application/problem+json"
        fits(wire.Problem, answer.json())


def test_answers_to_workers_and_gateways(admitted: tuple[World, str, RegistryClient]) -> None:
    world, digest, operator = admitted
    fits(wire.Whoami, operator.whoami())
    for job in operator.job_list():
        fits(wire.JobState, job)
    operator.grant_set(TENANT, ADAPTER, "team/app")
    catalog = operator.base_show("tiny")["catalogDigest"]
    with world.client("node") as node, world.client("gateway") as gateway:
        node.node_register("node-1", world.base_digest, "http://127.0.0.1:1", catalog)
        minted = gateway.routing_context(
            tenant=TENANT,
            adapter=ADAPTER,
            reference=digest,
            node="node-1",
            body_digest=digest,
            session_id="s",
            subject="team/app",
        )
        fits(wire.MintedContext, minted)
        operator.revoke(TENANT, digest, "leaks", 30)
        fits(wire.Renewal, node.node_heartbeat("node-1", 0, []))


def test_the_openapi_document_says_what_every_json_route_answers(world: World) -> None:
    document = httpx.get(f"{world.url}/v1/openapi.json", timeout=60).json()
    silent = {
        f"{method} {path}"
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        if not any(
            "application/json" in answer.get("content", {})
            and answer["content"]["application/json"]["schema"].get("$ref")
            for status, answer in route["responses"].items()
            if status.startswith("2")
        )
    }
    # Bytes, and answers without a body.
    assert silent == {
        "get /v1/health",
        "get /v1/ready",
        "get /v1/bases/{base}/catalog",
        "get /v1/bases/{base}/statement",
        "get /v1/bases/{base}/files/{path}",
        "get /v1/tenants/{tenant}/artifacts/{digest}/verdict",
        "get /v1/revocation-list",
        "delete /v1/nodes/{node}/placements/{tenant}/{digest}",
        "post /v1/jobs/{job_id}/heartbeat",
        "post /v1/jobs/{job_id}/result",
        "post /v1/nodes/{node}/acknowledgements",
        "post /v1/nodes/{node}/usage",
    }


def test_a_body_over_the_limit_is_refused(world: World) -> None:
    token = {"Authorization": f"Bearer {world.tokens['operator']}"}
    body = b'{"name": "' + b"x" * limits.REQUEST_BODY_BYTES + b'"}'
    answer = httpx.post(f"{world.url}/v1/bases", headers=token, content=body, timeout=60)
    assert answer.status_code == 413
    fits(wire.Problem, answer.json())
