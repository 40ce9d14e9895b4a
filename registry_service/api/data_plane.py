"""Data plane: the OCI Distribution API (distribution-spec 1.1), append-only.

Publishing is an OCI push to ``/v2/<tenant>/<adapter>/``, pulling an OCI pull. Bytes stream: they
are hashed while they arrive and are never held whole in memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from registry_service.api.auth import Parts, allow
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_parse, is_digest
from registry_service.domain.errors import (
    ForbiddenError,
    MalformedError,
    NotFoundError,
    RegistryError,
)
from registry_service.domain.manifest import MANIFEST_MEDIA_TYPE
from registry_service.domain.roles import Principal, Role
from registry_service.usecases import resolve, uploads
from registry_service.usecases.context import Context
from registry_service.usecases.submit import artifact_submit

router = APIRouter(prefix="/v2")

_PUSH = allow(Role.PUBLISHER)
_PULL = allow(Role.PUBLISHER, Role.REVIEWER, Role.OPERATOR, Role.VALIDATOR, Role.NODE, Role.AUDITOR)
_CHUNK = 1 * limits.MIB
_PIECES_AHEAD = 4
_CONTENT_RANGE = re.compile(r"(?:bytes[ =])?(\d{1,18})-(\d{1,18})(?:/\S+)?")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")
_VERSION = {"Docker-Distribution-API-Version": "registry/2.0"}


class UnsupportedError(RegistryError):
    """Something that this registry does not do: deletion, another media type."""

    code = "UNSUPPORTED"
    http_status = 405


class MediaTypeError(UnsupportedError):
    """A manifest of another media type."""

    http_status = 415


class RangeNotSatisfiableError(RegistryError):
    """A range that the blob does not have, or that its body does not have."""

    code = "RANGE_INVALID"
    http_status = 416


@router.get("/")
def version(principal: Principal = _PULL) -> Response:
    """The API is spoken here, and the token is good."""
    return Response("{}", media_type="application/json", headers=_VERSION)


@router.post("/{tenant}/{adapter}/blobs/uploads/")
async def upload_begin(
    tenant: str,
    adapter: str,
    request: Request,
    parts: Parts,
    principal: Principal = _PUSH,
    digest: str | None = None,
    mount: str | None = None,
) -> Response:
    """Open an upload; with ``digest`` the body is the whole blob, with ``mount`` reuse one."""
    _own_check(principal, tenant)
    if mount is not None:
        source = request.query_params.get("from", "")
        wanted = digest_parse(mount)
        if await _run(uploads.blob_mount, parts, principal, tenant, source, adapter, wanted):
            return _created(tenant, adapter, "blobs", wanted)
    blob = None if digest is None else digest_parse(digest)
    upload_id = await _run(uploads.upload_begin, parts, principal, tenant, adapter)
    if blob is None:
        return _accepted(tenant, adapter, upload_id, 0)
    try:
        await _receive(parts, principal, tenant, adapter, upload_id, request)
        return await _finish(parts, principal, tenant, adapter, upload_id, blob)
    except RegistryError:
        # Nobody knows this upload's address: it is dropped with what was reserved for it.
        await _run(uploads.upload_cancel, parts, principal, tenant, adapter, upload_id)
        raise


@router.patch("/{tenant}/{adapter}/blobs/uploads/{upload_id}")
async def upload_append(
    tenant: str,
    adapter: str,
    upload_id: UUID,
    request: Request,
    parts: Parts,
    principal: Principal = _PUSH,
) -> Response:
    """Append bytes, in order."""
    _own_check(principal, tenant)
    offset = await _receive(parts, principal, tenant, adapter, upload_id, request)
    return _accepted(tenant, adapter, upload_id, offset)


@router.put("/{tenant}/{adapter}/blobs/uploads/{upload_id}")
async def upload_finish(
    tenant: str,
    adapter: str,
    upload_id: UUID,
    request: Request,
    parts: Parts,
    digest: str,
    principal: Principal = _PUSH,
) -> Response:
    """The last bytes, if any, and the digest of all."""
    _own_check(principal, tenant)
    blob = digest_parse(digest)
    if request.headers.get("content-length") != "0":
        await _receive(parts, principal, tenant, adapter, upload_id, request)
    return await _finish(parts, principal, tenant, adapter, upload_id, blob)


@router.get("/{tenant}/{adapter}/blobs/uploads/{upload_id}")
def upload_status(
    tenant: str, adapter: str, upload_id: UUID, parts: Parts, principal: Principal = _PUSH
) -> Response:
    """How far an upload is."""
    _own_check(principal, tenant)
    offset = uploads.upload_offset(parts, principal, tenant, adapter, upload_id)
    response = _accepted(tenant, adapter, upload_id, offset)
    response.status_code = 204
    return response


@router.delete("/{tenant}/{adapter}/blobs/uploads/{upload_id}", status_code=204)
def upload_cancel(
    tenant: str, adapter: str, upload_id: UUID, parts: Parts, principal: Principal = _PUSH
) -> Response:
    """Drop an upload."""
    _own_check(principal, tenant)
    uploads.upload_cancel(parts, principal, tenant, adapter, upload_id)
    return Response(status_code=204)


@router.api_route("/{tenant}/{adapter}/blobs/{digest}", methods=["GET", "HEAD"])
def blob_read(
    tenant: str,
    adapter: str,
    digest: str,
    request: Request,
    parts: Parts,
    principal: Principal = _PULL,
) -> Response:
    """A blob, whole or by range."""
    blob = digest_parse(digest)
    headers = {"Docker-Content-Digest": blob, "Accept-Ranges": "bytes", "ETag": f'"{blob}"'}
    if request.method == "HEAD" and principal.role is Role.PUBLISHER:
        headers["Content-Length"] = str(resolve.blob_known(parts, principal, tenant, blob))
        return Response(headers=headers, media_type="application/octet-stream")
    tenant_id, size = resolve.blob_pull(parts, principal, tenant, adapter, blob)
    start, end, status = 0, size, 200
    asked = request.headers.get("range")
    if asked is not None:
        start, end = _range(asked, size)
        status = 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    headers["Content-Length"] = str(end - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type="application/octet-stream")
    whole = (start, end) == (0, size)
    chunks: Iterator[bytes] = uploads.blob_bytes(
        parts, tenant_id, blob, size, start, None if whole else end
    )
    return StreamingResponse(
        _primed(chunks), status, headers=headers, media_type="application/octet-stream"
    )


@router.put("/{tenant}/{adapter}/manifests/{reference}")
async def manifest_put(
    tenant: str,
    adapter: str,
    reference: str,
    request: Request,
    parts: Parts,
    principal: Principal = _PUSH,
) -> Response:
    """Submit an artifact, by digest or under a new version label."""
    _own_check(principal, tenant)
    media_type = request.headers.get("content-type", "")
    if media_type != MANIFEST_MEDIA_TYPE:
        raise MediaTypeError(f"expected Content-Type {MANIFEST_MEDIA_TYPE}, got another")
    content = await request.body()
    digest = await anyio.to_thread.run_sync(
        lambda: artifact_submit(
            parts,
            principal,
            tenant,
            adapter,
            content,
            label=None if is_digest(reference) else reference,
            digest=digest_parse(reference) if is_digest(reference) else None,
        )
    )
    return _created(tenant, adapter, "manifests", digest)


@router.api_route("/{tenant}/{adapter}/manifests/{reference}", methods=["GET", "HEAD"])
def manifest_read(
    tenant: str,
    adapter: str,
    reference: str,
    request: Request,
    parts: Parts,
    principal: Principal = _PULL,
) -> Response:
    """The manifest of a digest, label or alias."""
    digest, content = resolve.manifest_pull(parts, principal, tenant, adapter, reference)
    headers = {"Docker-Content-Digest": digest, "ETag": f'"{digest}"'}
    if request.method == "HEAD":
        headers["Content-Length"] = str(len(content))
        content = b""
    return Response(content, headers=headers, media_type=MANIFEST_MEDIA_TYPE)


@router.get("/{tenant}/{adapter}/tags/list")
def tag_list(
    tenant: str,
    adapter: str,
    parts: Parts,
    principal: Principal = _PULL,
    n: int = limits.PAGE_ROWS,
    last: str = "",
) -> Response:
    """Labels and aliases, in byte order."""
    count = max(0, min(n, limits.PAGE_ROWS))
    names = resolve.tag_names(parts, principal, tenant, adapter, after=last, limit=count + 1)
    headers = {}
    if len(names) > count > 0:
        link = f"/v2/{tenant}/{adapter}/tags/list?n={count}&last={names[count - 1]}"
        headers["Link"] = f'<{link}>; rel="next"'
    return JSONResponse({"name": f"{tenant}/{adapter}", "tags": names[:count]}, headers=headers)


@router.delete("/{tenant}/{adapter}/manifests/{reference}")
@router.delete("/{tenant}/{adapter}/blobs/{reference}")
def content_delete(
    tenant: str, adapter: str, reference: str, principal: Principal = _PULL
) -> Response:
    """Nothing is deleted here: revoke the artifact instead."""
    raise UnsupportedError("this registry is append-only; revoke the artifact instead")


@router.api_route("/{path:path}", methods=["GET", "HEAD", "PUT", "POST", "PATCH", "DELETE"])
def unknown(path: str, principal: Principal = _PULL) -> Response:
    """Any other path: repositories are named <tenant>/<adapter>."""
    raise NotFoundError("not found; repositories are named <tenant>/<adapter>")


async def _receive(
    parts: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    upload_id: UUID,
    request: Request,
) -> int:
    """Take the request's body into the upload; the offset after it."""
    start, length = _declared(request)
    writer = await _open(parts, principal, tenant, adapter, upload_id, start, length)
    try:
        await _relay(request, writer)
    finally:
        # Also when the connection broke: what arrived stays, and the client continues from there.
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(uploads.upload_close, writer)
    return writer.offset


