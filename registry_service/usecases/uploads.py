"""Uploads and blobs of one tenant: sessions, quota, bytes first and rows after.

The bytes go to the blob store while they arrive; the row follows in a short transaction. What is
left when the service dies between the two is a staged file or a blob without a row: the sweeper
removes both, and repeating the request is safe.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID, uuid4

from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    ConflictError,
    NotFoundError,
    QuotaExceededError,
    TooLargeError,
)
from registry_service.domain.names import adapter_name
from registry_service.domain.roles import Principal
from registry_service.store import blobs as store
from registry_service.store.tags import adapter_ensure
from registry_service.store.tenants import bytes_reserve, bytes_settle
from registry_service.usecases.context import Context, tenant_scope, tenant_transaction

_HASHERS: Final = 256


class UploadRangeError(ConflictError):
    """A chunk that does not continue where the upload stands."""

    code = "UPLOAD_RANGE"
    http_status = 416


@dataclass
class _Hashers:
    """SHA-256 states of uploads that arrived through this process, so far, by upload.

    Only a shortcut: without an entry the staged file is hashed again when it is committed.
    """

    states: OrderedDict[UUID, tuple[int, Any]] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, upload_id: UUID, offset: int) -> Any | None:
        with self.lock:
            known = self.states.pop(upload_id, None)
        if known is not None and known[0] == offset:
            return known[1]
        return hashlib.sha256() if offset == 0 else None

    def keep(self, upload_id: UUID, offset: int, hasher: Any) -> None:
        with self.lock:
            self.states[upload_id] = (offset, hasher)
            while len(self.states) > _HASHERS:
                self.states.popitem(last=False)


_hashers = _Hashers()


def upload_begin(context: Context, principal: Principal, tenant: str, adapter: str) -> UUID:
    """Open an upload session for an adapter of the caller's tenant."""
    adapter = adapter_name(adapter)
    now = context.clock.now()
    upload_id = uuid4()
    with tenant_scope(context, principal, tenant, active=True) as scope:
        if store.uploads_open(scope.session, scope.tenant.id) >= limits.OPEN_UPLOADS:
            raise QuotaExceededError(
                f"expected at most {limits.OPEN_UPLOADS} open uploads; finish or cancel some"
            )
        adapter_ensure(scope.session, scope.tenant.id, adapter, now)
        store.upload_insert(
            scope.session, tenant_id=scope.tenant.id, upload_id=upload_id, adapter=adapter, at=now
        )
        context.blobs.upload_begin(scope.tenant.id, upload_id)
    return upload_id


@dataclass
class UploadWriter:
    """Takes one request's bytes of an upload: writes, hashes, reserves quota, keeps the limit."""

    context: Context
    upload: store.UploadRow
    staged: Any
    offset: int
    hasher: Any | None

    def write(self, chunk: bytes) -> None:
        """Append a chunk.

        Raises:
            TooLargeError: over the limit of a file.
            QuotaExceededError: over the tenant's quota.
        """
        end = self.offset + len(chunk)
        if end > limits.WEIGHT_BYTES:
            raise TooLargeError(f"expected at most {limits.WEIGHT_BYTES} bytes a file")
        if end > self.upload.reserved_bytes:
            # Bytes of undeclared length: in steps, so that not each chunk asks the database.
            step = end + limits.UPLOAD_RESERVE_STEP_BYTES
            try:
                self.upload = _reserve(self.context, self.upload, step)
            except QuotaExceededError:
                self.upload = _reserve(self.context, self.upload, end)
        self.staged.write(chunk)
        if self.hasher is not None:
            self.hasher.update(chunk)
        self.offset = end


def upload_open(
    context: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    upload_id: UUID,
    *,
    start: int | None,
    length: int | None,
) -> UploadWriter:
    """Begin to take bytes at the upload's end; ``upload_close`` must follow.

    ``start`` is the first byte's offset when the client says it, ``length`` the number of bytes
    that it declares.

    Raises:
        NotFoundError: no such upload. UploadRangeError: not where the upload stands.
        TooLargeError, QuotaExceededError: refused before any byte is taken.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        upload = store.upload_get(scope.session, scope.tenant.id, adapter, upload_id)
    offset = context.blobs.upload_size(upload.tenant_id, upload_id)
    if offset is None:
        raise NotFoundError("no such upload; start a new one")
    if start is not None and start != offset:
        raise UploadRangeError(f"expected the chunk to start at byte {offset}, got {start}")
    if length is not None:
        if offset + length > limits.WEIGHT_BYTES:
            raise TooLargeError(f"expected at most {limits.WEIGHT_BYTES} bytes a file")
        if offset + length > upload.reserved_bytes:
            upload = _reserve(context, upload, offset + length)
    staged = context.blobs.upload_writer(upload.tenant_id, upload_id, offset)
    return UploadWriter(context, upload, staged, offset, _hashers.take(upload_id, offset))


def upload_close(writer: UploadWriter) -> int:
    """End a request's bytes, whether they all came or not; the offset to continue from."""
    writer.staged.close()
    if writer.hasher is not None:
        _hashers.keep(writer.upload.id, writer.offset, writer.hasher)
    return writer.offset


