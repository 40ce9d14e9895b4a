"""A base's catalog: its modules with kind and sizes, made once per base digest on a worker.

With the adapter's config it gives every tensor that the adapter's file may hold, so a wrong
catalog would void the structure check: it is parsed strictly, and two workers must agree on it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.declaration import DigestText
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown

_NAME: Final = r"^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$"
_Size = Annotated[int, Field(ge=1, le=2**53 - 1)]
_Dimension = Annotated[int, Field(ge=0, le=2**53 - 1)]
_Name = Annotated[str, Field(pattern=_NAME, max_length=limits.TENSOR_NAME_CHARS)]
_Shape = Annotated[tuple[_Dimension, ...], Field(max_length=limits.TENSOR_DIMS)]
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]+$", max_length=limits.SUBJECT_CHARS)]


class Kind(StrEnum):
    """What LoRA can be put on, and everything else."""

    LINEAR = "linear"
    CONV1D = "conv1d"
    EMBEDDING = "embedding"
    OTHER = "other"


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, validate_by_name=True
    )


class Module(_Strict):
    """One module. Sizes are W's (in, out); an embedding's are (rows, width)."""

    name: _Name
    kind: Kind
    class_name: _Word
    in_size: _Size | None = None
    out_size: _Size | None = None
    tensors: dict[_Name, _Shape] = {}

    @property
    def last_name(self) -> str:
        """The last component of the name."""
        return self.name.rpartition(".")[2]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        sizes = (self.in_size, self.out_size)
        if (self.kind is Kind.OTHER) != (sizes == (None, None)) or sizes.count(None) == 1:
            raise ValueError("expected in and out sizes exactly for a kind that LoRA can be put on")
        stored = (self.out_size, self.in_size) if self.kind is Kind.LINEAR else sizes
        if self.kind is not Kind.OTHER and self.tensors.get("weight", stored) != stored:
            raise ValueError(f"expected a weight of shape {stored}")
        return self


class Catalog(_Strict):
    """All modules of a base in ``named_modules()`` order, without the root and without doubles."""

    schema_version: Literal[1] = 1
    base_digest: DigestText
    model_class: _Word
    model_type: _Word
    transformers_version: _Word
    input_embedding: _Name | None
    output_embedding: _Name | None
    tied: bool
    modules: Annotated[tuple[Module, ...], Field(min_length=1, max_length=limits.CATALOG_MODULES)]

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = {module.name for module in self.modules}
        if len(names) != len(self.modules):
            raise ValueError("expected each module once")
        for name in (self.input_embedding, self.output_embedding):
            if name is not None and name not in names:
                raise ValueError(f"expected the embedding {name} among the modules")
        return self

    def to_bytes(self) -> bytes:
        """The catalog as RFC 8785 JSON; equal bases give equal bytes on every machine."""
        return canonical_json(self.model_dump(by_alias=True, mode="json"))

    @property
    def digest(self) -> Digest:
        """SHA-256 of the canonical bytes."""
        return digest_of(self.to_bytes())


def catalog_parse(content: bytes) -> Catalog:
    """Parse a catalog.

    Raises:
        MalformedError: not strict JSON; a missing, unknown or invalid field; sizes that disagree.
    """
    json_parse(content, what="catalog", limit=limits.CATALOG_BYTES)
    try:
        return Catalog.model_validate_json(content, by_alias=True, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedError(f"catalog: {shown(where)}: {first['msg']}") from error
