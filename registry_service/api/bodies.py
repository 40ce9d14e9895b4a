"""Request bodies of the control plane: parsed once, strictly, into frozen values."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from registry_service.domain import limits

Text = Annotated[str, Field(max_length=limits.REASON_CHARS)]
Name = Annotated[str, Field(max_length=200)]
Number = Annotated[int, Field(ge=0, lt=2**63)]


class Body(BaseModel):
    """Unknown fields are refused, and nothing is coerced."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, validate_by_name=False
    )


class TenantBody(Body):
    name: Name


class ReasonBody(Body):
    reason: Text


class PolicyBody(Body):
    full_tensors: bool
    reason: Text


class TokenBody(Body):
    subject: Name
    role: Name
    tenant: Name | None = None
    expires_in_seconds: int = limits.TOKEN_TTL_SECONDS


class BaseBody(Body):
    name: Name
    manifest: Annotated[str, Field(max_length=limits.MANIFEST_BYTES)]
    files: Annotated[dict[str, str], Field(max_length=limits.ADAPTER_FILES)]
    headers: Annotated[dict[str, str], Field(max_length=1024)]


class ReviewBody(Body):
    decision: Name
    reason: Text


class RevocationBody(Body):
    reason: Text
    deadline_seconds: int | None = None


class AliasBody(Body):
    adapter_digest: Name
    reason: Text


class RoutingBody(Body):
    tenant: Name
    adapter: Name | None = None
    reference: Name | None = None
    node: Name
    body_digest: Name
    session_id: Name
    subject: Name


class ClaimBody(Body):
    worker: Name
    kinds: Annotated[list[Name], Field(max_length=8)]
    base_model_digests: Annotated[list[Name], Field(max_length=256)]


class LeaseBody(Body):
    lease: Annotated[int, Field(ge=0, lt=2**31)]


class FindingBody(Body):
    check: Annotated[int, Field(ge=1, le=16)]
    code: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Z0-9_]*$")]
    where: Annotated[str, Field(max_length=700)]
    expected: Annotated[str, Field(max_length=500)]
    got: Annotated[str, Field(max_length=500)]
    severity: Literal["refuse", "review", "info"]


class ReportBody(Body):
    findings: Annotated[list[FindingBody], Field(max_length=limits.REPORT_FINDINGS)]
    checks: Annotated[list[int], Field(max_length=16)]
    device: Annotated[str, Field(max_length=200)]
    versions: Annotated[dict[str, str], Field(max_length=64)]
    sandbox: bool
    measurements: Annotated[dict[str, Any], Field(max_length=256)]


class ResultBody(Body):
    lease: Annotated[int, Field(ge=0, lt=2**31)]
    outcome: Literal["done", "fault"]
    report: ReportBody | None = None
    catalog: dict[str, Any] | None = None
    reason: Text | None = None


class NodeBody(Body):
    base_model_digest: Name
    url: Annotated[str, Field(max_length=300, pattern=r"^https?://[!-~]+$")]
    catalog_digest: Name


class ResidentBody(Body):
    tenant_id: Annotated[UUID, Field(strict=False)]
    adapter_digest: Name
    state: Annotated[str, Field(max_length=32, pattern=r"^[A-Z_]+$")]


class HeartbeatBody(Body):
    feed_index: Annotated[int, Field(ge=0, lt=2**63)]
    residents: Annotated[list[ResidentBody], Field(max_length=limits.HEARTBEAT_RESIDENTS)]


class UsedBody(Body):
    tenant_id: Annotated[UUID, Field(strict=False)]
    adapter_digest: Annotated[str, Field(pattern=r"^(base|sha256:[0-9a-f]{64})$")]
    requests: Number
    prompt_tokens: Number
    completion_tokens: Number
    reused_tokens: Number


class UsageBody(Body):
    run: Annotated[UUID, Field(strict=False)]
    items: Annotated[list[UsedBody], Field(max_length=limits.USAGE_ITEMS)]


class PlacementBody(Body):
    tenant: Name
    adapter_digest: Name


class AcknowledgementBody(Body):
    tenant_id: Annotated[UUID, Field(strict=False)]
    adapter_digest: Name
    freed_bytes: Annotated[int, Field(ge=0, lt=2**63)]
    purged_blocks: Annotated[int, Field(ge=0, lt=2**63)]
