"""What a piece of KV was made under, and the keys that follow from it.

KV is equal only where everything that shaped it is equal: who it belongs to, the base, the
adapters with their scales and order, how text became tokens, how numbers are kept, and the code
that computed them. An ``Identity`` holds all of these or is not built; a key covers all of it.

Keys are SHA-256 over a typed, length-prefixed encoding, so that two different identities or token
lists never share an encoding: no name can be read as another field, and no two fields run together.
Pure: no I/O, clock, threads or torch.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias
from uuid import UUID

from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown
from registry_service.trust.routing_context import BASE_MARKER

FORMAT_VERSION: Final = 1
"""Of keys, blocks and slot pages. Raised whenever what they hold or mean changes; then none that
was made before is used again."""

ENGINE_VERSION: Final = "2"
"""Of the engine's arithmetic. Raised whenever it computes KV in another way."""

Adapters: TypeAlias = tuple[tuple[Digest, float], ...] | Digest
"""The ordered (adapter digest, scale) list, or ``BASE_MARKER`` for the base alone."""

_CACHE_KEY: Final = "adapter-registry/cache-key"
_ROOT_KEY: Final = "adapter-registry/root-key"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_DTYPES: Final = ("float32", "bfloat16", "float16")
_Part: TypeAlias = "str | int | float | tuple[_Part, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How KV is laid out: for each layer its heads, and the sizes of a key and of a value.

    ``block_tokens`` bounds how many tokens of a prompt are computed together.

    Raises:
        MalformedError: no layers, or a size out of bounds.
    """

    layers: tuple[tuple[int, int, int], ...]
    block_tokens: int

    def __post_init__(self) -> None:
        _whole(self.block_tokens, "layout: block tokens", limits.KV_LAYOUT_SIZE)
        if not isinstance(self.layers, tuple) or not 0 < len(self.layers) <= limits.KV_LAYERS:
            raise MalformedError(f"layout: expected 1 to {limits.KV_LAYERS} layers")
        for layer in self.layers:
            if not isinstance(layer, tuple) or len(layer) != 3:
                raise MalformedError("layout: expected heads, key size and value size of a layer")
            for size in layer:
                _whole(size, "layout: heads and sizes", limits.KV_LAYOUT_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything but the tokens that KV depends on.

    ``adapters`` has exactly one element until combinations are admitted.

    Raises:
        MalformedError: a part that is empty, of another type, or out of its bounds.
    """

    format_version: int
    tenant_id: UUID
    base_digest: Digest
    adapters: Adapters
    tokenizer_digest: Digest
    chat_template_digest: Digest
    dtype: str
    layout: Layout
    engine_version: str
    library_versions: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _whole(self.format_version, "identity: format version", 2**31)
        if not isinstance(self.tenant_id, UUID) or not isinstance(self.layout, Layout):
            raise MalformedError("identity: expected a tenant's UUID and a layout")
        for name in ("base_digest", "tokenizer_digest", "chat_template_digest"):
            digest_parse(getattr(self, name), f"identity: {name}")
        adapters_check(self.adapters)
        if self.dtype not in _DTYPES:
            raise MalformedError(
                f"identity: dtype: expected one of {', '.join(_DTYPES)}, got {shown(self.dtype)}"
            )
        _name(self.engine_version, "engine version")
        _libraries_check(self.library_versions)

    @property
    def adapter_digest(self) -> Digest:
        """The one adapter's digest, or ``BASE_MARKER``."""
        return self.adapters if isinstance(self.adapters, str) else self.adapters[0][0]


