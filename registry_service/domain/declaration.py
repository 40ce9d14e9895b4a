"""What the publisher states about an adapter. It travels inside the artifact, so it names it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from registry_service.domain import limits, names
from registry_service.domain.canonical import canonical_json, integer_check, json_parse
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown


def _digest(value: str) -> Digest:
    try:
        return digest_parse(value)
    except MalformedError as error:
        raise ValueError(error.message) from error


def _tenant(value: str) -> str:
    try:
        return names.tenant_name(value)
    except MalformedError as error:
        raise ValueError(error.message) from error


def _adapter(value: str) -> str:
    try:
        return names.adapter_name(value)
    except MalformedError as error:
        raise ValueError(error.message) from error


def _targets(value: tuple[str, ...] | str) -> tuple[str, ...] | str:
    if isinstance(value, tuple) and list(value) != sorted(set(value)):
        raise ValueError("expected names sorted and once each")
    if isinstance(value, str) and not value.isprintable():
        raise ValueError("expected an expression of printable characters")
    return value


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected printable characters only")
    return value


# The parser's rule once more, for those who read the generated schema.
_DIGEST_SCHEMA: Final[dict[str, Any]] = {"pattern": r"^sha256:[0-9a-f]{64}$"}
DigestText = Annotated[str, AfterValidator(_digest), Field(json_schema_extra=_DIGEST_SCHEMA)]
# ``all-linear`` or a regular expression, word for word as the config has it.
_Expression = Annotated[str, Field(min_length=1, max_length=limits.EXPRESSION_CHARS)]
TargetName = Annotated[str, Field(min_length=1, max_length=limits.TENSOR_NAME_CHARS)]


class Declaration(BaseModel):
    """The declaration, version 1. Nothing is coerced, and an unknown field is refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, validate_by_name=True
    )

    schema_version: Annotated[Literal[1], BeforeValidator(integer_check)] = 1
    tenant: Annotated[str, AfterValidator(_tenant)]
    adapter: Annotated[str, AfterValidator(_adapter)]
    base_model_digest: DigestText
    peft_type: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,31}$")]
    rank: Annotated[int, Field(ge=1, le=limits.RANK)]
    alpha: Annotated[float, Field(gt=0, le=limits.ALPHA, allow_inf_nan=False)]
    target_modules: Annotated[
        Annotated[tuple[TargetName, ...], Field(max_length=limits.TARGETS)] | _Expression,
        AfterValidator(_targets),
    ]
    tokenizer_digest: DigestText
    chat_template_digest: DigestText
    training_data_version: Annotated[
        str, Field(min_length=1, max_length=200), AfterValidator(_printable)
    ]
    evaluation_report_digest: DigestText | None = None
    base_quantization: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")] = "none"
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] = 1

    def to_bytes(self) -> bytes:
        """The declaration as RFC 8785 JSON."""
        return canonical_json(self.model_dump(by_alias=True, mode="json"))


def declaration_parse(content: bytes) -> Declaration:
    """Parse a declaration.

    Raises:
        MalformedError: not strict JSON, a missing, unknown or invalid field.
    """
    document = json_parse(content, what="declaration", limit=limits.DECLARATION_BYTES)
    if not isinstance(document, dict):
        raise MalformedError("declaration: expected an object")
    # The defaults serve those who build one; a document says everything, nothing is assumed.
    missing = sorted(
        {str(field.alias) for field in Declaration.model_fields.values()} - {*document}
    )
    if missing:
        raise MalformedError(f"declaration: expected the fields {', '.join(missing)}, got none")
    try:
        return Declaration.model_validate_json(content, by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedError(f"declaration: {shown(where)}: {first['msg']}") from error
