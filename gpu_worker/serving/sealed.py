"""A file's bytes, sealed: read once into memory that is this process's alone, and never written.

What is hashed is this buffer, and tensors are views of it: a file that changes on disk afterwards,
or while it is read, changes nothing that was checked.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import UntrustedError
from registry_service.domain.safetensors_header import TensorInfo

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Sealed:
    """The bytes; ``view`` cannot be written to."""

    def __init__(self, buffer: bytearray) -> None:
        self._buffer = buffer
        self.view = memoryview(buffer).toreadonly()

    def __len__(self) -> int:
        return len(self._buffer)

    def digest(self) -> Digest:
        """The digest of the bytes."""
        return Digest("sha256:" + hashlib.sha256(self.view).hexdigest())

    def tensor(self, info: TensorInfo, data_start: int) -> Tensor:
        """A tensor that a checked header names, as a view: it keeps the buffer alive."""
        count = 1
        for dimension in info.shape:
            count *= dimension
        flat = torch.frombuffer(
            self._buffer, dtype=_DTYPES[info.dtype], count=count, offset=data_start + info.start
        )
        return flat.view(info.shape)


def sealed_read(path: Path) -> Sealed:
    """Read a file whole.

    Raises:
        UntrustedError: a link, not a plain file, over the limit, or one that changes meanwhile.
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limits.WEIGHT_BYTES:
            raise UntrustedError(f"pulled files: {path.name}: not a plain file of allowed size")
        buffer = bytearray(status.st_size)
        rest = memoryview(buffer)
        while rest:
            count = file.readinto(rest)
            if not count:
                raise UntrustedError(f"pulled files: {path.name}: shorter than it was")
            rest = rest[count:]
        return Sealed(buffer)
