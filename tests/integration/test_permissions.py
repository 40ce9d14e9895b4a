"""Every route has a role check, and the wrong role, the wrong tenant and no token are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from fastapi.routing import APIRoute

from registry_service.api import control_registry, control_serving, data_plane, front
from registry_service.api.auth import RoleCheck
from registry_service.domain.roles import Role
from tests.integration.conftest import World

# The front lets these pass without a token; nothing else.
OPEN = front.OPEN - {"/v1/openapi.json"}


def routes() -> list[APIRoute]:
    return [
        route
        for router in (control_registry.router, control_serving.router, data_plane.router)
        for route in router.routes
        if isinstance(route, APIRoute)
    ]


def allowed(route: APIRoute) -> frozenset[Role] | None:
    calls = [item.call for item in route.dependant.dependencies]
    return next((call.roles for call in calls if isinstance(call, RoleCheck)), None)


def path_of(route: APIRoute, tenant: str = "t-1042") -> str:
    values = {
        "tenant": tenant,
        "digest": "sha256:" + "0" * 64,
        "reference": "v1",
        "adapter": "support-zh",
        "upload_id": "00000000-0000-0000-0000-000000000001",
        "job_id": "00000000-0000-0000-0000-000000000001",
        "token_id": "00000000-0000-0000-0000-000000000001",
        "path:path": "x",
        "subject:path": "team/app",
    }
    return re.sub(r"{([^}]+)}", lambda match: values.get(match[1], "x"), route.path)


def test_every_route_names_its_roles() -> None:
    bare = {route.path for route in routes() if allowed(route) is None}
    assert bare == OPEN == {"/v1/health", "/v1/ready"}


def send(world: World, method: str, path: str, role: str | None) -> httpx.Response:
    headers = {} if role is None else {"Authorization": f"Bearer {world.tokens[role]}"}
    body: dict[str, Any] = {"json": {}} if method in ("POST", "PUT") else {}
    return httpx.request(method, world.url + path, headers=headers, timeout=60, **body)


def test_no_token_and_wrong_roles_are_refused(world: World) -> None:
    keys = {role: role.value for role in Role} | {Role.PUBLISHER: "publisher:t-1042"}
    for route in routes():
        roles = allowed(route)
        if roles is None:
            continue
        for method in sorted(route.methods):
            path = path_of(route)
            assert send(world, method, path, None).status_code == 401, (method, path)
            for role in set(Role) - roles:
                answer = send(world, method, path, keys[role])
                assert answer.status_code == 403, (method, path, role)


def test_the_wrong_tenant_sees_nothing(world: World) -> None:
    checked = 0
    for route in routes():
        roles = allowed(route) or frozenset()
        if "{tenant}" not in route.path or Role.PUBLISHER not in roles:
            continue
        for method in sorted(route.methods & {"GET", "HEAD"}):
            theirs = send(world, method, path_of(route), "publisher:t-2001")
            nobody = send(world, method, path_of(route, "t-9999"), "publisher:t-2001")
            assert theirs.status_code == nobody.status_code
            assert theirs.status_code in (403, 404), route.path
            checked += 1
    assert checked > 10


def test_an_expired_and_a_withdrawn_token_are_refused(world: World) -> None:
    with world.client("admin") as admin:
        made = admin.token_create("gone", "auditor", None)
        world.tokens["gone"] = made["token"]
        assert send(world, "GET", "/v1/whoami", "gone").status_code == 200
        admin.token_revoke(made["id"])
    assert send(world, "GET", "/v1/whoami", "gone").status_code == 401


def test_a_suspended_tenants_token_ends(world: World) -> None:
    with world.client("admin") as admin:
        admin.tenant_suspend("t-2001", "unpaid")
    assert send(world, "GET", "/v1/whoami", "publisher:t-2001").status_code == 401
    assert send(world, "GET", "/v1/whoami", "publisher:t-1042").status_code == 200


BODIES: dict[str, dict[str, Any]] = {
    "alias_set": {"adapterDigest": "sha256:" + "0" * 64, "reason": "x"},
    "review_submit": {"decision": "approve", "reason": "x"},
    "artifact_withdraw": {"reason": "x"},
    "artifact_requeue": {"reason": "x"},
    "artifact_revoke": {"reason": "x"},
    "tenant_policy_set": {"fullTensors": True, "reason": "x"},
}
# Roles that may be bound to a tenant; the others are the platform's.
TENANT_BOUND = (Role.REVIEWER, Role.OPERATOR, Role.AUDITOR, Role.GATEWAY)


def test_a_tenants_principal_touches_no_other_tenant(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a", label="v1")
    with world.client("admin") as admin:
        for role in TENANT_BOUND:
            made = admin.token_create(f"{role}-of-2001", role, "t-2001")
            world.tokens[f"{role}:t-2001"] = made["token"]
    checked = 0
    for route in routes():
        roles = allowed(route) or frozenset()
        if "{tenant}" not in route.path or "/v2/" in route.path:
            continue
        for role in roles & {*TENANT_BOUND, Role.PUBLISHER}:
            for method in sorted(route.methods):
                path = path_of(route).replace("sha256:" + "0" * 64, digest)
                headers = {
                    "Authorization": f"Bearer {world.tokens[f'{role}:t-2001']}",
                    "If-Match": '"0"',
                }
                body = {"json": BODIES[route.name]} if route.name in BODIES else {}
                answer = httpx.request(
                    method, world.url + path, headers=headers, timeout=60, **body
                )
                assert answer.status_code == 404, (method, path, role, answer.text)
                checked += 1
    assert checked > 30
    with world.client("operator") as operator:
        assert operator.artifact_show("t-1042", digest)["state"] == "APPROVED"
        assert list(operator.alias_list("t-1042", "support-zh")) == []


def test_a_tenants_principal_is_not_the_platforms(world: World) -> None:
    with world.client("admin") as admin:
        world.tokens["op"] = admin.token_create("op", "operator", "t-2001")["token"]
    paths = ["/v1/tenants", "/v1/jobs", "/v1/nodes", "/v1/feed", "/v1/nodes/node-1"]
    for path in (*paths, "/v1/revocation-list"):
        assert send(world, "GET", path, "op").status_code == 404, path
    for path in ("/v1/bases/tiny/tenants/t-2001",):
        assert send(world, "PUT", path, "op").status_code == 404, path
    events = httpx.get(
        f"{world.url}/v1/audit",
        headers={"Authorization": f"Bearer {world.tokens['op']}"},
        timeout=60,
    ).json()["items"]
    assert {event["tenant"] for event in events} <= {"t-2001"}
