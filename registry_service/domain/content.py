"""What a file is, by its bytes: never by its name, and never by a declared media type.

Only the first and last bytes are looked at. That is enough for every reader that finds its format
there; a format that is found by searching the middle of a file is left to the allow-list, since
what is not safetensors, JSON, text or a SentencePiece model is refused anyway.
"""

from __future__ import annotations

import codecs
import re
from typing import Final

from registry_service.domain.findings import Code
from registry_service.domain.pickle_stream import Stream, pickle_stream

_ARCHIVES: Final = (
    (b"PK\x03\x04", "a zip"),
    (b"PK\x05\x06", "an empty zip"),
    (b"PK\x07\x08", "a split zip"),
    (b"\x1f\x8b", "gzip"),
    (b"\x1f\x9d", "compress (.Z)"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"]\x00\x00", "lzma"),
    (b"LZIP", "lzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x37\xa4\x30\xec", "a zstd dictionary"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x02\x21\x4c\x18", "lz4"),
    (b"\xff\x06\x00\x00sNaPpY", "snappy"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!\x1a\x07", "rar"),
    (b"MSCF\x00\x00\x00\x00", "a cabinet"),
    (b"!<arch>\n", "an ar archive"),
    (b"070701", "cpio"),
    (b"070702", "cpio"),
    (b"070707", "cpio"),
)
# Two bytes only, which a safetensors header's length may have too.
_ZLIB: Final = (b"x\x01", b"x\x9c", b"x\xda")
# A frame that a zstd or lz4 reader skips may stand before the real one: 0x184D2A50 to 5F.
_SKIPPABLE: Final = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_LFS: Final = (b"version https://git-lfs.github.com/", b"version https://hawser.github.com/")
_PROGRAMS: Final = (
    (b"#!", "a script"),
    (b"<?php", "a script"),
    (b"\x7fELF", "an ELF program"),
    (b"MZ", "a Windows program"),
    (b"\xca\xfe\xba\xbe", "a Mach-O or Java program"),
    (b"\xfe\xed\xfa\xce", "a Mach-O program"),
    (b"\xfe\xed\xfa\xcf", "a Mach-O program"),
    (b"\xce\xfa\xed\xfe", "a Mach-O program"),
    (b"\xcf\xfa\xed\xfe", "a Mach-O program"),
    (b"\x00asm", "WebAssembly"),
)
_PAGE: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype|html|script)", re.IGNORECASE)
_FORMATS: Final = (
    (b"GGUF", "GGUF"),
    (b"FUGG", "GGUF"),
    (b"ggml", "GGML"),
    (b"lmgg", "GGML"),
    (b"\x93NUMPY", "a NumPy array"),
)
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
_HDF5_OFFSETS: Final = (0, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
_TAR_BLOCK: Final = 512
_ZIP_END: Final = b"PK\x05\x06"
_ZIP_END_BYTES: Final = 22
_ZIP64_LOCATOR: Final = b"PK\x06\x07"
_ZIP64_LOCATOR_BYTES: Final = 20

Sniffed = tuple[Code, str]


def forbidden_content(head: bytes, tail: bytes, size: int) -> Sniffed | None:
    """What may stand in no file of an adapter, whatever its name: code and name, or None.

    ``head`` and ``tail`` are the first and last bytes of a file of ``size`` bytes.
    """
    if head.startswith(_LFS):
        return Code.CONTENT_LFS_POINTER, "a Git LFS pointer (run git lfs pull)"
    archive = _archive(head, tail, size)
    if archive is not None:
        return Code.CONTENT_ARCHIVE, archive
    pickle = _pickle(head, size)
    if pickle is not None:
        return Code.CONTENT_PICKLE, pickle
    if is_safetensors(head):
        name = "HDF5 behind a safetensors header" if _is_hdf5(head) else None
        return None if name is None else (Code.CONTENT_UNKNOWN, name)
    return _program_or_model(head)


def is_safetensors(head: bytes) -> bool:
    """True when a short length and the brace of a JSON object begin the file."""
    return len(head) > 8 and head[8:9] == b"{" and head[4:8] == b"\0\0\0\0"


def is_text(head: bytes, tail: bytes, size: int) -> bool:
    """True when head and tail are UTF-8 without NUL. Either may be cut inside a character."""
    whole = len(head) == size
    continued = tail if len(tail) == size else re.sub(rb"\A[\x80-\xbf]{1,3}", b"", tail)
    try:
        texts = (
            codecs.getincrementaldecoder("utf-8")().decode(head, final=whole),
            continued.decode("utf-8"),
        )
    except UnicodeDecodeError:
        return False
    return not any("\0" in text for text in texts)


def is_json_text(head: bytes, tail: bytes) -> bool:
    """True when text begins and ends as a JSON object or list does."""
    space = b" \t\r\n"
    pair = head.lstrip(space)[:1] + tail.rstrip(space)[-1:]
    return pair in (b"{}", b"[]")


def is_sentencepiece(head: bytes) -> bool:
    """True for a SentencePiece model: field 1 is a piece of text (1), score (2) and kind (3).

    Source: sentencepiece_model.proto, ``ModelProto.SentencePiece``. Other protocol buffers
    (ONNX, TensorFlow graphs) have other fields in these places.
    """
    if len(head) < 4 or head[0] != 0x0A or head[2] != 0x0A:
        return False
    piece_end, text_end = 2 + head[1], 4 + head[3]
    if head[1] > 0x7F or head[3] > 0x7F or text_end > piece_end:
        return False
    score_or_kind = head[text_end : text_end + 1] in (b"\x15", b"\x18")
    return text_end == piece_end or score_or_kind


def _archive(head: bytes, tail: bytes, size: int) -> str | None:
    for magic, name in _ARCHIVES:
        if head.startswith(magic):
            return name
    if head.startswith(_ZLIB) and not is_safetensors(head):
        return "zlib"
    if _SKIPPABLE.match(head):
        return "zstd or lz4"
    if _is_tar(head):
        return "a tar"
    return "a zip behind other data" if _has_zip_end(tail, size) else None


def _is_tar(head: bytes) -> bool:
    """True when the first block is a tar header: by its magic, or by its checksum (v7 has none)."""
    if head[257:262] == b"ustar":
        return True
    block = head[:_TAR_BLOCK]
    field = block[148:156].strip(b" \0")
    if len(block) < _TAR_BLOCK or not re.fullmatch(rb"[0-7]+", field):
        return False
    # The checksum's own eight bytes count as spaces.
    return int(field, 8) == sum(block) - sum(block[148:156]) + 8 * 0x20


def _has_zip_end(tail: bytes, size: int) -> bool:
    """True when an end-of-central-directory record lies in the tail that a reader would accept."""
    position = tail.rfind(_ZIP_END)
    while position >= 0:
        record = tail[position : position + _ZIP_END_BYTES]
        locator = tail[max(0, position - _ZIP64_LOCATOR_BYTES) : position]
        if len(record) == _ZIP_END_BYTES and (
            locator.startswith(_ZIP64_LOCATOR) or _is_zip_end(record, size - len(tail) + position)
        ):
            return True
        position = tail.rfind(_ZIP_END, 0, position)
    return False


def _is_zip_end(record: bytes, position: int) -> bool:
    # Four random bytes occur in tensor data; a directory that fits before its end record does not.
    # Readers look at nothing else: disk numbers and counts may be anything.
    length, offset = (int.from_bytes(record[start : start + 4], "little") for start in (12, 16))
    return 0xFFFFFFFF in (length, offset) or length + offset <= position


def _pickle(head: bytes, size: int) -> str | None:
    stream = pickle_stream(head, size)
    if is_safetensors(head):
        # Protocol numbers occur among header lengths; what counts is where the opcodes lead.
        if stream is Stream.CODE:
            return "a pickle that is safetensors too"
        if stream is Stream.OPEN:
            length = int.from_bytes(head[:8], "little")
            return f"a header of {length} bytes, which a pickle reader skips; add a metadata key"
        return None
    begins = len(head) > 1 and head[0] == 0x80 and head[1] <= 5
    return "a pickle" if begins or stream is not Stream.NONE else None


def _is_hdf5(head: bytes) -> bool:
    return any(head[offset : offset + 8] == _HDF5 for offset in _HDF5_OFFSETS)


def _program_or_model(head: bytes) -> Sniffed | None:
    for magic, name in _PROGRAMS:
        if head.startswith(magic):
            return Code.CONTENT_SCRIPT, name
    if _PAGE.match(head):
        return Code.CONTENT_SCRIPT, "a web page"
    for magic, name in _FORMATS:
        if head.startswith(magic):
            return Code.CONTENT_UNKNOWN, name
    return (Code.CONTENT_UNKNOWN, "HDF5") if _is_hdf5(head) else None
