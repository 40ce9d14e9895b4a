"""Control plane: tenants, tokens, bases, artifacts, reviews and revocations."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import anyio.to_thread
from fastapi import APIRouter, Request, Response

from registry_service.api import bodies
from registry_service.api.answers import PROBLEMS, answers
from registry_service.api.auth import Parts, allow
from registry_service.domain import limits, wire
from registry_service.domain.digests import digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.roles import PLATFORM, Principal, Role
from registry_service.trust.dsse import MEDIA_TYPE
from registry_service.usecases import artifacts, bases, catalogs, reviews, revocations, tenants

router = APIRouter(prefix="/v1", responses=PROBLEMS)

_ADMIN = allow(Role.ADMIN)
_OPERATOR = allow(Role.OPERATOR, Role.ADMIN)
_ANYONE = allow(*Role)
_READERS = allow(Role.PUBLISHER, Role.REVIEWER, Role.OPERATOR, Role.AUDITOR, Role.ADMIN)
_STATEMENT_READERS = allow(*Role)
_LIMIT = limits.PAGE_ROWS_DEFAULT


@router.get("/whoami", **answers(wire.Whoami))
def whoami(principal: Principal = _ANYONE) -> dict[str, Any]:
    """Who this token speaks for."""
    return {
        "subject": principal.subject,
        "role": principal.role,
        "tenant": None if principal.is_platform else principal.tenant,
        "tenantId": None if principal.is_platform else str(principal.tenant_id),
    }


@router.post("/tenants", status_code=201, **answers(wire.Tenant, 201))
def tenant_create(
    body: bodies.TenantBody, parts: Parts, principal: Principal = _ADMIN
) -> dict[str, Any]:
    """Create a tenant; its name is never given to another."""
    return tenants.tenant_create(parts, principal.subject, body.name)


@router.get("/tenants", **answers(wire.Page[wire.Tenant]))
def tenant_list(
    parts: Parts,
    principal: Principal = allow(Role.ADMIN, Role.OPERATOR, Role.AUDITOR),
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Tenants by name."""
    principal.tenant_check(PLATFORM)
    return tenants.tenant_list(parts, cursor=cursor, limit=limit)


@router.post("/tenants/{tenant}/suspension", **answers(wire.Tenant))
def tenant_suspend(
    tenant: str, body: bodies.ReasonBody, parts: Parts, principal: Principal = _ADMIN
) -> dict[str, Any]:
    """Suspend a tenant."""
    return tenants.tenant_suspend(parts, principal.subject, tenant, body.reason)


@router.put("/tenants/{tenant}/policy", **answers(wire.Tenant))
def tenant_policy_set(
    tenant: str, body: bodies.PolicyBody, parts: Parts, principal: Principal = _OPERATOR
) -> dict[str, Any]:
    """Set what a tenant's adapters may hold."""
    principal.tenant_check(PLATFORM)
    return tenants.tenant_policy_set(
        parts, principal, tenant, full_tensors=body.full_tensors, reason=body.reason
    )


@router.post("/tokens", status_code=201, **answers(wire.NewToken, 201))
def token_create(
    body: bodies.TokenBody, parts: Parts, principal: Principal = _ADMIN
) -> dict[str, Any]:
    """Make a token; its secret is shown once."""
    return tenants.token_create(
        parts,
        principal.subject,
        subject=body.subject,
        role=body.role,
        tenant=body.tenant,
        seconds=body.expires_in_seconds,
    )


