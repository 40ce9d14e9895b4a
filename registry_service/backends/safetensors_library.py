"""Does the safetensors library read a header as we do? Tensor data is never touched.

The library wants a file, so the header alone is written to a sparse one of the right length. It
imports numpy when it opens a file, whatever is asked of it; where numpy is missing the question
cannot be answered, and that is a fault of ours and not the adapter's.
"""

from __future__ import annotations

import tempfile

from safetensors import SafetensorError, safe_open

from registry_service.domain.errors import UnavailableError
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.manifest import WEIGHT_PATH
from registry_service.domain.safetensors_header import Header

_Read = dict[str, tuple[str, tuple[int, ...]]]


def library_disagreement(prefix: bytes, file_size: int, header: Header) -> Finding | None:
    """The finding that the library reads another header, or None.

    Raises:
        UnavailableError: the library could not be asked.
    """
    ours: _Read = {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors}
    try:
        theirs, order, metadata = _library_read(prefix[: header.data_start], file_size)
    except SafetensorError as error:
        return _disagrees("a header that the library accepts", str(error))
    except (OSError, ImportError) as error:
        raise UnavailableError("the safetensors library could not be asked; try again") from error
    if metadata != dict(header.metadata):
        return _disagrees("the same metadata from the library", "other metadata")
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return _disagrees(
                f"{name}: {ours.get(name, 'no tensor')}", f"{theirs.get(name, 'no tensor')}"
            )
    # Tensors follow each other without a hole: names in the order of their data, with dtypes and
    # shapes, are the offsets too.
    if order != list(ours):
        return _disagrees("the same offsets from the library", "another order of tensors")
    return None


def _library_read(head: bytes, file_size: int) -> tuple[_Read, list[str], dict[str, str]]:
    with tempfile.NamedTemporaryFile(prefix="header-") as file:
        file.write(head)
        file.flush()
        file.truncate(file_size)
        with safe_open(file.name, framework="numpy") as opened:
            read: _Read = {}
            for name in opened.keys():  # noqa: SIM118 - no mapping, only this method
                part = opened.get_slice(name)
                read[name] = (part.get_dtype(), tuple(part.get_shape()))
            return read, opened.offset_keys(), dict(opened.metadata() or {})


def _disagrees(expected: str, got: str) -> Finding:
    return refuse(Check.HEADER, Code.HEADER_DISAGREES, WEIGHT_PATH, expected, got)
