"""Identities are whole or not built, and two different ones never share a key."""

from __future__ import annotations

import math
import struct
from dataclasses import fields, replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpu_worker.serving.identity import (
    Identity,
    Layout,
    cache_encoding,
    cache_key,
    root_key,
)
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import IDENTITY, A, B

# One other value for each part.
OTHERS: dict[str, Any] = {
    "format_version": 2,
    "tenant_id": UUID(int=2001),
    "base_digest": digest_of(b"other base"),
    "adapters": BASE_MARKER,
    "tokenizer_digest": digest_of(b"other tokenizer"),
    "chat_template_digest": digest_of(b"other template"),
    "dtype": "bfloat16",
    "layout": replace(IDENTITY.layout, block_tokens=32),
    "engine_version": "2",
    "library_versions": (("torch", "2.14.0"), ("transformers", "5.24.0")),
}
PARTS = [field.name for field in fields(Identity)]

digests = st.binary(min_size=1, max_size=2).map(digest_of)
scales = st.floats(0, limits.ADAPTER_SCALE, exclude_min=True)
versions = st.from_regex(r"[a-z0-9][a-z0-9.+]{0,3}", fullmatch=True)
identities = st.builds(
    Identity,
    format_version=st.integers(1, 300),
    tenant_id=st.integers(0, 3).map(lambda n: UUID(int=n)),
    base_digest=digests,
    adapters=st.one_of(st.just(BASE_MARKER), st.tuples(st.tuples(digests, scales))),
    tokenizer_digest=digests,
    chat_template_digest=digests,
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    layout=st.builds(
        Layout,
        layers=st.lists(
            st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 300)),
            min_size=1,
            max_size=3,
        ).map(tuple),
        block_tokens=st.integers(1, 64),
    ),
    engine_version=versions,
    library_versions=st.dictionaries(versions, versions, min_size=1, max_size=3).map(
        lambda found: tuple(sorted(found.items()))
    ),
)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)


def decoded(data: bytes) -> Any:
    """What was encoded: that it can be read back is why no two encodings are equal."""
    value, rest = _one(data)
    (count,) = struct.unpack(">Q", rest[1:9])
    assert rest[:1] == b"u"
    assert len(rest) == 9 + 4 * count
    return value, struct.unpack(f">{count}I", rest[9:])


def _one(data: bytes) -> tuple[Any, bytes]:
    kind, rest = data[:1], data[1:]
    if kind == b"f":
        return struct.unpack(">d", rest[:8])[0], rest[8:]
    if kind == b"i":
        return struct.unpack(">q", rest[:8])[0], rest[8:]
    (length,) = struct.unpack(">Q", rest[:8])
    rest = rest[8:]
    if kind == b"s":
        return rest[:length].decode(), rest[length:]
    assert kind == b"t"
    parts = []
    for _ in range(length):
        part, rest = _one(rest)
        parts.append(part)
    return tuple(parts), rest


@given(identities, token_lists)
def test_an_encoding_can_be_read_back(identity: Identity, tokens: tuple[int, ...]) -> None:
    (label, parts), found = decoded(cache_encoding(identity, tokens))
    assert label == "adapter-registry/cache-key"
    assert found == tokens
    layout = identity.layout
    assert parts == (
        identity.format_version,
        str(identity.tenant_id),
        identity.base_digest,
        identity.adapters,
        identity.tokenizer_digest,
        identity.chat_template_digest,
        identity.dtype,
        (layout.layers, layout.block_tokens),
        identity.engine_version,
        identity.library_versions,
    )


@given(identities, token_lists, identities, token_lists)
def test_different_identities_or_tokens_never_share_an_encoding(
    one: Identity, tokens: tuple[int, ...], two: Identity, others: tuple[int, ...]
) -> None:
    assume((one, tokens) != (two, others))
    assert cache_encoding(one, tokens) != cache_encoding(two, others)
    assert cache_key(one, tokens) != cache_key(two, others)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_in_the_keys(part: str) -> None:
    other = replace(IDENTITY, **{part: OTHERS[part]})
    assert cache_key(other, (1, 2)) != cache_key(IDENTITY, (1, 2))
    assert root_key(other) != root_key(IDENTITY)


@pytest.mark.parametrize("part", PARTS)
def test_an_identity_is_not_built_without_a_part(part: str) -> None:
    values = {name: getattr(IDENTITY, name) for name in PARTS}
    with pytest.raises(TypeError):
        Identity(**{name: value for name, value in values.items() if name != part})
    for nothing in (None, "", (), 0):
        with pytest.raises(MalformedError):
            Identity(**{**values, part: nothing})


def test_a_root_key_is_no_cache_key() -> None:
    assert root_key(IDENTITY) != cache_key(IDENTITY, ())


