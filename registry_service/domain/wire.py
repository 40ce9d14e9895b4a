"""Documents that cross a process border, as the service answers them.

``schemas/`` is generated from here and from ``declaration``; a test holds the service's real
answers against these models. Request bodies are in ``registry_service.api.bodies``.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from registry_service.domain import limits
from registry_service.domain.findings import Code, Severity
from registry_service.domain.lifecycle import State
from registry_service.domain.roles import Role

Item = TypeVar("Item")

DigestText = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
HexText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=limits.SUBJECT_CHARS)]
Reason = Annotated[str, Field(min_length=1, max_length=limits.REASON_CHARS)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
# To the second: statements are compared byte for byte.
SecondText = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class Wire(BaseModel):
    """Frozen and strict: an unknown field is refused and nothing is coerced."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, validate_by_name=True
    )


class Finding(Wire):
    """One thing that a check saw."""

    check: Annotated[int, Field(ge=1, le=16)]
    code: Code
    where: str
    expected: str
    got: str
    severity: Severity


class ModuleState(Wire):
    """Modules of one pattern in one version; without LoRA they have no rank and no scaling."""

    count: Positive
    rank: Positive | None
    scaling: float | None


class ModuleChange(Wire):
    """Modules that differ by their layer only, before and now; a norm is null if not measured."""

    pattern: str
    change: Literal["added", "removed", "changed", "same"]
    before: tuple[ModuleState, ...]
    now: tuple[ModuleState, ...]
    norm_before: float | None
    norm_now: float | None


class Comparison(Wire):
    """An artifact against the version that an alias points to; modules are null if not kept."""

    alias: Name
    generation: Positive
    adapter_digest: DigestText
    rank_before: Positive
    rank_now: Positive
    alpha_before: float
    alpha_now: float
    modules: tuple[ModuleChange, ...] | None


class Report(Wire):
    """All findings of one scan or one validation.

    ``comparison`` stands in the newest scan, where an alias points to another version on the same
    base; it is null elsewhere.
    """

    stage: Literal["scan", "validate"]
    attempt: Positive
    worker: str
    created_at: AwareDatetime
    verdict: Literal["pass", "refuse"]
    report_digest: DigestText
    findings: Annotated[tuple[Finding, ...], Field(max_length=limits.REPORT_FINDINGS)]
    checks: tuple[int, ...]
    device: str
    versions: dict[str, str]
    sandbox: bool | None
    measurements: dict[str, Any]
    comparison: tuple[Comparison, ...] | None


class Artifact(Wire):
    """One immutable version of an adapter."""

    tenant: Name
    owner_tenant: UUID
    adapter_id: Name
    adapter_digest: DigestText
    base_model_digest: DigestText
    peft_type: str
    rank: Annotated[int, Field(ge=1, le=limits.RANK)]
    target_modules: tuple[str, ...] | str
    max_replicas: Positive
    state: State
    revision: Positive
    admitted: bool
    labels: tuple[str, ...]
    publisher: Name
    submitted_at: AwareDatetime
    bytes: Positive


class FeedEvent(Wire):
    """One numbered event of the log; indexes start at 1 and have no gaps."""

    index: Positive
    id: UUID
    kind: Annotated[str, Field(pattern=r"^[a-z]+\.[a-z_]+$")]
    tenant: Name
    tenant_id: UUID
    subject: str
    actor: Name
    at: AwareDatetime
    body: dict[str, Any]


class Feed(Wire):
    """Events after an index, and where to go on: before it, when the log does not reach so far."""

    items: tuple[FeedEvent, ...]
    next: Count


class Page(Wire, Generic[Item]):
    """One page of a list; ``nextCursor`` is null on the last one."""

    items: tuple[Item, ...]
    next_cursor: str | None


class Problem(Wire):
    """An error of the control plane (RFC 9457, ``application/problem+json``)."""

    type: str
    title: str
    status: Annotated[int, Field(ge=400, le=599)]
    code: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    detail: str
    request_id: UUID
    findings: tuple[Finding, ...] | None = None


class Alias(Wire):
    """A movable name of an adapter."""

    alias: Name
    generation: Positive
    adapter_digest: DigestText
    base_model_digest: DigestText
    updated_at: AwareDatetime
    actor: Name


class AliasMove(Wire):
    """One move of an alias."""

    generation: Positive
    previous_digest: DigestText | None
    adapter_digest: DigestText
    base_model_digest: DigestText
    actor: Name
    reason: Reason
    at: AwareDatetime


class Resolution(Wire):
    """The digest that a reference names, with what a node compares before it loads."""

    tenant: Name
    tenant_id: UUID
    adapter: Name
    reference: str
    kind: Literal["alias", "label", "digest"]
    generation: Count | None
    adapter_digest: DigestText
    base_model_digest: DigestText
    tokenizer_digest: DigestText
    chat_template_digest: DigestText


class RevocationNode(Wire):
    """One node's part of a revocation; LOST is one that cannot be serving any more."""

    node: Name
    state: Literal["OUTSTANDING", "ACKNOWLEDGED", "LOST"]
    acknowledged_at: AwareDatetime | None
    freed_bytes: Count | None
    purged_blocks: Count | None


