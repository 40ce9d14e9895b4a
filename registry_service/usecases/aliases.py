"""Aliases move by compare-and-swap; grants say who may run an adapter."""

from __future__ import annotations

from typing import Any

from registry_service.domain.digests import Digest
from registry_service.domain.errors import ConflictError, NotFoundError, RefusedError
from registry_service.domain.lifecycle import State
from registry_service.domain.names import adapter_name, reason_text, subject_name, tag_name
from registry_service.domain.roles import Principal
from registry_service.store import tags as store
from registry_service.store.artifacts import artifact_get
from registry_service.store.events import event_append
from registry_service.usecases.context import Context, Scope, tenant_scope
from registry_service.usecases.paging import cursor_decode, limit_check, number_decode, page

_NEWEST = 2**62


class StaleGenerationError(ConflictError):
    """The alias moved since the caller read it."""

    code = "STALE_GENERATION"
    http_status = 412


def alias_set(
    context: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    alias: str,
    *,
    digest: Digest,
    generation: int,
    reason: str,
) -> dict[str, Any]:
    """Point an alias at an approved artifact, when it still stands at ``generation`` (0: is new).

    Raises:
        StaleGenerationError: it moved meanwhile. ConflictError: a label has this name.
        RefusedError: the artifact is not approved. NotFoundError: no such artifact.
    """
    adapter, alias, reason = adapter_name(adapter), tag_name(alias), reason_text(reason)
    now = context.clock.now()
    with tenant_scope(context, principal, tenant, active=True) as scope:
        # The artifact's row lock comes first, as in a revocation: neither overtakes the other.
        artifact = artifact_get(scope.session, scope.tenant.id, digest, lock=True)
        if artifact.adapter != adapter:
            raise NotFoundError("not found")
        if artifact.state is not State.APPROVED:
            raise RefusedError(f"expected an APPROVED artifact, got one that is {artifact.state}")
        current = store.tag_find(scope.session, scope.tenant.id, adapter, alias, lock=True)
        _generation_check(alias, current, generation)
        tag = store.TagRow(
            adapter=adapter,
            name=alias,
            kind="alias",
            artifact_digest=artifact.digest,
            base_digest=artifact.base_digest,
            generation=generation + 1,
            actor=principal.subject,
            updated_at=now,
        )
        _write(scope, tag, current, reason)
    return _wire(tag)


def alias_show(
    context: Context, principal: Principal, tenant: str, adapter: str, alias: str
) -> dict[str, Any]:
    """Where an alias points.

    Raises:
        NotFoundError: no such alias for this caller.
    """
    with tenant_scope(context, principal, tenant) as scope:
        tag = store.tag_find(scope.session, scope.tenant.id, adapter, alias)
    if tag is None or tag.kind != "alias":
        raise NotFoundError("not found")
    return _wire(tag)


def alias_list(
    context: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    *,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """Aliases of an adapter by name."""
    after = cursor_decode(cursor, 1)
    with tenant_scope(context, principal, tenant) as scope:
        rows = store.alias_page(
            scope.session,
            scope.tenant.id,
            adapter,
            after=after[0] if after else "",
            limit=limit_check(limit) + 1,
        )
    return page(rows, limit, wire=_wire, key=lambda row: (row.name,))


def alias_history(
    context: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    alias: str,
    *,
    cursor: str | None,
    limit: int,
) -> dict[str, Any]:
    """Every move of an alias, newest first: what was in production when."""
    before = number_decode(cursor)
    with tenant_scope(context, principal, tenant) as scope:
        rows = store.alias_history(
            scope.session,
            scope.tenant.id,
            adapter,
            alias,
            before=_NEWEST if before is None else before,
            limit=limit_check(limit) + 1,
        )
    return page(rows, limit, wire=dict, key=lambda row: (str(row["generation"]),))


def grant_set(
    context: Context, principal: Principal, tenant: str, adapter: str, subject: str, *, active: bool
) -> dict[str, Any]:
    """Let a subject run an adapter, or withdraw it (which ends contexts of an older epoch).

    Raises:
        NotFoundError: no such adapter, or nothing to withdraw.
    """
    subject = subject_name(subject)
    now = context.clock.now()
    with tenant_scope(context, principal, tenant) as scope:
        grant = store.grant_set(
            scope.session, scope.tenant.id, adapter, subject, active=active, at=now
        )
        event_append(
            scope.session,
            tenant_id=scope.tenant.id,
            kind="grant.set" if active else "grant.withdrawn",
            subject=subject,
            actor=principal.subject,
            at=now,
            body={"adapter": adapter, "epoch": grant["epoch"]},
        )
    return grant


def grant_show(
    context: Context, principal: Principal, tenant: str, adapter: str, subject: str
) -> dict[str, Any]:
    """A subject's grant.

    Raises:
        NotFoundError: none.
    """
    with tenant_scope(context, principal, tenant) as scope:
        grant = store.grant_find(scope.session, scope.tenant.id, adapter, subject)
    if grant is None:
        raise NotFoundError("not found")
    return grant


def _generation_check(alias: str, current: store.TagRow | None, generation: int) -> None:
    if current is not None and current.kind == "label":
        raise ConflictError(f"'{alias}' is a version label, and labels never move")
    actual = 0 if current is None else current.generation
    if actual != generation:
        raise StaleGenerationError(
            f"alias '{alias}': expected generation {actual}, got {generation}; "
            "read it again and decide anew"
        )


def _write(scope: Scope, tag: store.TagRow, current: store.TagRow | None, reason: str) -> None:
    previous = None if current is None else current.artifact_digest
    if current is None:
        store.tag_insert(scope.session, scope.tenant.id, tag)
    else:
        store.alias_update(scope.session, scope.tenant.id, tag)
    event = event_append(
        scope.session,
        tenant_id=scope.tenant.id,
        kind="alias.set",
        subject=tag.artifact_digest,
        actor=tag.actor,
        at=tag.updated_at,
        body={
            "adapter": tag.adapter,
            "alias": tag.name,
            "generation": tag.generation,
            "previous": previous,
            "reason": reason,
        },
    )
    store.alias_move_insert(
        scope.session, scope.tenant.id, tag, previous=previous, reason=reason, event=event
    )


def _wire(tag: store.TagRow) -> dict[str, Any]:
    return {
        "alias": tag.name,
        "generation": tag.generation,
        "adapterDigest": tag.artifact_digest,
        "baseModelDigest": tag.base_digest,
        "updatedAt": tag.updated_at,
        "actor": tag.actor,
    }
