"""The content digest: what a safetensors file's tensors are, however the file is packed.

Order, padding and metadata of the file do not count, so that bytes packed anew have the digest they
had before. It is SHA-256 over length-prefixed parts: the format's name, the number of tensors, and
for each tensor, by name, its name, dtype, shape and bytes. Numbers are 8 bytes, little-endian.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError
from registry_service.domain.safetensors_header import Header

_FORMAT: Final = b"adapter-registry:tensor-content:v1"


def content_digest(header: Header, weights: bytes | memoryview) -> Digest:
    """The content digest of a file (all its bytes) with this header.

    Raises:
        MalformedError: the file is not as long as the header says.
    """
    if len(weights) != header.file_size:
        raise MalformedError(f"weights: expected {header.file_size} bytes, got {len(weights)}")
    view = memoryview(weights)
    state = hashlib.sha256(_part(_FORMAT) + struct.pack("<Q", len(header.tensors)))
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.name):
        shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        start, end = header.data_start + tensor.start, header.data_start + tensor.end
        state.update(_part(tensor.name.encode()) + _part(tensor.dtype.encode()) + _part(shape))
        state.update(struct.pack("<Q", end - start))
        state.update(view[start:end])
    return Digest("sha256:" + state.hexdigest())


def _part(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data
