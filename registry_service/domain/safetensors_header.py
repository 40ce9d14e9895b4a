"""A strict reader of a safetensors header; it never sees tensor data.

The library accepts duplicate tensor names (the last wins), padding of any length, empty and
hostile names, unaligned and empty tensors. Each is refused here, since two readers that disagree
about a file would load different tensors from it. Format: safetensors README, "Format".
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.canonical import too_deep, without_strings
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.text import shown

LENGTH_BYTES: Final = 8
HEADER_PREFIX_BYTES: Final = LENGTH_BYTES + limits.SAFETENSORS_HEADER_BYTES
ALLOWED_DTYPES: Final = ("F32", "F16", "BF16")

# Bytes per element of what the format knows; all but ALLOWED_DTYPES are refused by name.
_DTYPE_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
_WHERE: Final = "adapter_model.safetensors"
_FIELDS: Final = ["data_offsets", "dtype", "shape"]
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_PADDING: Final = re.compile(rb"[\t\r\n]|  ")
_MAX_PAD: Final = 7
# The header, a tensor, its shape.
_DEPTH: Final = 3


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor; ``start`` and ``end`` are byte offsets behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """All tensors in file order. ``data_start`` and ``file_size`` are in bytes."""

    tensors: tuple[TensorInfo, ...]
    metadata: tuple[tuple[str, str], ...]
    data_start: int
    file_size: int


class _RefusalError(Exception):
    """Carries the one finding that makes the rest unreadable."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.got)
        self.finding = finding


class _Object(tuple[tuple[str, Any], ...]):
    """A JSON object as its pairs, so that a repeated key is seen."""

    __slots__ = ()


def header_end(start: bytes) -> int:
    """Where a header ends, from the file's first ``LENGTH_BYTES``: all that the checks read of it.

    A length over the limit is refused for itself, so nothing more is read for it.
    """
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    return LENGTH_BYTES + (length if length <= limits.SAFETENSORS_HEADER_BYTES else 0)


def header_parse(prefix: bytes, file_size: int) -> tuple[Header | None, tuple[Finding, ...]]:
    """Read the header from a file's first ``header_end`` bytes, or more of them.

    The header is None when it cannot be read; with findings about single tensors it is returned,
    so that the structure check can still say what is wrong with them.
    """
    try:
        text, data_start = _header_text(prefix, file_size)
        pairs = _json_pairs(text)
        metadata = _metadata([value for name, value in pairs if name == "__metadata__"])
        entries = [pair for pair in pairs if pair[0] != "__metadata__"]
        _count_check(entries)
        findings = [*_duplicates(entries), *_names(entries)]
        tensors = [_tensor(name, value) for name, value in entries]
    except _RefusalError as refusal:
        return None, (refusal.finding,)
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.end))
    findings += [finding for tensor in ordered for finding in _tensor_findings(tensor)]
    findings += _layout(ordered, file_size - data_start)
    if any(finding.code is Code.TENSOR_DUPLICATE for finding in findings):
        return None, tuple(findings)
    return Header(tuple(ordered), metadata, data_start, file_size), tuple(findings)


def _header_text(prefix: bytes, file_size: int) -> tuple[str, int]:
    if len(prefix) < LENGTH_BYTES or file_size < LENGTH_BYTES:
        raise _malformed("8 bytes of header length", f"{file_size} bytes in all")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    # The length alone is enough to refuse: nothing of the header has to be read for it.
    if length > limits.SAFETENSORS_HEADER_BYTES:
        raise _RefusalError(
            refuse(
                Check.HEADER,
                Code.HEADER_TOO_LARGE,
                _WHERE,
                f"a header of at most {limits.SAFETENSORS_HEADER_BYTES} bytes",
                f"{length} bytes",
            )
        )
    end = LENGTH_BYTES + length
    if end > file_size or end > len(prefix):
        raise _malformed(f"a header of {length} bytes", f"a file of {file_size} bytes")
    if end % 8:
        raise _malformed("tensor data that starts at a multiple of 8 bytes", f"byte {end}")
    raw = prefix[LENGTH_BYTES:end]
    if not raw.startswith(b"{"):
        raise _malformed("a header that starts with {", shown(raw[:8].decode("latin-1")))
    body = raw.rstrip(b" ")
    if len(raw) - len(body) > _MAX_PAD or _PADDING.search(without_strings(body)):
        raise _malformed(f"at most {_MAX_PAD} spaces of padding, at the end", "more padding")
    if too_deep(body, _DEPTH):
        raise _malformed(f"at most {_DEPTH} levels of nesting", "more")
    try:
        return body.decode("utf-8"), end
    except UnicodeDecodeError as error:
        raise _malformed("UTF-8", f"other bytes at {error.start} of the header") from error


