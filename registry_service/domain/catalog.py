"""A base's catalog: its modules with kind and sizes, made once per base digest on a worker.

With the adapter's config it gives every tensor that the adapter's file may hold, so a wrong
catalog would void the structure check: it is parsed strictly, and two workers must agree on it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json, integer_check, json_parse
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
    CONV2D = "conv2d"
    EMBEDDING = "embedding"
    # A linear that its parent reads the weights of and never calls: an adapter on it does nothing.
    INERT = "inert"
    OTHER = "other"


class _Strict(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, validate_by_name=True
    )


class Module(_Strict):
    """One module. Sizes are W's (in, out); an embedding's are (rows, width).

    ``kernel`` and ``groups`` are a convolution's. ``transposed`` says that the module's 3-D
    parameters are stored as (experts, in, out) and not as (experts, out, in). ``parameters`` names
    those of ``tensors`` that are parameters; the others are saved buffers.
    """

    name: _Name
    kind: Kind
    class_name: _Word
    in_size: _Size | None = None
    out_size: _Size | None = None
    kernel: Annotated[tuple[_Size, ...], Field(max_length=2)] = ()
    groups: _Size = 1
    transposed: bool = False
    parameters: tuple[_Name, ...] = ()
    tensors: dict[_Name, _Shape] = {}

    @property
    def last_name(self) -> str:
        """The last component of the name."""
        return self.name.rpartition(".")[2]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        sizes = (self.in_size, self.out_size)
        bare = self.kind in (Kind.INERT, Kind.OTHER)
        if bare != (sizes == (None, None)) or sizes.count(None) == 1:
            raise ValueError("expected in and out sizes exactly for a kind that LoRA can be put on")
        if (self.kind is Kind.CONV2D) != (len(self.kernel) == 2):
            raise ValueError("expected a kernel of two sizes exactly for a convolution")
        stored = self._stored()
        if not bare and self.tensors.get("weight", stored) != stored:
            raise ValueError(f"expected a weight of shape {stored}")
        if not set(self.parameters) <= self.tensors.keys():
            raise ValueError("expected every parameter among the tensors")
        return self

    def _stored(self) -> tuple[int, ...]:
        in_size, out_size = self.in_size or 0, self.out_size or 0
        if self.kind is Kind.LINEAR:
            return out_size, in_size
        if self.kind is Kind.CONV2D:
            return out_size, in_size // self.groups, *self.kernel
        return in_size, out_size


class Catalog(_Strict):
    """All modules of a base in ``named_modules()`` order, without the root and without doubles.

    ``tied_modules`` share the input embedding's weight; ``aliases`` gives for a second name of a
    module object its first. ``quantization`` is how the base is stored (``none`` if it is not);
    sizes are those of the unquantized model, which LoRA is shaped after.
    """

    schema_version: Annotated[Literal[1], BeforeValidator(integer_check)] = 1
    base_digest: DigestText
    model_class: _Word
    model_type: _Word
    transformers_version: _Word
    quantization: _Word = "none"
    input_embedding: _Name | None
    output_embedding: _Name | None
    tied_modules: tuple[_Name, ...] = ()
    aliases: dict[_Name, _Name] = {}
    modules: Annotated[tuple[Module, ...], Field(min_length=1, max_length=limits.CATALOG_MODULES)]

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        names = {module.name for module in self.modules}
        if len(names) != len(self.modules):
            raise ValueError("expected each module once")
        for name in (self.input_embedding, self.output_embedding, *self.tied_modules):
            if name is not None and name not in names:
                raise ValueError(f"expected the embedding {name} among the modules")
        if not names >= {*self.aliases.values()} or not names.isdisjoint(self.aliases):
            raise ValueError("expected aliases to name a module each, by a name of their own")
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
