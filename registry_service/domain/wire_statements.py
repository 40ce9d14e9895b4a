"""The signed statements that cross a process border, as the service serves their payloads."""

from __future__ import annotations

from typing import Annotated, Final, Literal
from uuid import UUID

from pydantic import Field

from registry_service.domain.wire import DigestText, HexText, Name, SecondText, Wire

_VERDICT: Final = "urn:adapter-registry:verdict/v1#"
_BASE: Final = "urn:adapter-registry:base/v1#"


class DigestSet(Wire):
    """An in-toto digest set with SHA-256 alone."""

    sha256: HexText


class Subject(Wire):
    """A file, or ``manifest``, which is the artifact itself and comes first."""

    name: str
    digest: DigestSet


class Verifier(Wire):
    """Who verified."""

    id: str


class PolicyReference(Wire):
    """Which rules were applied."""

    uri: str
    digest: DigestSet


class Attestation(Wire):
    """A report that the verdict rests on."""

    uri: str
    digest: DigestSet


class Summary(Wire):
    """What verdicts and base statements have in common (SLSA verification summary v1)."""

    verifier: Verifier
    time_verified: SecondText
    resource_uri: Annotated[str, Field(pattern=r"^urn:sha256:[0-9a-f]{64}$")]
    policy: PolicyReference
    input_attestations: tuple[Attestation, ...]
    verification_result: Literal["PASSED"]
    verified_levels: tuple[Literal["ADAPTER_REGISTRY_ADMITTED"]]


class VerdictSummary(Summary):
    """An adapter's summary; the extensions are named by URI."""

    tenant_id: Annotated[UUID, Field(alias=_VERDICT + "tenantId")]
    tenant: Annotated[Name, Field(alias=_VERDICT + "tenant")]
    adapter: Annotated[Name, Field(alias=_VERDICT + "adapter")]
    base_model_digest: Annotated[DigestText, Field(alias=_VERDICT + "baseModelDigest")]
    catalog_digest: Annotated[DigestText, Field(alias=_VERDICT + "catalogDigest")]
    not_after: Annotated[SecondText, Field(alias=_VERDICT + "notAfter")]


class BaseSummary(Summary):
    """A base's summary."""

    name: Annotated[Name, Field(alias=_BASE + "name")]
    catalog_digest: Annotated[DigestText, Field(alias=_BASE + "catalogDigest")]
    earlier_catalog_digests: Annotated[
        tuple[DigestText, ...], Field(alias=_BASE + "earlierCatalogDigests")
    ]
    not_after: Annotated[SecondText, Field(alias=_BASE + "notAfter")]


class Statement(Wire):
    """An in-toto Statement v1."""

    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], Field(alias="_type")]
    subject: Annotated[tuple[Subject, ...], Field(min_length=1)]
    predicate_type: Literal["https://slsa.dev/verification_summary/v1"]


class VerdictStatement(Statement):
    """The signed statement that an artifact was admitted on one base."""

    predicate: VerdictSummary


class BaseStatement(Statement):
    """The signed statement that a base was admitted with its catalog."""

    predicate: BaseSummary
