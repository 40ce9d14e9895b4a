"""The content digest sees the tensors and nothing of how they are packed."""

from __future__ import annotations

import json
import struct

import pytest

from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError
from registry_service.domain.safetensors_header import header_parse
from registry_service.domain.tensor_content import content_digest

Tensors = list[tuple[str, str, tuple[int, ...], bytes]]
A = ("a.weight", "F32", (2, 3), bytes(range(24)))
B = ("b.weight", "F16", (4,), bytes(range(8)))


def packed(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, dtype, shape, data in tensors:
        end = position + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(data for *_, data in tensors)


def digest(weights: bytes) -> Digest:
    header, _ = header_parse(weights, len(weights))
    assert header is not None
    return content_digest(header, weights)


def test_order_and_metadata_change_the_file_and_not_its_content() -> None:
    files = [packed([A, B]), packed([B, A]), packed([A, B], {"format": "pt"})]
    assert len({digest_of(file) for file in files}) == 3
    assert len({digest(file) for file in files}) == 1


@pytest.mark.parametrize(
    "changed",
    [
        [A],
        [A, ("b.weights", *B[1:])],
        [A, ("b.weight", "BF16", *B[2:])],
        [A, (*B[:2], (2, 2), B[3])],
        [A, (*B[:3], B[3][:-1] + b"\xff")],
        [(*A[:3], A[3][:-1] + b"\xff"), B],
        [("b.weight", *A[1:]), ("a.weight", *B[1:])],
    ],
)
def test_whatever_a_tensor_is_counts(changed: Tensors) -> None:
    assert digest(packed(changed)) != digest(packed([A, B]))


def test_the_definition_stands() -> None:
    """Lists that were signed name this digest: another one would lose what is revoked."""
    assert digest(packed([A, B])) == (
        "sha256:ef8ab9b95f29b5e2886e5a42026c0ad2608fb395ae7e8d3c781f157224bf657c"
    )


def test_a_file_of_another_length_is_refused() -> None:
    weights = packed([A, B])
    header, _ = header_parse(weights, len(weights))
    assert header is not None
    with pytest.raises(MalformedError, match=f"expected {len(weights)} bytes"):
        content_digest(header, weights + b"x")