def test_equal_identities_have_equal_keys() -> None:
    again = replace(IDENTITY, adapters=((Digest(str(A)), 1.0),))
    assert cache_key(again, (1, 2)) == cache_key(IDENTITY, [1, 2])
    assert root_key(again) == root_key(IDENTITY)
    assert len(root_key(again)) == len(cache_key(again, ())) == 32


def test_vllm_44701_an_adapters_name_collides_with_the_cache_salt() -> None:
    # There, an adapter's name and a salt are both bare text in one list, so that one passes for
    # the other. Here the same text in another part, or moved over a border, is another key.
    texts = ["base_digest", "tokenizer_digest", "chat_template_digest"]
    for one in texts:
        for other in texts:
            moved = replace(IDENTITY, **{one: A, other: B})
            back = replace(IDENTITY, **{one: B, other: A})
            assert one == other or cache_key(moved, ()) != cache_key(back, ())
    as_adapter = replace(IDENTITY, adapters=((B, 1.0),), tokenizer_digest=A)
    as_tokenizer = replace(IDENTITY, adapters=((A, 1.0),), tokenizer_digest=B)
    assert cache_key(as_adapter, ()) != cache_key(as_tokenizer, ())
    shifted = replace(IDENTITY, engine_version="12", library_versions=(("3torch", "1"),))
    assert cache_key(shifted, ()) != cache_key(
        replace(shifted, engine_version="1", library_versions=(("23torch", "1"),)), ()
    )
    assert cache_key(shifted, ()) != cache_key(
        replace(shifted, library_versions=(("3torch1", "1"),)), ()
    )


def test_vllm_42125_a_reload_under_the_same_name_has_another_key() -> None:
    # No name enters the key: other content is another digest.
    assert cache_key(replace(IDENTITY, adapters=((B, 1.0),)), (1,)) != cache_key(IDENTITY, (1,))


@pytest.mark.parametrize(
    "adapters",
    [
        ((A, 1.0), (B, 1.0)),
        ((B, 1.0), (A, 1.0)),
        ((A, 0.5), (A, 0.5)),
        (),
        [(A, 1.0)],
        "adapter",
        (A,),
        ((A, 1.0, 1.0),),
        (("sha256:1", 1.0),),
        (("base", 1.0),),
    ],
)
def test_anything_but_one_adapter_or_the_base_is_refused(adapters: Any) -> None:
    with pytest.raises(MalformedError):
        replace(IDENTITY, adapters=adapters)


@pytest.mark.parametrize(
    "scale", [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e9, 16.1, 1, True, "1", None]
)
def test_a_scale_is_finite_positive_and_bounded(scale: Any) -> None:
    with pytest.raises(MalformedError, match="scale"):
        replace(IDENTITY, adapters=((A, scale),))


def test_the_largest_scale_is_allowed() -> None:
    identity = replace(IDENTITY, adapters=((A, limits.ADAPTER_SCALE),))
    assert identity.adapter_digest == A
    assert replace(IDENTITY, adapters=BASE_MARKER).adapter_digest == BASE_MARKER


@pytest.mark.parametrize("token", [-1, 2**32, 1.0, "1", None])
def test_what_is_no_token_has_no_key(token: Any) -> None:
    with pytest.raises(MalformedError, match="tokens"):
        cache_key(IDENTITY, (1, token))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("format_version", True),
        ("dtype", "int8"),
        ("base_digest", "sha256:" + "A" * 64),
        ("layout", (((2, 8, 8),), 64)),
        ("engine_version", "1\n2"),
        ("engine_version", "x" * 65),
        ("library_versions", (("torch",),)),
        ("library_versions", (("transformers", "5"), ("torch", "2"))),
        ("library_versions", (("torch", "2"), ("torch", "2"))),
        ("library_versions", (("torch", None),)),
    ],
)
def test_a_part_out_of_its_form_is_refused(part: str, value: Any) -> None:
    with pytest.raises(MalformedError):
        replace(IDENTITY, **{part: value})


@pytest.mark.parametrize(
    "layers",
    [
        (),
        [(2, 8, 8)],
        ((2, 8),),
        ([2, 8, 8],),
        ((0, 8, 8),),
        ((2, -1, 8),),
        ((2, 8, True),),
        ((2, 8, 8.0),),
        ((2, 8, limits.KV_LAYOUT_SIZE + 1),),
        ((2, 8, 8),) * (limits.KV_LAYERS + 1),
    ],
)
def test_a_layouts_layers_and_sizes_are_bounded(layers: Any) -> None:
    with pytest.raises(MalformedError, match="layout"):
        replace(IDENTITY.layout, layers=layers)
    with pytest.raises(MalformedError, match="block tokens"):
        replace(IDENTITY.layout, block_tokens=0)
