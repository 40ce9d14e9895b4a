"""Control plane: aliases, resolving, grants, routing contexts, jobs, nodes, feed and audit."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from registry_service.api import bodies
from registry_service.api.answers import PROBLEMS, answers
from registry_service.api.auth import Parts, allow
from registry_service.domain import limits, wire
from registry_service.domain.digests import digest_parse
from registry_service.domain.errors import MalformedError, RegistryError
from registry_service.domain.roles import PLATFORM, Principal, Role
from registry_service.trust.dsse import MEDIA_TYPE
from registry_service.usecases import (
    aliases,
    jobs,
    nodes,
    placements,
    resolve,
    revocations,
    routing,
    usage,
)
from registry_service.usecases import revocation_list as revocation_lists
from registry_service.usecases.context import database_check

router = APIRouter(prefix="/v1", responses=PROBLEMS)

_OPERATOR = allow(Role.OPERATOR, Role.ADMIN)
_READERS = allow(Role.PUBLISHER, Role.REVIEWER, Role.OPERATOR, Role.AUDITOR, Role.ADMIN)
_RESOLVERS = allow(Role.PUBLISHER, Role.REVIEWER, Role.OPERATOR, Role.NODE, Role.GATEWAY)
_VALIDATOR = allow(Role.VALIDATOR)
_NODE = allow(Role.NODE)
_LIMIT = limits.PAGE_ROWS_DEFAULT
_FEED_POLL_SECONDS = 0.1


class PreconditionRequiredError(RegistryError):
    """A conditional request without its condition (RFC 6585, section 3)."""

    code = "PRECONDITION_REQUIRED"
    http_status = 428
    exit_code = 2


@router.get("/health")
def health() -> dict[str, str]:
    """The process answers. Open to everybody."""
    return {"status": "ok"}


@router.get("/ready")
def ready(parts: Parts) -> dict[str, str]:
    """The database answers, too. Open to everybody."""
    database_check(parts)
    return {"status": "ready"}


@router.get("/tenants/{tenant}/adapters/{adapter}/resolve/{reference}", **answers(wire.Resolution))
def resolve_reference(
    tenant: str, adapter: str, reference: str, parts: Parts, principal: Principal = _RESOLVERS
) -> JSONResponse:
    """The immutable digest that a digest, label or alias names."""
    # Plain text all through: what every request of a fleet asks for is not walked for types.
    return JSONResponse(resolve.resolve(parts, principal, tenant, adapter, reference))


@router.get("/tenants/{tenant}/adapters/{adapter}/aliases", **answers(wire.Page[wire.Alias]))
def alias_list(
    tenant: str,
    adapter: str,
    parts: Parts,
    principal: Principal = _READERS,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Aliases of an adapter by name."""
    return aliases.alias_list(parts, principal, tenant, adapter, cursor=cursor, limit=limit)


@router.get("/tenants/{tenant}/adapters/{adapter}/aliases/{alias}", **answers(wire.Alias))
def alias_show(
    tenant: str,
    adapter: str,
    alias: str,
    parts: Parts,
    response: Response,
    principal: Principal = _READERS,
) -> dict[str, Any]:
    """Where an alias points; the generation is its ETag."""
    shown = aliases.alias_show(parts, principal, tenant, adapter, alias)
    response.headers["ETag"] = f'"{shown["generation"]}"'
    return shown


@router.put("/tenants/{tenant}/adapters/{adapter}/aliases/{alias}", **answers(wire.Alias))
def alias_set(
    tenant: str,
    adapter: str,
    alias: str,
    body: bodies.AliasBody,
    parts: Parts,
    request: Request,
    response: Response,
    principal: Principal = allow(Role.OPERATOR),
) -> dict[str, Any]:
    """Point an alias at an approved artifact, by compare-and-swap (If-Match: generation)."""
    shown = aliases.alias_set(
        parts,
        principal,
        tenant,
        adapter,
        alias,
        digest=digest_parse(body.adapter_digest, "adapterDigest"),
        generation=_generation(request),
        reason=body.reason,
    )
    response.headers["ETag"] = f'"{shown["generation"]}"'
    return shown