class Revocation(Wire):
    """How far a revocation is."""

    adapter_digest: DigestText
    state: Literal[State.REVOKING, State.REVOKED]
    reason: Reason
    actor: Name
    at: AwareDatetime
    deadline_seconds: Count | None
    nodes: tuple[RevocationNode, ...]


class RevokedEntry(Wire):
    """One revocation in the list; ``tenantId`` null: weights and content of every tenant."""

    adapter_digest: DigestText
    weights_digest: DigestText | None
    content_digest: DigestText | None
    tenant_id: UUID | None
    cancel_at: SecondText | None


class RevocationList(Wire):
    """The payload of the signed revocation list."""

    issuer: Name
    number: Positive
    issued_at: SecondText
    expires_at: SecondText
    entries: tuple[RevokedEntry, ...]


class Review(Wire):
    """One person's decision."""

    reviewer: Name
    decision: Literal["approve", "reject"]
    reason: Reason
    at: AwareDatetime


class Job(Wire):
    """A claimed job as a worker sees it; a catalog job has no adapter digest."""

    id: UUID
    kind: Literal["scan", "validate", "catalog"]
    lease: Count
    lease_seconds: Positive
    attempt: Count
    max_attempts: Positive
    tenant: Name
    tenant_id: UUID
    adapter: str
    adapter_digest: DigestText | None
    base_model_digest: DigestText


class JobState(Job):
    """A job as operators see it."""

    state: Literal["QUEUED", "RUNNING", "DONE", "DEAD"]
    worker: str
    fault: str
    created_at: AwareDatetime


class Resident(Wire):
    """An adapter that a node holds."""

    tenant_id: UUID
    adapter_digest: DigestText
    state: Annotated[str, Field(pattern=r"^[A-Z_]+$")]


class Node(Wire):
    """A serving process, bound to one base."""

    node: Name
    url: str
    base_model_digest: DigestText
    state: Literal["LIVE", "LOST"]
    last_seen_at: AwareDatetime
    feed_index: Count
    residents: tuple[Resident, ...]


class NodeRevocation(Wire):
    """What a node still has to let go of."""

    tenant_id: UUID
    adapter_digest: DigestText
    deadline_seconds: Count | None


class Placement(Wire):
    """A node's lease to hold an adapter."""

    node: Name
    tenant_id: UUID
    adapter_digest: DigestText
    expires_at: AwareDatetime
    lease_seconds: Positive


class LostPlacement(Wire):
    """What a node has to unload: other nodes hold it now."""

    tenant_id: UUID
    adapter_digest: DigestText


class Renewal(Wire):
    """The answer to a node's heartbeat."""

    lease_seconds: Positive
    revocations: tuple[NodeRevocation, ...]
    lost_placements: tuple[LostPlacement, ...]


class Usage(Wire):
    """What a tenant used of one adapter, or of the base alone, over all nodes."""

    adapter_digest: DigestText | Literal["base"]
    base_model_digest: DigestText
    requests: Count
    prompt_tokens: Count
    completion_tokens: Count
    reused_tokens: Count


class BaseFile(Wire):
    """One file of a base's manifest."""

    path: str
    digest: DigestText
    size: Count


class CatalogMaker(Wire):
    """Who made which catalog."""

    worker: Name
    catalog_digest: DigestText
    model_class: str
    transformers_version: str
    at: AwareDatetime


class Base(Wire):
    """A base model."""

    name: Name
    base_model_digest: DigestText
    state: Literal["PENDING", "USABLE", "CONFLICTED"]
    catalog_digest: DigestText | None
    model_class: str | None
    transformers_version: str | None
    recatalog: Literal["COLLECTING", "CONFLICTED"] | None
    tokenizer_digest: DigestText
    chat_template_digest: DigestText
    quantization: str
    files: tuple[BaseFile, ...]
    catalogs: tuple[CatalogMaker, ...]
    created_at: AwareDatetime
    grants: tuple[Name, ...]


class Tenant(Wire):
    """An owner of adapters."""

    id: UUID
    name: Name
    state: Literal["ACTIVE", "SUSPENDED"]
    full_tensors: bool
    created_at: AwareDatetime


class Token(Wire):
    """A token without its secret."""

    id: UUID
    subject: Name
    role: Role
    tenant: Name | None
    created_at: AwareDatetime
    created_by: Name
    expires_at: AwareDatetime
    revoked_at: AwareDatetime | None


class NewToken(Token):
    """A token at the one moment when its secret is shown."""

    token: str


class Whoami(Wire):
    """Who a token speaks for."""

    subject: Name
    role: Role
    tenant: Name | None
    tenant_id: UUID | None


class MintedContext(Wire):
    """A routing context, what it runs and until when."""

    routing_context: str
    adapter_digest: DigestText | Literal["base"]
    expires_at: AwareDatetime


class Grant(Wire):
    """A subject's right to run an adapter; withdrawing it raises the epoch."""

    subject: Name
    epoch: Positive
    active: bool
