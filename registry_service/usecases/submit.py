"""A manifest is put: the artifact is submitted, or recognised as already there."""

from __future__ import annotations

import json

from registry_service.domain import limits
from registry_service.domain.declaration import Declaration, declaration_parse
from registry_service.domain.digests import Digest, digest_equal
from registry_service.domain.errors import (
    ConflictError,
    MalformedError,
    NotFoundError,
    RefusedError,
)
from registry_service.domain.lifecycle import WITHDRAWN_STATES, Event, State
from registry_service.domain.manifest import (
    CONFIG_MEDIA_TYPE,
    FileEntry,
    Manifest,
    manifest_config_check,
    manifest_parse,
)
from registry_service.domain.names import adapter_name, tag_name
from registry_service.domain.roles import Principal
from registry_service.store.artifacts import (
    artifact_advance,
    artifact_get,
    artifact_insert,
)
from registry_service.store.blobs import blob_sizes_locked
from registry_service.store.events import event_append
from registry_service.store.jobs import artifact_job_insert
from registry_service.store.tags import TagRow, adapter_ensure, tag_find, tag_insert
from registry_service.usecases.context import Context, Scope, tenant_scope

_DECLARATION_PATH = "adapter-declaration.json"
_UNLABELLED = WITHDRAWN_STATES | {State.REJECTED}


class BlobUnknownError(NotFoundError):
    """A manifest that names a blob which was not uploaded to this tenant."""

    code = "BLOB_UNKNOWN"


def artifact_submit(
    context: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    content: bytes,
    *,
    label: str | None = None,
    digest: Digest | None = None,
) -> Digest:
    """Submit the artifact of a manifest and, with ``label``, name it. Safe to repeat.

    Raises:
        MalformedError: the manifest or the declaration cannot be read, or ``digest`` differs.
        RefusedError: the declaration names another tenant or adapter; a statement was put.
        BlobUnknownError: a file was not uploaded. ConflictError: the label names another artifact.
    """
    adapter = adapter_name(adapter)
    label = None if label is None else tag_name(label)
    manifest = manifest_parse(content)
    if digest is not None and not digest_equal(manifest.digest, digest):
        raise MalformedError(f"manifest: expected digest {digest}, got {manifest.digest}")
    if manifest.subject:
        raise RefusedError("statements (manifests with a subject) are not taken here")
    with tenant_scope(context, principal, tenant, active=True) as scope:
        _blobs_check(context, scope, manifest)
        config = context.blobs.read(
            scope.tenant.id, manifest.config_digest, limit=limits.CONFIG_BYTES
        )
        if manifest_config_check(config, manifest) != adapter:
            raise RefusedError(f"config blob: expected the name of adapter {adapter}, got another")
        declaration = _declaration(context, scope, manifest)
        if (declaration.tenant, declaration.adapter) != (tenant, adapter):
            raise RefusedError(
                f"declaration: expected tenant and adapter of the repository {tenant}/{adapter}, "
                f"got {declaration.tenant}/{declaration.adapter}"
            )
        _submit(context, scope, principal, manifest, content, declaration)
        if label is not None:
            state = artifact_get(scope.session, scope.tenant.id, manifest.digest).state
            if state in _UNLABELLED:
                raise RefusedError(f"the artifact is {state}; a label would name nothing to run")
            _label_set(context, scope, principal, adapter, label, manifest.digest, declaration)
    return manifest.digest


def _submit(
    context: Context,
    scope: Scope,
    principal: Principal,
    manifest: Manifest,
    content: bytes,
    declaration: Declaration,
) -> None:
    now = context.clock.now()
    session, tenant_id = scope.session, scope.tenant.id
    adapter_ensure(session, tenant_id, declaration.adapter, now)
    if not artifact_insert(
        session,
        tenant_id=tenant_id,
        digest=manifest.digest,
        adapter=declaration.adapter,
        base_digest=Digest(declaration.base_model_digest),
        manifest=content,
        declaration=json.loads(declaration.to_bytes()),
        publisher=principal.subject,
        files=manifest.files,
        config=FileEntry("", manifest.config_digest, manifest.config_size, CONFIG_MEDIA_TYPE),
        at=now,
    ):
        return
    artifact = artifact_get(session, tenant_id, manifest.digest, lock=True)
    artifact_advance(session, artifact, Event.SUBMITTED, actor=principal.subject, reason="", at=now)
    artifact_job_insert(session, artifact, "scan", now)


def _blobs_check(context: Context, scope: Scope, manifest: Manifest) -> None:
    wanted = {file.digest: file.size for file in manifest.files}
    wanted[manifest.config_digest] = manifest.config_size
    sizes = blob_sizes_locked(scope.session, scope.tenant.id, sorted(wanted), context.clock.now())
    for blob, size in wanted.items():
        if blob not in sizes:
            raise BlobUnknownError(f"blob {blob} was not uploaded; push it before the manifest")
        if sizes[blob] != size:
            raise MalformedError(
                f"manifest: blob {blob} has {sizes[blob]} bytes, the manifest says {size}"
            )


def _declaration(context: Context, scope: Scope, manifest: Manifest) -> Declaration:
    for file in manifest.files:
        if file.path == _DECLARATION_PATH:
            return declaration_parse(
                context.blobs.read(scope.tenant.id, file.digest, limit=limits.DECLARATION_BYTES)
            )
    raise MalformedError(f"manifest: expected a layer {_DECLARATION_PATH}, got none")


def _label_set(
    context: Context,
    scope: Scope,
    principal: Principal,
    adapter: str,
    label: str,
    digest: Digest,
    declaration: Declaration,
) -> None:
    session, tenant_id = scope.session, scope.tenant.id
    found = tag_find(session, tenant_id, adapter, label)
    if found is not None:
        if found.kind == "label" and found.artifact_digest == digest:
            return
        raise ConflictError(
            f"'{label}' is {'an alias' if found.kind == 'alias' else 'a label'} of "
            f"{found.artifact_digest}; labels never move, choose another"
        )
    now = context.clock.now()
    tag_insert(
        session,
        tenant_id,
        TagRow(
            adapter=adapter,
            name=label,
            kind="label",
            artifact_digest=digest,
            base_digest=Digest(declaration.base_model_digest),
            generation=1,
            actor=principal.subject,
            updated_at=now,
        ),
    )
    event_append(
        session,
        tenant_id=tenant_id,
        kind="label.set",
        subject=digest,
        actor=principal.subject,
        at=now,
        body={"adapter": adapter, "label": label},
    )
