"""Bad input is refused in words: no route answers with a fault of ours."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from registry_service.domain.canonical import canonical_json
from registry_service.domain.errors import MalformedError
from registry_service.usecases.paging import cursor_encode
from tests.integration.conftest import World, report
from tests.integration.test_permissions import allowed, routes

NASTY = ("%00", "%C2%B2", "..%2F..", "sha256:zz", "x" * 3000, quote("\u202eabc"), "%ED%A0%80")
CURSORS = (
    cursor_encode("x", "y"),
    cursor_encode("\x00", "\x00"),
    cursor_encode("\x00"),
    cursor_encode("²"),
    cursor_encode("9" * 40),
    cursor_encode("2026-01-01", "not-a-uuid"),
    "%%%",
    "e30",
)


def roles_to_tokens(world: World, roles: frozenset[Any]) -> str:
    for role in sorted(roles):
        for key in (role, f"{role}:t-1042"):
            if key in world.tokens:
                return world.tokens[key]
    raise AssertionError(roles)


def test_no_path_answers_with_a_fault_of_ours(world: World) -> None:
    checked = 0
    for route in routes():
        roles = allowed(route)
        if roles is None or "{" not in route.path:
            continue
        headers = {"Authorization": f"Bearer {roles_to_tokens(world, roles)}"}
        for method in sorted(route.methods):
            for nasty in NASTY:
                path = route.path
                for name in route.param_convertors:
                    value = "t-1042" if name == "tenant" else nasty
                    path = path.replace(f"{{{name}}}", value).replace(f"{{{name}:path}}", value)
                body = {"json": {}} if method in ("POST", "PUT") else {}
                answer = httpx.request(
                    method, world.url + path, headers=headers, timeout=60, **body
                )
                assert answer.status_code < 500, (method, path, answer.text)
                checked += 1
    assert checked > 300


def test_no_query_answers_with_a_fault_of_ours(world: World) -> None:
    lists = ("tenants", "tokens", "bases", "artifacts", "jobs", "nodes", "audit")
    headers = {"Authorization": f"Bearer {world.tokens['admin']}"}
    for name in lists:
        for cursor in CURSORS:
            answer = httpx.get(
                f"{world.url}/v1/{name}?cursor={cursor}", headers=headers, timeout=60
            )
            assert answer.status_code < 500, (name, cursor, answer.text)
        for query in ("limit=0", "limit=201", "limit=x", "state=%00", "subject=%00", "tenant=%00"):
            answer = httpx.get(f"{world.url}/v1/{name}?{query}", headers=headers, timeout=60)
            assert answer.status_code < 500, (name, query, answer.text)


def test_numbers_out_of_range_are_refused(world: World) -> None:
    node = {"Authorization": f"Bearer {world.tokens['node']}"}
    beat = httpx.post(
        f"{world.url}/v1/nodes/node-1/heartbeat",
        headers=node,
        json={"feedIndex": 10**30, "residents": []},
        timeout=60,
    )
    assert beat.status_code == 400
    operator = {"Authorization": f"Bearer {world.tokens['operator']}", "If-Match": '"²"'.encode()}
    put = httpx.put(
        f"{world.url}/v1/tenants/t-1042/adapters/a/aliases/prod",
        headers=operator,
        json={"adapterDigest": "sha256:" + "0" * 64, "reason": "x"},
        timeout=60,
    )
    assert put.status_code == 400


@pytest.mark.parametrize(
    "change",
    [
        {"checks": []},
        {"checks": [9, 10, 11, 12, 13, 14]},
        {"device": {"deep": []}},
        {"sandbox": None},
        {"versions": {"torch": "a\x00b"}},
        {"surprise": 1},
        {
            "findings": [
                {
                    "check": 5,
                    "code": "SHAPE_MISMATCH",
                    "where": "x",
                    "expected": "y",
                    "got": "z",
                    "severity": "info",
                }
            ]
        },
        {
            "findings": [
                {
                    "check": 10,
                    "code": "NO_SUCH_CODE",
                    "where": "x",
                    "expected": "y",
                    "got": "z",
                    "severity": "refuse",
                }
            ]
        },
    ],
)
def test_a_report_that_lies_moves_nothing(
    world: World, tmp_path: Path, change: dict[str, Any]
) -> None:
    digest = world.publish(tmp_path / "a")
    world.settle()
    with world.client("validator") as worker:
        job = worker.job_claim("w", ["validate"], [world.base_digest])
        with pytest.raises(MalformedError):
            worker.job_complete(job["id"], job["lease"], report={**report(), **change})
    with world.client("operator") as operator:
        assert operator.artifact_show("t-1042", digest)["state"] == "VALIDATING"


def test_a_report_without_a_sandbox_says_so_to_the_reviewer(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a")
    world.settle()
    with world.client("validator") as worker:
        job = worker.job_claim("w", ["validate"], [world.base_digest])
        worker.job_complete(job["id"], job["lease"], report={**report(), "sandbox": False})
    with world.client("reviewer") as reviewer:
        assert reviewer.artifact_show("t-1042", digest)["state"] == "IN_REVIEW"
        findings = reviewer.report_list("t-1042", digest)[-1]["findings"]
    assert [(f["code"], f["severity"]) for f in findings] == [("NO_SANDBOX", "review")]


def test_a_caller_without_a_token_is_answered_before_its_body(world: World) -> None:
    split = urlsplit(world.url)
    with socket.create_connection((split.hostname, split.port), timeout=10) as raw:
        # The body is announced and never sent: only a service that does not wait for it answers.
        raw.sendall(b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 401")


def test_a_manifest_in_another_form_is_refused(world: World) -> None:
    headers = {
        "Authorization": f"Bearer {world.tokens['publisher:t-1042']}",
        "Content-Type": "application/vnd.oci.image.manifest.v1+json",
    }
    for body in (b"", b"\x00", b"[" * 10_000, canonical_json({"schemaVersion": 2}), b'{"a":NaN}'):
        answer = httpx.put(
            f"{world.url}/v2/t-1042/support-zh/manifests/v1",
            headers=headers,
            content=body,
            timeout=60,
        )
        assert answer.status_code == 400, body[:20]