async def _relay(request: Request, writer: uploads.UploadWriter) -> None:
    """Write what arrives, in pieces, while the next piece arrives."""
    failure: list[Exception] = []
    outbox, inbox = anyio.create_memory_object_stream[bytes](_PIECES_AHEAD)

    async def write() -> None:
        with inbox:
            async for piece in inbox:
                try:
                    await anyio.to_thread.run_sync(writer.write, piece)
                except Exception as error:  # noqa: BLE001 - raised again once both have ended
                    failure.append(error)
                    return

    async with anyio.create_task_group() as group:
        group.start_soon(write)
        with outbox, contextlib.suppress(anyio.BrokenResourceError):
            async for piece in _pieces(request, failure):
                await outbox.send(piece)
    if failure:
        raise failure[0]


async def _pieces(request: Request, failure: list[Exception]) -> AsyncIterator[bytes]:
    """The request's body in pieces of about ``_CHUNK`` bytes, to where the connection broke."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size >= _CHUNK:
                yield b"".join(chunks)
                chunks, size = [], 0
    except ClientDisconnect as error:
        failure.append(error)
    if chunks:
        yield b"".join(chunks)


async def _open(
    parts: Context,
    principal: Principal,
    tenant: str,
    adapter: str,
    upload_id: UUID,
    start: int | None,
    length: int | None,
) -> uploads.UploadWriter:
    return await anyio.to_thread.run_sync(
        lambda: uploads.upload_open(
            parts,
            principal,
            tenant,
            adapter,
            upload_id,
            start=start,
            length=length,
        )
    )


async def _finish(
    parts: Context, principal: Principal, tenant: str, adapter: str, upload_id: UUID, blob: Digest
) -> Response:
    await _run(uploads.upload_finish, parts, principal, tenant, adapter, upload_id, blob)
    return _created(tenant, adapter, "blobs", blob)


async def _run(function: Any, *arguments: Any) -> Any:
    return await anyio.to_thread.run_sync(function, *arguments)


def _own_check(principal: Principal, tenant: str) -> None:
    # One answer for a repository that exists elsewhere and one that does not.
    if principal.tenant != tenant:
        raise ForbiddenError(f"expected a repository of tenant {principal.tenant}, got another's")


def _declared(request: Request) -> tuple[int | None, int | None]:
    """Where the body starts in the upload and how long it is, as far as the request says so."""
    text = request.headers.get("content-length", "")
    length = int(text) if text.isascii() and text.isdigit() else None
    value = request.headers.get("content-range")
    if value is None:
        return None, length
    match = _CONTENT_RANGE.fullmatch(value)
    if match is None:
        raise MalformedError("Content-Range: expected <start>-<end>")
    start, ranged = int(match[1]), int(match[2]) - int(match[1]) + 1
    if ranged < 1 or (length is not None and ranged != length):
        raise RangeNotSatisfiableError(f"Content-Range: expected the range of {length} bytes")
    return start, ranged


def _range(value: str, size: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(value)
    if match is None:
        raise RangeNotSatisfiableError("Range: expected bytes=<start>-[<end>]")
    start = int(match[1])
    end = min(int(match[2]) + 1 if match[2] else size, size)
    if start >= end:
        raise RangeNotSatisfiableError(f"Range: the blob has {size} bytes")
    return start, end


def _primed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """``chunks``, with the first one read now: an unreadable blob is an error, not a short body."""
    first = next(chunks, b"")

    def rest() -> Iterator[bytes]:
        yield first
        yield from chunks

    return rest()


def _accepted(tenant: str, adapter: str, upload_id: UUID, offset: int) -> Response:
    return Response(
        status_code=202,
        headers={
            "Location": f"/v2/{tenant}/{adapter}/blobs/uploads/{upload_id}",
            "Range": f"0-{max(offset - 1, 0)}",
            "Docker-Upload-UUID": str(upload_id),
            "OCI-Chunk-Min-Length": "1",
        },
    )


def _created(tenant: str, adapter: str, kind: str, digest: Digest) -> Response:
    return Response(
        status_code=201,
        headers={
            "Location": f"/v2/{tenant}/{adapter}/{kind}/{digest}",
            "Docker-Content-Digest": digest,
        },
    )
