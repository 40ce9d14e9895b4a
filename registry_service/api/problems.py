"""Errors on the wire: problem+json (RFC 9457) on the control plane, the OCI form on the other."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    MalformedError,
    NotFoundError,
    QuotaExceededError,
    RegistryError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from registry_service.domain.text import shown

_log = logging.getLogger("registry_service")
_TYPE = "urn:adapter-registry:problem:"

# OCI distribution-spec 1.1, "Error Codes". The place in the path says what was unknown.
_UNKNOWN = {
    "manifests": "MANIFEST_UNKNOWN",
    "blobs": "BLOB_UNKNOWN",
    "uploads": "BLOB_UPLOAD_UNKNOWN",
    "tags": "NAME_UNKNOWN",
    "": "NAME_UNKNOWN",
}
_INVALID = {
    "manifests": "MANIFEST_INVALID",
    "blobs": "DIGEST_INVALID",
    "uploads": "BLOB_UPLOAD_INVALID",
    "tags": "NAME_INVALID",
    "": "NAME_INVALID",
}


class MethodError(MalformedError):
    """A path that is known, with a method that it does not have."""

    http_status = 405


def problems_install(app: FastAPI) -> None:
    """Answer every error in the form of its plane, with a request id, and never with a stack."""
    for kind in (RegistryError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def answer(request: Request, error: Exception) -> JSONResponse:
    """An error in the form of the request's plane; an unknown one is logged and says nothing."""
    wrapped = _wrapped(error)
    request_id = str(uuid.uuid4())
    if wrapped.http_status >= 500:
        # The path only: queries and bodies may hold what must not be kept.
        _log.error(
            "%s %s %s: %s %s",
            request_id,
            request.method,
            shown(request.url.path),
            wrapped.code,
            wrapped.message,
            exc_info=error if type(wrapped) is RegistryError else None,
        )
    if request.url.path.startswith("/v2"):
        response = _oci(request, wrapped)
    else:
        response = _problem(wrapped, request_id)
    response.headers["X-Request-Id"] = request_id
    return response


def _wrapped(error: Exception) -> RegistryError:
    match error:
        case RegistryError():
            return error
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return MalformedError(f"{shown(where)}: {first['msg']}")
        case HTTPException(status_code=404):
            return NotFoundError("not found")
        case HTTPException(status_code=405):
            return MethodError("expected another method here")
        case HTTPException(status_code=413):
            return TooLargeError(str(error.detail))
        case HTTPException():
            return MalformedError(str(error.detail))
    return RegistryError("an error of ours; it has been logged")


def _problem(error: RegistryError, request_id: str) -> JSONResponse:
    body: dict[str, Any] = {
        "type": _TYPE + error.code.lower().replace("_", "-"),
        "title": error.code.replace("_", " ").capitalize(),
        "status": error.http_status,
        "code": error.code,
        "detail": error.message,
        "requestId": request_id,
    }
    if error.findings:
        body["findings"] = [finding.to_json() for finding in error.findings]
    return JSONResponse(
        body,
        error.http_status,
        headers=_headers(error, "Bearer"),
        media_type="application/problem+json",
    )


def _oci(request: Request, error: RegistryError) -> JSONResponse:
    status, code = error.http_status, _oci_code(request, error)
    if code == "DIGEST_INVALID":
        status = 400
    body = {
        "errors": [
            {
                "code": code,
                "message": error.message,
                "detail": {"code": error.code},
            },
        ]
    }
    return JSONResponse(body, status, headers=_headers(error, 'Basic realm="adapter-registry"'))


def _oci_code(request: Request, error: RegistryError) -> str:
    place = _place(request.url.path)
    fixed: list[tuple[type[RegistryError], str]] = [
        (UnauthenticatedError, "UNAUTHORIZED"),
        (ForbiddenError, "DENIED"),
        (QuotaExceededError, "DENIED"),
        (TooLargeError, "SIZE_INVALID"),
        (UnavailableError, "UNAVAILABLE"),
    ]
    for kind, code in fixed:
        if isinstance(error, kind):
            return code
    named = {
        "BLOB_UNKNOWN": "MANIFEST_BLOB_UNKNOWN",
        "UNSUPPORTED": "UNSUPPORTED",
        "UPLOAD_RANGE": "BLOB_UPLOAD_INVALID",
        "RANGE_INVALID": _INVALID[place],
        "REFUSED": "DIGEST_INVALID" if place == "uploads" else "MANIFEST_INVALID",
    }
    if error.code in named:
        return named[error.code]
    if isinstance(error, NotFoundError):
        return _UNKNOWN[place]
    if isinstance(error, ConflictError):
        return "DENIED"
    return _INVALID[place] if isinstance(error, MalformedError) else "UNKNOWN"


def _place(path: str) -> str:
    parts = path.split("/")
    # /v2/<tenant>/<adapter>/<place>/…
    if len(parts) > 5 and parts[4] == "blobs" and parts[5] == "uploads":
        return "uploads"
    return parts[4] if len(parts) > 4 and parts[4] in _UNKNOWN else ""


def _headers(error: RegistryError, challenge: str) -> dict[str, str]:
    headers = {}
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = challenge
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    return headers