def upload_finish(
    context: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    upload_id: UUID,
    digest: Digest,
) -> int:
    """Turn a complete upload into a blob; its size in bytes. Safe to repeat.

    Raises:
        NotFoundError: no such upload and no such blob. RefusedError: the bytes have another digest.
    """
    with tenant_scope(context, principal, tenant, active=True) as scope:
        tenant_id = scope.tenant.id
        try:
            store.upload_get(scope.session, tenant_id, adapter, upload_id)
        except NotFoundError:
            # A repeated request whose first answer was lost finds the blob instead.
            size = store.blob_size(scope.session, tenant_id, digest)
            if size is None:
                raise
            return size
    offset = context.blobs.upload_size(tenant_id, upload_id)
    hasher = None if offset is None else _hashers.take(upload_id, offset)
    known = None
    if offset is not None and hasher is not None:
        known = (offset, Digest("sha256:" + hasher.hexdigest()))
    return _blob_record(context, tenant_id, upload_id, digest, known)


def upload_cancel(
    context: Context, principal: Principal, tenant: str, adapter: str, upload_id: UUID
) -> None:
    """Drop an upload and give back its reserved bytes.

    Raises:
        NotFoundError: no such upload.
    """
    with tenant_scope(context, principal, tenant) as scope:
        store.upload_get(scope.session, scope.tenant.id, adapter, upload_id)
        # The bytes first: a death in between leaves a row, which is swept by its age.
        context.blobs.upload_abort(scope.tenant.id, upload_id)
        reserved = store.upload_delete(scope.session, scope.tenant.id, upload_id)
        bytes_settle(scope.session, scope.tenant.id, reserved=reserved, stored=0)


def upload_offset(
    context: Context, principal: Principal, tenant: str, adapter: str, upload_id: UUID
) -> int:
    """How many bytes of an upload have arrived.

    Raises:
        NotFoundError: no such upload.
    """
    with tenant_scope(context, principal, tenant) as scope:
        upload = store.upload_get(scope.session, scope.tenant.id, adapter, upload_id)
    offset = context.blobs.upload_size(upload.tenant_id, upload_id)
    if offset is None:
        raise NotFoundError("no such upload; start a new one")
    return offset


def blob_mount(
    context: Context, principal: Principal, tenant: str, source: str, adapter: str, digest: Digest
) -> bool:
    """Reuse a blob of another adapter of the same tenant; False when there is none to reuse."""
    if source.split("/", maxsplit=1)[0] != tenant:
        return False
    adapter = adapter_name(adapter)
    now = context.clock.now()
    with tenant_scope(context, principal, tenant, active=True) as scope:
        adapter_ensure(scope.session, scope.tenant.id, adapter, now)
        return bool(store.blob_sizes_locked(scope.session, scope.tenant.id, [digest], now))


def blob_bytes(
    context: Context, tenant_id: UUID, digest: Digest, size: int, start: int, end: int | None
) -> Iterator[bytes]:
    """The verified bytes of a blob, in chunks."""
    return context.blobs.open(tenant_id, digest, size=size, start=start, end=end)


def _reserve(context: Context, upload: store.UploadRow, total: int) -> store.UploadRow:
    with tenant_transaction(context, upload.tenant_id) as session:
        current = store.upload_get(session, upload.tenant_id, upload.adapter, upload.id, lock=True)
        if total > current.reserved_bytes:
            bytes_reserve(session, upload.tenant_id, total - current.reserved_bytes)
            store.upload_reserve(session, current, total)
        return store.upload_get(session, upload.tenant_id, upload.adapter, upload.id)


def _blob_record(
    context: Context,
    tenant_id: UUID,
    upload_id: UUID,
    digest: Digest,
    known: tuple[int, Digest] | None,
) -> int:
    now = context.clock.now()
    with tenant_transaction(context, tenant_id) as session:
        # A sweeper that found no row waits here, and then finds one.
        store.blob_lock(session, tenant_id, digest)
        size = context.blobs.upload_commit(tenant_id, upload_id, digest, known)
        created = store.blob_ensure(session, tenant_id=tenant_id, digest=digest, size=size, at=now)
        reserved = store.upload_delete(session, tenant_id, upload_id)
        bytes_settle(session, tenant_id, reserved=reserved, stored=size if created else 0)
    return size
