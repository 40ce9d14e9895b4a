"""Base models: registration, what they are, grants to tenants.

A base is usable once it is admitted with a catalog; ``catalogs`` tells how.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.base_model import (
    base_config_parse,
    base_json_check,
    chat_template_digest,
    chat_template_of,
    is_tokenizer_file,
    may_ask_for_code,
    tokenizer_digest,
)
from registry_service.domain.digests import digest_equal, digest_of
from registry_service.domain.errors import MalformedError, NotFoundError, RefusedError
from registry_service.domain.manifest import Manifest, manifest_parse
from registry_service.domain.names import base_name, tenant_name
from registry_service.domain.quantization import quantization_of
from registry_service.domain.roles import PLATFORM, Principal
from registry_service.store import bases as store
from registry_service.store import catalogs as catalog_store
from registry_service.store.events import event_append
from registry_service.store.tenants import tenant_get
from registry_service.usecases.catalogs import catalog_work, recatalog_state
from registry_service.usecases.context import (
    Context,
    principal_reading,
    reading,
    tenant_transaction,
)
from registry_service.usecases.paging import cursor_decode, limit_check, page


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
        quantization=quantization_of(base_config_parse(files["config.json"])),
        state="PENDING",
        catalog_digest=None,
        statement=None,
        round=1,
        remaking=False,
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
        catalog_work(session, store.base_get(session, parsed.digest, lock=True), now)
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
        return catalog_store.catalog_get(session, base.digest, base.catalog_digest)


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
        if may_ask_for_code(path):
            base_json_check(path, data)


def _event(
    session: Session, kind: str, subject: str, actor: str, at: datetime, body: dict[str, Any]
) -> None:
    event_append(
        session, tenant_id=PLATFORM, kind=kind, subject=subject, actor=actor, at=at, body=body
    )


def _wire(session: Session, base: store.BaseRow, *, full: bool) -> dict[str, Any]:
    manifest = manifest_parse(base.manifest)
    admitted = catalog_store.admitted_makers(session, base)
    collected = [
        made
        for made in catalog_store.round_makers(session, base)
        if made.catalog_digest != base.catalog_digest
    ]
    return {
        "name": base.name,
        "baseModelDigest": base.digest,
        "state": base.state,
        "catalogDigest": base.catalog_digest,
        "modelClass": admitted[0].model_class if admitted else None,
        "transformersVersion": admitted[0].transformers_version if admitted else None,
        "recatalog": recatalog_state(session, base),
        "tokenizerDigest": base.tokenizer_digest,
        "chatTemplateDigest": base.chat_template_digest,
        "quantization": base.quantization,
        "files": [
            {"path": file.path, "digest": file.digest, "size": file.size} for file in manifest.files
        ],
        "catalogs": [
            {
                "worker": made.worker,
                "catalogDigest": made.catalog_digest,
                "modelClass": made.model_class,
                "transformersVersion": made.transformers_version,
                "at": made.created_at,
            }
            for made in (*admitted, *collected)
        ],
        "createdAt": base.created_at,
        "grants": store.base_grants(session, base.digest) if full else [],
    }