@router.get("/tokens", **answers(wire.Page[wire.Token]))
def token_list(
    parts: Parts,
    principal: Principal = allow(Role.ADMIN, Role.AUDITOR),
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Tokens without their secrets, newest first."""
    return tenants.token_list(parts, principal, cursor=cursor, limit=limit)


@router.delete("/tokens/{token_id}", **answers(wire.Token))
def token_revoke(token_id: UUID, parts: Parts, principal: Principal = _ADMIN) -> dict[str, Any]:
    """Withdraw a token at once."""
    return tenants.token_withdraw(parts, principal.subject, token_id)


@router.post("/bases", status_code=201, **answers(wire.Base, 201))
def base_add(
    body: bodies.BaseBody, parts: Parts, principal: Principal = _OPERATOR
) -> dict[str, Any]:
    """Register a base model by manifest, small files and safetensors headers."""
    principal.tenant_check(PLATFORM)
    return bases.base_add(
        parts,
        principal.subject,
        name=body.name,
        manifest=body.manifest.encode(),
        files=_decoded("files", body.files),
        headers=_decoded("headers", body.headers),
    )


@router.get("/bases", **answers(wire.Page[wire.Base]))
def base_list(
    parts: Parts,
    principal: Principal = _ANYONE,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Bases by name; a tenant sees those granted to it."""
    return bases.base_list(parts, principal, cursor=cursor, limit=limit)


@router.get("/bases/{base}", **answers(wire.Base))
def base_show(base: str, parts: Parts, principal: Principal = _ANYONE) -> dict[str, Any]:
    """One base, by name or digest."""
    return bases.base_show(parts, principal, base)


@router.get("/bases/{base}/catalog")
def base_catalog(base: str, parts: Parts, principal: Principal = _ANYONE) -> Response:
    """The agreed catalog, as canonical JSON."""
    return Response(bases.base_catalog(parts, principal, base), media_type="application/json")


@router.post("/bases/{base}/catalogs", **answers(wire.Base))
async def catalog_submit(
    base: str,
    request: Request,
    parts: Parts,
    principal: Principal = allow(Role.VALIDATOR, Role.NODE),
) -> dict[str, Any]:
    """A worker's own catalog of a base."""
    content = await request.body()

    def submit() -> dict[str, Any]:
        catalogs.catalog_submit(parts, principal.subject, base, content)
        return bases.base_show(parts, principal, base)

    return await anyio.to_thread.run_sync(submit)


@router.post("/bases/{base}/catalogs/{worker:path}/removal", **answers(wire.Base))
def catalog_drop(
    base: str,
    worker: str,
    body: bodies.ReasonBody,
    parts: Parts,
    principal: Principal = _OPERATOR,
) -> dict[str, Any]:
    """Drop a worker's catalog that is not admitted."""
    principal.tenant_check(PLATFORM)
    catalogs.catalog_drop(parts, principal.subject, base, worker, body.reason)
    return bases.base_show(parts, principal, base)


@router.post("/bases/{base}/recatalog", **answers(wire.Base))
def catalog_remake(
    base: str, body: bodies.ReasonBody, parts: Parts, principal: Principal = _OPERATOR
) -> dict[str, Any]:
    """Have an admitted base's catalog made again, with another version of transformers."""
    principal.tenant_check(PLATFORM)
    catalogs.catalog_remake(parts, principal.subject, base, body.reason)
    return bases.base_show(parts, principal, base)


@router.get("/bases/{base}/statement")
def base_statement(base: str, parts: Parts, principal: Principal = _STATEMENT_READERS) -> Response:
    """The signed statement that admitted the base."""
    return Response(bases.base_statement_show(parts, principal, base), media_type=MEDIA_TYPE)


@router.get("/bases/{base}/files/{path}")
def base_file(base: str, path: str, parts: Parts, principal: Principal = _ANYONE) -> Response:
    """A kept file of a base."""
    return Response(
        bases.base_file(parts, principal, base, path), media_type="application/octet-stream"
    )


@router.put("/bases/{base}/tenants/{tenant}", **answers(wire.Base))
def base_grant(
    base: str, tenant: str, parts: Parts, principal: Principal = _OPERATOR
) -> dict[str, Any]:
    """Let a tenant see and use a base."""
    principal.tenant_check(PLATFORM)
    return bases.base_grant(parts, principal.subject, base, tenant)


@router.get("/artifacts", **answers(wire.Page[wire.Artifact]))
def artifact_list(
    parts: Parts,
    principal: Principal = _READERS,
    tenant: str | None = None,
    adapter: str | None = None,
    state: str | None = None,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Artifacts, newest first."""
    return artifacts.artifact_list(
        parts,
        principal,
        tenant=tenant,
        adapter=adapter,
        state=state,
        cursor=cursor,
        limit=limit,
    )


@router.get("/tenants/{tenant}/artifacts/{digest}", **answers(wire.Artifact))
def artifact_show(
    tenant: str, digest: str, parts: Parts, principal: Principal = _READERS
) -> dict[str, Any]:
    """One artifact."""
    return artifacts.artifact_show(parts, principal, tenant, digest_parse(digest))


@router.get("/tenants/{tenant}/artifacts/{digest}/reports", **answers(wire.Page[wire.Report]))
def artifact_reports(
    tenant: str,
    digest: str,
    parts: Parts,
    principal: Principal = _READERS,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """All reports of an artifact."""
    return artifacts.artifact_reports(
        parts, principal, tenant, digest_parse(digest), cursor=cursor, limit=limit
    )


@router.get("/tenants/{tenant}/artifacts/{digest}/verdict")
def artifact_verdict(
    tenant: str, digest: str, parts: Parts, principal: Principal = _STATEMENT_READERS
) -> Response:
    """The signed verdict of an admitted artifact."""
    envelope = artifacts.artifact_verdict(parts, principal, tenant, digest_parse(digest))
    return Response(envelope, media_type=MEDIA_TYPE)


@router.get("/tenants/{tenant}/artifacts/{digest}/reviews", **answers(wire.Page[wire.Review]))
def review_list(
    tenant: str,
    digest: str,
    parts: Parts,
    principal: Principal = _READERS,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Who decided what."""
    return reviews.review_list(
        parts, principal, tenant, digest_parse(digest), cursor=cursor, limit=limit
    )


@router.post(
    "/tenants/{tenant}/artifacts/{digest}/reviews", status_code=201, **answers(wire.Artifact, 201)
)
def review_submit(
    tenant: str,
    digest: str,
    body: bodies.ReviewBody,
    parts: Parts,
    principal: Principal = allow(Role.REVIEWER),
) -> dict[str, Any]:
    """Approve or reject; never one's own artifact."""
    return reviews.review_submit(
        parts,
        principal,
        tenant,
        digest_parse(digest),
        decision=body.decision,
        reason=body.reason,
    )


@router.post("/tenants/{tenant}/artifacts/{digest}/withdrawal", **answers(wire.Artifact))
def artifact_withdraw(
    tenant: str,
    digest: str,
    body: bodies.ReasonBody,
    parts: Parts,
    principal: Principal = allow(Role.PUBLISHER),
) -> dict[str, Any]:
    """Take an artifact out of review."""
    return artifacts.artifact_withdraw(parts, principal, tenant, digest_parse(digest), body.reason)


@router.post("/tenants/{tenant}/artifacts/{digest}/requeue", **answers(wire.Artifact))
def artifact_requeue(
    tenant: str,
    digest: str,
    body: bodies.ReasonBody,
    parts: Parts,
    principal: Principal = _OPERATOR,
) -> dict[str, Any]:
    """Scan a stalled artifact again."""
    return artifacts.artifact_requeue(parts, principal, tenant, digest_parse(digest), body.reason)


@router.post("/tenants/{tenant}/artifacts/{digest}/revocation", **answers(wire.Revocation))
def artifact_revoke(
    tenant: str,
    digest: str,
    body: bodies.RevocationBody,
    parts: Parts,
    principal: Principal = _OPERATOR,
) -> dict[str, Any]:
    """Revoke an artifact: refused everywhere from now on, then drained."""
    return revocations.revoke(
        parts,
        principal,
        tenant,
        digest_parse(digest),
        reason=body.reason,
        deadline_seconds=body.deadline_seconds,
    )


@router.get("/tenants/{tenant}/artifacts/{digest}/revocation", **answers(wire.Revocation))
def revocation_show(
    tenant: str, digest: str, parts: Parts, principal: Principal = _READERS
) -> dict[str, Any]:
    """How far a revocation is, and which nodes are outstanding."""
    return revocations.revocation_show(parts, principal, tenant, digest_parse(digest))


def _decoded(what: str, files: Mapping[str, str]) -> dict[str, bytes]:
    try:
        return {path: base64.b64decode(data, validate=True) for path, data in files.items()}
    except binascii.Error as error:
        raise MalformedError(f"{what}: expected base64") from error
