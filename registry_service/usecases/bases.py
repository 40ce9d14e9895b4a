"""Base models: registration, catalogs made by workers, grants to tenants.

A base is usable once two different workers made byte-for-byte the same catalog of it, since a
wrong catalog would void the structure check of every adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.base_model import (
    chat_template_digest,
    chat_template_of,
    is_tokenizer_file,
    quantization_of,
    tokenizer_digest,
)
from registry_service.domain.catalog import Catalog, catalog_parse
from registry_service.domain.digests import Digest, digest_equal, digest_of
from registry_service.domain.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    RefusedError,
)
from registry_service.domain.manifest import Manifest, manifest_parse
from registry_service.domain.names import base_name, reason_text, tenant_name
from registry_service.domain.roles import PLATFORM, Principal
from registry_service.store import bases as store
from registry_service.store.events import event_append
from registry_service.store.jobs import job_insert, jobs_open
from registry_service.store.tenants import tenant_get
from registry_service.trust.dsse import IN_TOTO, dsse_sign
from registry_service.trust.verdict import BaseClaims, base_statement
from registry_service.usecases.context import (
    Context,
    principal_reading,
    reading,
    tenant_transaction,
)
from registry_service.usecases.paging import cursor_decode, limit_check, page

CATALOG_MAKERS: Final = 2


def base_add(
    context: Context,
    actor: str,
    *,
    name: str,
    manifest: bytes,
    files: Mapping[str, bytes],
    headers: Mapping[str, bytes],
) -> dict[str, Any]:
    """Register a base by its manifest, small files and safetensors headers; safe to repeat.

    Raises:
        MalformedError, RefusedError: manifest and files do not belong together.
        ConflictError: the name or digest is taken.
    """
    name = base_name(name)
    parsed = manifest_parse(manifest)
    _base_files_check(parsed, files, headers)
    tokenizer = {p: digest_of(data) for p, data in files.items() if is_tokenizer_file(p)}
    now = context.clock.now()
    row = store.BaseRow(
        digest=parsed.digest,
        name=name,
        manifest=manifest,
        tokenizer_digest=tokenizer_digest(tokenizer),
        chat_template_digest=chat_template_digest(chat_template_of(files)),
        quantization=quantization_of(files["config.json"]),
        state="PENDING",
        catalog_digest=None,
        statement=None,
        created_at=now,
        created_by=actor,
    )
    kept = tuple(
        store.BaseFile(path, kind, digest_of(data), data)
        for kind, group in (("file", files), ("header", headers))
        for path, data in group.items()
    )
    with tenant_transaction(context, PLATFORM) as session:
        if store.base_insert(session, row, kept):
            _event(session, "base.added", parsed.digest, actor, now, {"name": name})
        # Also when it was there: its catalog job may have died meanwhile.
        if store.base_get(session, parsed.digest).state == "PENDING":
            _catalog_queue(session, parsed.digest, now)
    return base_show(context, None, parsed.digest)


def base_show(context: Context, principal: Principal | None, reference: str) -> dict[str, Any]:
    """One base; a tenant sees those granted to it.

    Raises:
        NotFoundError: no such base, or not granted.
    """
    with reading(context) as session:
        base = store.base_get(session, reference)
        if (
            principal is not None
            and not principal.is_platform
            and not store.base_granted(session, principal.tenant_id, base.digest)
        ):
            raise NotFoundError("not found")
        return _wire(session, base, full=principal is None or principal.is_platform)


def base_list(
    context: Context, principal: Principal, *, cursor: str | None, limit: int
) -> dict[str, Any]:
    """Bases by name, for a tenant those granted to it."""
    after = cursor_decode(cursor, 1)
    with principal_reading(context, principal) as (session, tenant_id):
        rows = store.base_page(
            session,
            after=after[0] if after else "",
            limit=limit_check(limit) + 1,
            tenant_id=tenant_id,
        )
        return page(
            rows,
            limit,
            wire=lambda row: _wire(session, row, full=tenant_id is None),
            key=lambda row: (row.name,),
        )


def base_catalog(context: Context, principal: Principal, reference: str) -> bytes:
    """The admitted catalog of a usable base.

    Raises:
        NotFoundError: no such base, or not usable yet.
    """
    base_show(context, principal, reference)
    with reading(context) as session:
        base = store.base_get(session, reference)
        if base.catalog_digest is None:
            raise NotFoundError("the base has no agreed catalog yet")
        return store.catalog_get(session, base.digest, base.catalog_digest)


def base_statement_show(context: Context, principal: Principal, reference: str) -> bytes:
    """The signed statement that admitted a base.

    Raises:
        NotFoundError: no such base, or not usable yet.
    """
    base_show(context, principal, reference)
    with reading(context) as session:
        statement = store.base_get(session, reference).statement
    if statement is None:
        raise NotFoundError("the base is not admitted yet")
    return statement


def base_file(context: Context, principal: Principal, reference: str, path: str) -> bytes:
    """A kept file of a base (``config.json``, tokenizer files).

    Raises:
        NotFoundError: no such base or file.
    """
    shown = base_show(context, principal, reference)
    with reading(context) as session:
        file = store.base_file_get(session, shown["baseModelDigest"], path)
    if file.kind != "file":
        raise NotFoundError("not found")
    return file.content


def base_grant(context: Context, actor: str, reference: str, tenant: str) -> dict[str, Any]:
    """Let a tenant see and use a base; safe to repeat.

    Raises:
        NotFoundError: no such base or tenant.
    """
    now = context.clock.now()
    with reading(context) as session:
        row = tenant_get(session, tenant_name(tenant))
        base = store.base_get(session, reference)
    with tenant_transaction(context, row.id) as session:
        if store.base_grant_insert(
            session, tenant_id=row.id, digest=base.digest, actor=actor, at=now
        ):
            event_append(
                session,
                tenant_id=row.id,
                kind="base.granted",
                subject=base.digest,
                actor=actor,
                at=now,
                body={"name": base.name},
            )
    return base_show(context, None, base.digest)


def catalog_submit(context: Context, worker: str, reference: str, content: bytes) -> dict[str, Any]:
    """Take a worker's catalog; admit the base when two workers agree, block it when they differ.

    Once the base is admitted, a worker with another catalog is refused and the base stays as it is.

    Raises:
        MalformedError: not a catalog in canonical form, or of another base.
        RefusedError: not the admitted catalog. NotFoundError: no such base.
    """
    catalog = catalog_parse(content)
    digest = _catalog_check(catalog, content)
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        base = store.base_get(session, reference, lock=True)
        if not digest_equal(catalog.base_digest, base.digest):
            raise MalformedError(
                f"catalog: expected one of base {base.digest}, got {catalog.base_digest}"
            )
        if base.catalog_digest is not None and not digest_equal(base.catalog_digest, digest):
            raise RefusedError(
                f"expected the admitted catalog {base.catalog_digest}, got {digest} made with "
                f"transformers {catalog.transformers_version}; use the version that made the other"
            )
        if store.catalog_insert(
            session, base.digest, worker=worker, catalog_digest=digest, content=content, at=now
        ):
            _event(session, "base.catalogued", base.digest, worker, now, {"catalogDigest": digest})
            _admit(context, session, base, worker, now)
    return base_show(context, None, base.digest)


def catalog_drop(
    context: Context, actor: str, reference: str, worker: str, reason: str
) -> dict[str, Any]:
    """Drop a worker's catalog of a base that is not admitted, and look again at what is left.

    Raises:
        NotFoundError: no such base, or no catalog of this worker. ConflictError: it is admitted.
    """
    reason = reason_text(reason)
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        base = store.base_get(session, reference, lock=True)
        if base.state == "USABLE":
            raise ConflictError("the base is admitted with its catalog; there is nothing to settle")
        store.catalog_delete(session, base.digest, worker)
        details = {"worker": worker, "reason": reason}
        _event(session, "base.catalog_dropped", base.digest, actor, now, details)
        _admit(context, session, base, actor, now)
        if not store.catalog_makers(session, base.digest):
            _catalog_queue(session, base.digest, now)
    return base_show(context, None, base.digest)


def _admit(
    context: Context, session: Session, base: store.BaseRow, actor: str, now: datetime
) -> None:
    """Settle the state of a base that is not admitted by the catalogs there are of it."""
    makers = store.catalog_makers(session, base.digest)
    digests = {maker["catalogDigest"] for maker in makers}
    state, statement, catalog_digest = "PENDING", None, None
    if len(digests) > 1:
        state = "CONFLICTED"
    elif len(makers) >= CATALOG_MAKERS:
        state, catalog_digest = "USABLE", Digest(digests.pop())
        statement = _statement(context, base, catalog_digest, now)
    if base.state == state:
        return
    store.base_admit(
        session, base.digest, state=state, catalog_digest=catalog_digest, statement=statement
    )
    events = {"USABLE": "base.admitted", "CONFLICTED": "base.conflicted", "PENDING": "base.pending"}
    _event(session, events[state], base.digest, actor, now, {"catalogDigest": catalog_digest})


def _statement(
    context: Context, base: store.BaseRow, catalog_digest: Digest, now: datetime
) -> bytes:
    claims = BaseClaims(
        base_digest=base.digest,
        name=base.name,
        catalog_digest=catalog_digest,
        policy_digest=context.policy.digest,
        issued_at=now,
        not_after=now + timedelta(seconds=limits.BASE_STATEMENT_SECONDS),
        verifier_id=context.verifier_id,
    )
    signer = context.verdict_signer
    return dsse_sign(IN_TOTO, base_statement(claims), signer.sign, signer.key_id)


def _catalog_check(catalog: Catalog, content: bytes) -> Digest:
    if catalog.to_bytes() != content:
        raise MalformedError("catalog: expected RFC 8785 JSON; write it with 'base catalog'")
    return digest_of(content)


def _base_files_check(
    manifest: Manifest, files: Mapping[str, bytes], headers: Mapping[str, bytes]
) -> None:
    if "config.json" not in files:
        raise MalformedError("base: expected config.json among its files")
    listed = {entry.path: entry for entry in manifest.files}
    config = listed.get("config.json")
    if config is None or not digest_equal(config.digest, digest_of(files["config.json"])):
        raise RefusedError("config.json: its bytes are not those that the manifest names")
    weights = {path for path in listed if path.endswith(".safetensors")}
    if not weights or weights != set(headers):
        raise RefusedError("headers: expected one for each weight file of the manifest")
    for path, data in files.items():
        if path != "config.json" and not is_tokenizer_file(path):
            raise RefusedError("files: expected config.json and tokenizer files only")
        if len(data) > limits.TOKENIZER_FILE_BYTES:
            raise RefusedError("files: a tokenizer file is over its size limit")


def _event(
    session: Session, kind: str, subject: str, actor: str, at: datetime, body: dict[str, Any]
) -> None:
    event_append(
        session, tenant_id=PLATFORM, kind=kind, subject=subject, actor=actor, at=at, body=body
    )


def _catalog_queue(session: Session, base_digest: str, at: datetime) -> None:
    if not jobs_open(session, PLATFORM, base_digest):
        job_insert(
            session,
            tenant_id=PLATFORM,
            kind="catalog",
            subject=base_digest,
            adapter="",
            base_digest=base_digest,
            at=at,
        )


def _wire(session: Session, base: store.BaseRow, *, full: bool) -> dict[str, Any]:
    manifest = manifest_parse(base.manifest)
    return {
        "name": base.name,
        "baseModelDigest": base.digest,
        "state": base.state,
        "catalogDigest": base.catalog_digest,
        "tokenizerDigest": base.tokenizer_digest,
        "chatTemplateDigest": base.chat_template_digest,
        "quantization": base.quantization,
        "files": [
            {"path": file.path, "digest": file.digest, "size": file.size} for file in manifest.files
        ],
        "catalogs": store.catalog_makers(session, base.digest),
        "createdAt": base.created_at,
        "grants": store.base_grants(session, base.digest) if full else [],
    }