@router.get(
    "/tenants/{tenant}/adapters/{adapter}/aliases/{alias}/history",
    **answers(wire.Page[wire.AliasMove]),
)
def alias_history(
    tenant: str,
    adapter: str,
    alias: str,
    parts: Parts,
    principal: Principal = _READERS,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Every move of an alias, newest first."""
    return aliases.alias_history(
        parts, principal, tenant, adapter, alias, cursor=cursor, limit=limit
    )


@router.get("/tenants/{tenant}/adapters/{adapter}/grants/{subject:path}", **answers(wire.Grant))
def grant_show(
    tenant: str, adapter: str, subject: str, parts: Parts, principal: Principal = _READERS
) -> dict[str, Any]:
    """A subject's grant to run an adapter."""
    return aliases.grant_show(parts, principal, tenant, adapter, subject)


@router.put("/tenants/{tenant}/adapters/{adapter}/grants/{subject:path}", **answers(wire.Grant))
def grant_set(
    tenant: str, adapter: str, subject: str, parts: Parts, principal: Principal = _OPERATOR
) -> dict[str, Any]:
    """Let a subject run an adapter."""
    return aliases.grant_set(parts, principal, tenant, adapter, subject, active=True)


@router.delete("/tenants/{tenant}/adapters/{adapter}/grants/{subject:path}", **answers(wire.Grant))
def grant_withdraw(
    tenant: str, adapter: str, subject: str, parts: Parts, principal: Principal = _OPERATOR
) -> dict[str, Any]:
    """Withdraw a grant; contexts of its older epoch end."""
    return aliases.grant_set(parts, principal, tenant, adapter, subject, active=False)


@router.post("/routing-contexts", status_code=201, **answers(wire.MintedContext, 201))
def routing_context_mint(
    body: bodies.RoutingBody, parts: Parts, principal: Principal = allow(Role.GATEWAY)
) -> dict[str, Any]:
    """A short-lived signed statement of who a request is and which digest it runs."""
    return routing.routing_context_mint(
        parts,
        principal,
        tenant=body.tenant,
        adapter=body.adapter,
        reference=body.reference,
        node=body.node,
        body_digest=digest_parse(body.body_digest, "bodyDigest"),
        session_id=body.session_id,
        subject=body.subject,
    )


@router.post("/jobs/claim", **answers(wire.Job))
def job_claim(
    body: bodies.ClaimBody, parts: Parts, principal: Principal = _VALIDATOR
) -> Response | dict[str, Any]:
    """Take the oldest fitting job, or 204."""
    job = jobs.job_claim(parts, principal, kinds=body.kinds, bases=body.base_model_digests)
    return Response(status_code=204) if job is None else job


@router.post("/jobs/{job_id}/heartbeat", status_code=204)
def job_heartbeat(
    job_id: UUID, body: bodies.LeaseBody, parts: Parts, principal: Principal = _VALIDATOR
) -> None:
    """Renew a job's lease."""
    jobs.job_heartbeat(parts, principal, job_id, body.lease)


@router.post("/jobs/{job_id}/result", status_code=204)
def job_result(
    job_id: UUID, body: bodies.ResultBody, parts: Parts, principal: Principal = _VALIDATOR
) -> None:
    """A job came to its end, or had a fault of ours."""
    if body.outcome == "fault":
        jobs.job_fault(parts, principal, job_id, body.lease, body.reason or "no reason given")
    elif body.report is not None and body.catalog is None:
        report = body.report.model_dump(by_alias=True)
        jobs.job_report(parts, principal, job_id, body.lease, report)
    elif body.catalog is not None and body.report is None:
        jobs.job_catalog(parts, principal, job_id, body.lease, body.catalog)
    else:
        raise MalformedError("result: expected either a report or a catalog")


@router.get("/jobs", **answers(wire.Page[wire.JobState]))
def job_list(
    parts: Parts,
    principal: Principal = _OPERATOR,
    state: str | None = None,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Jobs, newest first."""
    principal.tenant_check(PLATFORM)
    return jobs.job_list(parts, state=state, cursor=cursor, limit=limit)


@router.put("/nodes/{node}", **answers(wire.Node))
def node_register(
    node: str, body: bodies.NodeBody, parts: Parts, principal: Principal = _NODE
) -> dict[str, Any]:
    """Register a serving node, bound to one base."""
    return nodes.node_register(
        parts,
        principal,
        node,
        base_digest=digest_parse(body.base_model_digest, "baseModelDigest"),
        url=body.url,
        catalog_digest=digest_parse(body.catalog_digest, "catalogDigest"),
    )


@router.post("/nodes/{node}/heartbeat", **answers(wire.Renewal))
def node_heartbeat(
    node: str, body: bodies.HeartbeatBody, parts: Parts, principal: Principal = _NODE
) -> dict[str, Any]:
    """Renew a node's lease; the answer holds what it still has to let go of."""
    residents = [item.model_dump(by_alias=True, mode="json") for item in body.residents]
    return nodes.node_heartbeat(
        parts, principal, node, feed_index=body.feed_index, residents=residents
    )


@router.post("/nodes/{node}/placements", **answers(wire.Placement))
def placement_take(
    node: str, body: bodies.PlacementBody, parts: Parts, principal: Principal = _NODE
) -> dict[str, Any]:
    """Let a node hold an adapter, unless as many others as it declares do already."""
    digest = digest_parse(body.adapter_digest, "adapterDigest")
    return placements.placement_take(parts, principal, node, body.tenant, digest)


@router.delete("/nodes/{node}/placements/{tenant}/{digest}", status_code=204)
def placement_release(
    node: str, tenant: str, digest: str, parts: Parts, principal: Principal = _NODE
) -> None:
    """A node does not hold an adapter any more."""
    placements.placement_release(parts, principal, node, tenant, digest_parse(digest))


@router.post("/nodes/{node}/usage", status_code=204)
def usage_report(
    node: str, body: bodies.UsageBody, parts: Parts, principal: Principal = _NODE
) -> None:
    """The totals of a node's run: what tenants used there since it started."""
    items = [item.model_dump(by_alias=True, mode="json") for item in body.items]
    usage.usage_report(parts, principal, node, run=body.run, items=items)


@router.get("/tenants/{tenant}/usage", **answers(wire.Page[wire.Usage]))
def usage_list(
    tenant: str,
    parts: Parts,
    principal: Principal = _READERS,
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """What a tenant used on all nodes, by adapter and base."""
    return usage.usage_list(parts, principal, tenant, cursor=cursor, limit=limit)


@router.post("/nodes/{node}/acknowledgements", status_code=204)
def node_acknowledge(
    node: str, body: bodies.AcknowledgementBody, parts: Parts, principal: Principal = _NODE
) -> None:
    """A node let go of a revoked artifact."""
    revocations.revocation_acknowledge(
        parts,
        principal,
        node,
        tenant_id=body.tenant_id,
        digest=digest_parse(body.adapter_digest, "adapterDigest"),
        freed_bytes=body.freed_bytes,
        purged_blocks=body.purged_blocks,
    )


@router.get("/nodes", **answers(wire.Page[wire.Node]))
def node_list(
    parts: Parts,
    principal: Principal = allow(Role.OPERATOR, Role.ADMIN, Role.AUDITOR, Role.GATEWAY),
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """Serving nodes by name."""
    principal.tenant_check(PLATFORM)
    return nodes.node_list(parts, cursor=cursor, limit=limit)


@router.get("/nodes/{node}", **answers(wire.Node))
def node_show(
    node: str,
    parts: Parts,
    principal: Principal = allow(Role.OPERATOR, Role.ADMIN, Role.AUDITOR, Role.NODE),
) -> dict[str, Any]:
    """One serving node."""
    principal.tenant_check(PLATFORM)
    return nodes.node_show(parts, node)


@router.get("/feed", **answers(wire.Feed))
async def feed(
    parts: Parts,
    principal: Principal = allow(Role.NODE, Role.OPERATOR, Role.AUDITOR),
    after: int = 0,
    wait: float = 0,
) -> dict[str, Any]:
    """Numbered events after an index; with ``wait``, held back until there is one."""
    principal.tenant_check(PLATFORM)
    if not 0 <= wait <= limits.FEED_WAIT_SECONDS:
        raise MalformedError(f"wait: expected 0 to {limits.FEED_WAIT_SECONDS} seconds")
    until = time.monotonic() + wait
    while True:
        page = await anyio.to_thread.run_sync(lambda: nodes.feed_page(parts, after=after))
        if page["items"] or page["next"] < after or time.monotonic() >= until:
            return page
        await anyio.sleep(_FEED_POLL_SECONDS)


@router.get("/revocation-list")
def revocation_list(
    request: Request,
    parts: Parts,
    principal: Principal = allow(Role.NODE, Role.OPERATOR, Role.AUDITOR, Role.ADMIN),
) -> Response:
    """The signed revocation list as it stands (DSSE); its number is its ETag."""
    principal.tenant_check(PLATFORM)
    given = revocation_lists.revocation_list_give(parts, principal)
    headers = {"ETag": f'"{given.number}"', "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(given.envelope, media_type=MEDIA_TYPE, headers=headers)


@router.get("/audit", **answers(wire.Page[wire.FeedEvent]))
def audit_list(
    parts: Parts,
    principal: Principal = _READERS,
    tenant: str | None = None,
    subject: str = "",
    cursor: str | None = None,
    limit: int = _LIMIT,
) -> dict[str, Any]:
    """The audit trail, oldest first."""
    return nodes.audit_list(
        parts, principal, tenant=tenant, subject=subject, cursor=cursor, limit=limit
    )


def _generation(request: Request) -> int:
    if request.headers.get("if-none-match") == "*":
        return 0
    value = request.headers.get("if-match")
    if value is None:
        raise PreconditionRequiredError(
            'expected If-Match: "<generation>" (or "0" for a new alias), got none'
        )
    digits = value.strip('"')
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 18):
        raise MalformedError('If-Match: expected "<generation>"')
    return int(digits)