def _json_pairs(text: str) -> _Object:
    try:
        value = json.loads(
            text,
            object_pairs_hook=_Object,
            parse_int=_integer,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except ValueError as error:
        raise _malformed("strict JSON", shown(str(error))) from error
    if not isinstance(value, _Object):
        raise _malformed("a JSON object", type(value).__name__)
    return value


def _integer(digits: str) -> int:
    if digits.startswith("-") or len(digits) > 16:
        raise ValueError(f"integer {digits[:20]} is negative or too large")
    return int(digits)


def _no_number(text: str) -> Any:
    raise ValueError(f"number {text[:20]} is not an integer")


def _metadata(values: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    if not values:
        return ()
    if len(values) > 1:
        raise _malformed("__metadata__ once", f"{len(values)} times")
    pairs = values[0]
    if not isinstance(pairs, _Object) or not all(isinstance(text, str) for _, text in pairs):
        raise _malformed("__metadata__ of text values", "another form")
    if len({name for name, _ in pairs}) != len(pairs):
        raise _malformed("each key of __metadata__ once", "a key twice")
    chars = sum(len(name) + len(text) for name, text in pairs)
    if chars > limits.METADATA_CHARS:
        raise _malformed(f"__metadata__ of {limits.METADATA_CHARS} characters", f"{chars}")
    if not all(name.isprintable() and text.isprintable() for name, text in pairs):
        raise _malformed("printable __metadata__", "control characters")
    return tuple(pairs)


def _count_check(entries: Sequence[tuple[str, Any]]) -> None:
    if not 1 <= len(entries) <= limits.TENSORS:
        raise _RefusalError(
            refuse(
                Check.HEADER,
                Code.TENSOR_COUNT,
                _WHERE,
                f"1 to {limits.TENSORS} tensors",
                str(len(entries)),
            )
        )


def _duplicates(entries: Sequence[tuple[str, Any]]) -> list[Finding]:
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name, _ in entries:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return [
        refuse(Check.HEADER, Code.TENSOR_DUPLICATE, name, "each name once", "twice or more")
        for name in twice
    ]


def _names(entries: Sequence[tuple[str, Any]]) -> list[Finding]:
    expected = f"up to {limits.TENSOR_NAME_CHARS} of A-Z a-z 0-9 _ - in parts joined by single dots"
    return [
        refuse(Check.HEADER, Code.TENSOR_NAME, name or "(empty)", expected, shown(name))
        for name, _ in entries
        if len(name) > limits.TENSOR_NAME_CHARS or not _NAME.fullmatch(name)
    ]


def _tensor(name: str, value: Any) -> TensorInfo:
    if not isinstance(value, _Object) or sorted(key for key, _ in value) != _FIELDS:
        raise _malformed("exactly dtype, shape and data_offsets", "other fields", name)
    fields = dict(value)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise _malformed("a dtype of the format", shown(dtype), name)
    if not _integers(shape) or len(shape) > limits.TENSOR_DIMS:
        raise _malformed(f"a shape of at most {limits.TENSOR_DIMS} sizes", shown(shape), name)
    if not _integers(offsets) or len(offsets) != 2:
        raise _malformed("data_offsets [start, end]", shown(offsets), name)
    return TensorInfo(name, dtype, tuple(shape), offsets[0], offsets[1])


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _tensor_findings(tensor: TensorInfo) -> list[Finding]:
    findings = []
    if tensor.dtype not in ALLOWED_DTYPES:
        findings.append(
            refuse(
                Check.HEADER,
                Code.TENSOR_DTYPE,
                tensor.name,
                " or ".join(ALLOWED_DTYPES),
                tensor.dtype,
            )
        )
    size = math.prod(tensor.shape) * _DTYPE_BYTES[tensor.dtype]
    if size != tensor.end - tensor.start or size == 0:
        findings.append(
            _off_layout(
                tensor.name,
                f"{size} bytes, and at least one, for {tensor.dtype} of shape {tensor.shape}",
                f"{tensor.end - tensor.start} bytes",
            )
        )
    if tensor.start % _DTYPE_BYTES[tensor.dtype]:
        findings.append(
            _off_layout(tensor.name, "an offset aligned to its dtype", f"byte {tensor.start}")
        )
    return findings


def _layout(ordered: Sequence[TensorInfo], data_size: int) -> list[Finding]:
    """Tensors follow each other from the first data byte to the last: no holes, no overlaps."""
    position = 0
    for tensor in ordered:
        if tensor.start != position:
            return [
                _off_layout(tensor.name, f"to start at byte {position}", f"byte {tensor.start}")
            ]
        position = tensor.end
    if position != data_size:
        return [_off_layout(_WHERE, f"{position} bytes of tensor data", f"{data_size} bytes")]
    return []


def _off_layout(where: str, expected: str, got: str) -> Finding:
    return refuse(Check.HEADER, Code.TENSOR_LAYOUT, where, expected, got)


def _malformed(expected: str, got: str, where: str = _WHERE) -> _RefusalError:
    return _RefusalError(refuse(Check.HEADER, Code.HEADER_MALFORMED, where, expected, got))