def adapters_check(adapters: object) -> None:
    """Refuse what is neither the base marker nor exactly one (digest, scale).

    Raises:
        MalformedError: none, two or more, or a scale that is not finite, not above 0 or over
            ``limits.ADAPTER_SCALE``.
    """
    if isinstance(adapters, str):
        if adapters != BASE_MARKER:
            raise MalformedError(f"adapters: expected a list or {BASE_MARKER}, got text")
        return
    if not isinstance(adapters, tuple) or len(adapters) != 1:
        got = len(adapters) if isinstance(adapters, tuple) else type(adapters).__name__
        raise MalformedError(
            f"adapters: expected exactly one, or {BASE_MARKER}, got {got}; "
            "combinations are not admitted"
        )
    if not isinstance(adapters[0], tuple) or len(adapters[0]) != 2:
        raise MalformedError("adapters: expected a pair of digest and scale")
    digest, scale = adapters[0]
    digest_parse(digest, "adapters: digest")
    if not isinstance(scale, float) or not math.isfinite(scale):
        raise MalformedError(f"adapters: scale: expected a finite number, got {shown(scale)}")
    if not 0.0 < scale <= limits.ADAPTER_SCALE:
        raise MalformedError(
            f"adapters: scale: expected above 0 and at most {limits.ADAPTER_SCALE}, got {scale}"
        )


def cache_key(identity: Identity, tokens: Sequence[int]) -> bytes:
    """The key of exactly these tokens under this identity, 32 bytes.

    Raises:
        MalformedError: a token that is no whole number from 0 to 2^32 − 1.
    """
    return hashlib.sha256(cache_encoding(identity, tokens)).digest()


def root_key(identity: Identity) -> bytes:
    """The key that the chain of an identity's prefix blocks starts from, 32 bytes."""
    return hashlib.sha256(_encode((_ROOT_KEY, _parts(identity)))).digest()


def cache_encoding(identity: Identity, tokens: Sequence[int]) -> bytes:
    """What ``cache_key`` hashes: label, identity, tokens. Injective.

    Raises:
        MalformedError: a token that is no whole number from 0 to 2^32 − 1.
    """
    return _encode((_CACHE_KEY, _parts(identity))) + tokens_encode(tokens)


def tokens_encode(tokens: Sequence[int]) -> bytes:
    """Tokens as a count and four bytes each.

    Raises:
        MalformedError: a token that is no whole number from 0 to 2^32 − 1.
    """
    try:
        return b"u" + struct.pack(f">Q{len(tokens)}I", len(tokens), *tokens)
    except struct.error as error:
        raise MalformedError("tokens: expected whole numbers from 0 to 2^32 − 1") from error


def _parts(identity: Identity) -> _Part:
    return (
        identity.format_version,
        str(identity.tenant_id),
        identity.base_digest,
        identity.adapters,
        identity.tokenizer_digest,
        identity.chat_template_digest,
        identity.dtype,
        (identity.layout.layers, identity.layout.block_tokens),
        identity.engine_version,
        identity.library_versions,
    )


def _encode(part: _Part) -> bytes:
    """Type, length, value; a tuple's length is its number of parts."""
    if isinstance(part, str):
        text = part.encode()
        return b"s" + struct.pack(">Q", len(text)) + text
    if isinstance(part, float):
        return b"f" + struct.pack(">d", part)
    if isinstance(part, int):
        return b"i" + struct.pack(">q", part)
    return b"t" + struct.pack(">Q", len(part)) + b"".join(_encode(inner) for inner in part)


def _whole(value: object, what: str, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise MalformedError(f"{what}: expected 1 to {most}, got {shown(value)}")


def _name(value: object, what: str) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise MalformedError(f"identity: {what}: expected a version or name, got {shown(value)}")


def _libraries_check(libraries: object) -> None:
    if not isinstance(libraries, tuple) or not libraries:
        raise MalformedError("identity: library versions: expected at least one")
    for pair in libraries:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise MalformedError("identity: library versions: expected pairs of name and version")
        _name(pair[0], "library")
        _name(pair[1], "library version")
    names = [name for name, _ in libraries]
    if names != sorted(set(names)):
        raise MalformedError("identity: library versions: expected sorted names, each once")
