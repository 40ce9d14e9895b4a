"""What an admission needs besides the checks: who may approve, and how much a tenant may have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import ForbiddenError, RefusedError


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """The rules under which a verdict was given; their digest stands in the verdict.

    Sizes in bytes, lifetimes in seconds. ``full_tensors`` is the tenant's: its adapters may hold
    whole tensors of the base (``modules_to_save``, embedding copies) beside LoRA's.
    """

    version: int = 1
    approvals: int = 1
    self_review: bool = False
    verdict_seconds: int = limits.VERDICT_SECONDS
    max_rank: int = limits.RANK
    max_weight_bytes: int = limits.WEIGHT_BYTES
    full_tensors: bool = False

    @property
    def digest(self) -> Digest:
        """SHA-256 of the rules as canonical JSON."""
        return digest_of(canonical_json(asdict(self)))


POLICY: Final = AdmissionPolicy()


def review_check(policy: AdmissionPolicy, publisher: str, reviewer: str) -> None:
    """Nobody decides on an artifact of their own.

    Raises:
        ForbiddenError: the reviewer published it.
    """
    if not policy.self_review and publisher == reviewer:
        raise ForbiddenError(
            "expected a reviewer who did not publish this artifact, got its publisher; "
            "ask somebody else to review it"
        )


def approvals_reached(policy: AdmissionPolicy, approvals: int) -> bool:
    """True when ``approvals`` distinct people suffice."""
    return approvals >= policy.approvals


def tenant_active_check(state: str) -> None:
    """A suspended tenant publishes, resolves and runs nothing.

    Raises:
        RefusedError: the tenant is suspended.
    """
    if state != "ACTIVE":
        raise RefusedError("the tenant is suspended; ask the platform's operator")
