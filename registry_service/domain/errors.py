"""Every error of the project: one base class, a stable code and a message that may be shown.

A bad adapter is data (findings); a broken request is one of these exceptions.
"""

from __future__ import annotations

from typing import ClassVar

from registry_service.domain.findings import Finding


class RegistryError(Exception):
    """A request that is refused.

    ``code`` is stable and machine-readable, ``message`` says what was expected, what was got and
    what to do next; it never holds secrets. ``retry_after`` is in seconds.
    """

    code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        message: str,
        *,
        findings: tuple[Finding, ...] = (),
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.findings = findings
        self.retry_after = retry_after


class MalformedError(RegistryError):
    """Input that cannot be read at all: grammar, JSON, a missing or unknown field."""

    code = "MALFORMED"
    http_status = 400
    exit_code = 2


class UnauthenticatedError(RegistryError):
    """No token, or one that is unknown, expired or withdrawn."""

    code = "UNAUTHENTICATED"
    http_status = 401
    exit_code = 6


class ForbiddenError(RegistryError):
    """The principal's role does not allow this."""

    code = "FORBIDDEN"
    http_status = 403
    exit_code = 6


class NotFoundError(RegistryError):
    """Unknown, somebody else's, or revoked: deliberately one answer for all of them."""

    code = "NOT_FOUND"
    http_status = 404
    exit_code = 4


class ConflictError(RegistryError):
    """A stale generation, an illegal move, or a name that is taken."""

    code = "CONFLICT"
    http_status = 409
    exit_code = 5


class RefusedError(RegistryError):
    """Understood, and refused by policy or by checks."""

    code = "REFUSED"
    http_status = 422
    exit_code = 3


class TooLargeError(RegistryError):
    """A body, file or field over its limit in ``limits``."""

    code = "TOO_LARGE"
    http_status = 413
    exit_code = 3


class QuotaExceededError(RegistryError):
    """The tenant's stored bytes would exceed its quota."""

    code = "QUOTA_EXCEEDED"
    http_status = 403
    exit_code = 3


class UnavailableError(RegistryError):
    """A fault of ours or of a part we depend on; trying again later is right."""

    code = "UNAVAILABLE"
    http_status = 503
    exit_code = 7

    def __init__(self, message: str, *, retry_after: int = 5) -> None:
        super().__init__(message, retry_after=retry_after)


class TooManyRequestsError(UnavailableError):
    """As much as one caller may have at once; others are still served."""

    code = "TOO_MANY_REQUESTS"
    http_status = 429


class IllegalMoveError(ConflictError):
    """An event that the artifact's state does not allow."""

    code = "ILLEGAL_MOVE"


class PlacementTakenError(ConflictError):
    """As many other nodes as the artifact declares hold it already."""

    code = "PLACEMENT_TAKEN"


class PoolFullError(ConflictError):
    """The nodes of a base hold as many adapters as they may."""

    code = "POOL_FULL"


class PoolTenantFullError(PoolFullError):
    """The nodes of a base hold as many adapters of one tenant as they may."""

    code = "POOL_TENANT_FULL"


class LeaseLostError(ConflictError):
    """A job's lease was given to another worker; the late result is dropped."""

    code = "LEASE_LOST"


class CorruptStoreError(UnavailableError):
    """The blob store returned bytes that differ from their digest or length."""

    code = "CORRUPT_STORE"


class UntrustedError(RefusedError):
    """A statement that does not verify: signature, signer, subject, audience or time."""

    code = "UNTRUSTED"
