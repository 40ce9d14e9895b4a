"""Check 1: the file set. Allow-listed flat names, no links, bounded sizes, content as named.

The name decides what a file should be; its first and last bytes decide what it is. A pickle, an
archive or a script is refused under any name, also where another reader would accept the file.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from registry_service.domain import limits
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.manifest import (
    ADAPTER_PATHS,
    CONFIG_PATH,
    DECLARATION_PATH,
    REQUIRED_PATHS,
    TOKENIZER_PATHS,
    WEIGHT_PATH,
)
from registry_service.domain.text import shown

# Read whole to find the chat template, so they are bounded like a document.
TEMPLATE_PATHS: Final = frozenset({"chat_template.jinja", "tokenizer_config.json"})
# A zip's end record with the longest comment, so that an archive behind other data is seen.
TAIL_BYTES: Final = 22 + 65_535
HEAD_BYTES: Final = 4 * limits.KIB

_ARCHIVES: Final = (
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"PK\x07\x08",
    b"\x1f\x8b",
    b"BZh",
    b"\xfd7zXZ\x00",
    b"\x28\xb5\x2f\xfd",
    b"7z\xbc\xaf\x27\x1c",
    b"Rar!\x1a\x07",
    b"\x04\x22\x4d\x18",
)
_LFS: Final = (b"version https://git-lfs.github.com/", b"version https://hawser.github.com/")
_SCRIPTS: Final = (b"#!", b"<?php", b"\x7fELF", b"MZ", b"\xca\xfe\xba\xbe", b"\xcf\xfa\xed\xfe")
_HTML: Final = re.compile(rb"\s*<(?:!doctype|html|script)", re.IGNORECASE)
# Protocols 0 and 1 are text: a global (c) or the start of a list, dict or instance.
_OLD_PICKLE: Final = re.compile(
    rb"c[\w.]+\n[\w.]+\n|\(?(?:[dl]p?\d*\n|i[\w.]+\n[\w.]+\n)|\((?:c[\w.]+\n|S['\"])|[\]}]q[\x00-\x20]"
)


@dataclass(frozen=True, slots=True)
class FileFact:
    """What check 1 sees of a file: first ``HEAD_BYTES`` and last ``TAIL_BYTES``; size in bytes."""

    path: str
    size: int
    head: bytes
    tail: bytes
    is_link: bool


def file_set_check(
    files: Sequence[FileFact], required: frozenset[str] = REQUIRED_PATHS
) -> tuple[Finding, ...]:
    """All findings about names, links, sizes and content."""
    findings: list[Finding] = []
    if len(files) > limits.ADAPTER_FILES:
        findings.append(
            _finding(
                Code.FILE_TOO_MANY, "files", f"at most {limits.ADAPTER_FILES}", str(len(files))
            )
        )
    seen: set[str] = set()
    for file in files[: limits.ADAPTER_FILES + 1]:
        findings += _file_findings(file)
        if file.path in seen:
            findings.append(_finding(Code.FILE_NAME_FORBIDDEN, file.path, "each name once", "two"))
        seen.add(file.path)
    findings += [
        _finding(Code.FILE_MISSING, path, "this file", "none") for path in sorted(required - seen)
    ]
    return tuple(findings)


def size_limit(path: str) -> int:
    """The most bytes that an adapter's file of this name may have."""
    if path == WEIGHT_PATH:
        return limits.WEIGHT_BYTES
    if path == CONFIG_PATH:
        return limits.CONFIG_BYTES
    if path == DECLARATION_PATH:
        return limits.DECLARATION_BYTES
    if path in TEMPLATE_PATHS:
        return limits.DOC_BYTES
    return limits.TOKENIZER_FILE_BYTES if path in TOKENIZER_PATHS else limits.DOC_BYTES


def _file_findings(file: FileFact) -> list[Finding]:
    findings = []
    if file.path not in ADAPTER_PATHS:
        expected = "one of " + ", ".join(sorted(ADAPTER_PATHS))
        findings.append(_finding(Code.FILE_NAME_FORBIDDEN, file.path, expected, shown(file.path)))
    if file.is_link:
        findings.append(_finding(Code.FILE_IS_LINK, file.path, "a regular file", "a link"))
        return findings
    if file.size == 0:
        findings.append(_finding(Code.FILE_EMPTY, file.path, "at least one byte", "none"))
        return findings
    if file.size > size_limit(file.path):
        expected = f"at most {size_limit(file.path)} bytes"
        findings.append(_finding(Code.FILE_TOO_LARGE, file.path, expected, f"{file.size} bytes"))
    content = _forbidden_content(file) or _content_unlike_name(file)
    if content is not None:
        findings.append(content)
    return findings


def _forbidden_content(file: FileFact) -> Finding | None:
    head = file.head
    if head.startswith(_LFS):
        expected = "the file itself (git lfs pull)"
        return _finding(Code.CONTENT_LFS_POINTER, file.path, expected, "a Git LFS pointer")
    if head.startswith(_ARCHIVES) or head[257:262] == b"ustar":
        return _finding(Code.CONTENT_ARCHIVE, file.path, "no archive", "an archive")
    if _is_zip_tail(file.tail, file.size):
        expected = "no archive"
        return _finding(Code.CONTENT_ARCHIVE, file.path, expected, "a zip behind other data")
    if _is_pickle(file):
        return _finding(Code.CONTENT_PICKLE, file.path, "no pickle", "a pickle")
    if not _is_safetensors(head) and (head.startswith(_SCRIPTS) or _HTML.match(head)):
        return _finding(Code.CONTENT_SCRIPT, file.path, "data", "a script or program")
    return None


def _is_safetensors(head: bytes) -> bool:
    return len(head) > 8 and head[8:9] == b"{" and head[4:8] == b"\0\0\0\0"


def _is_pickle(file: FileFact) -> bool:
    # The length of a safetensors header can start with the bytes of a pickle's first opcode; the
    # zero bytes and the brace behind it cannot go on as one.
    head = file.head
    if _is_safetensors(head):
        return False
    if len(head) > 1 and head[0] == 0x80 and head[1] <= 5:
        return True
    return _OLD_PICKLE.match(head) is not None and file.tail.rstrip().endswith(b".")


def _is_zip_tail(tail: bytes, size: int) -> bool:
    """True when an end-of-central-directory record lies in the tail that a reader would accept."""
    position = tail.rfind(b"PK\x05\x06")
    while position >= 0:
        record = tail[position : position + 22]
        if len(record) == 22 and _is_zip_end(record, size - len(tail) + position):
            return True
        position = tail.rfind(b"PK\x05\x06", 0, position)
    return False


def _is_zip_end(record: bytes, position: int) -> bool:
    # Four random bytes occur in tensor data; a record whose fields agree does not.
    disk, directory_disk, here, total = (
        int.from_bytes(record[start : start + 2], "little") for start in (4, 6, 8, 10)
    )
    length, offset = (int.from_bytes(record[start : start + 4], "little") for start in (12, 16))
    single = {disk, directory_disk} <= {0, 1, 0xFFFF}
    zip64 = 0xFFFFFFFF in (length, offset)
    return single and here == total and (zip64 or length + offset <= position)


def _content_unlike_name(file: FileFact) -> Finding | None:
    path, head = file.path, file.head
    if path == WEIGHT_PATH:
        if _is_safetensors(head):
            return None
        return _finding(Code.CONTENT_UNKNOWN, path, "safetensors", "something else")
    if path == "tokenizer.model":
        # A protocol buffer whose first field is the list of pieces.
        if head.startswith(b"\n"):
            return None
        return _finding(Code.CONTENT_UNKNOWN, path, "a SentencePiece model", "something else")
    if path not in ADAPTER_PATHS:
        return None
    if not _is_text(head, whole=len(head) == file.size):
        return _finding(Code.CONTENT_UNKNOWN, path, "UTF-8 text", "other bytes")
    if path.endswith(".json") and not head.lstrip(b" \t\r\n").startswith((b"{", b"[")):
        return _finding(Code.CONTENT_UNKNOWN, path, "JSON", "other text")
    return None


def _is_text(head: bytes, *, whole: bool) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return False
    return "\0" not in text


def _finding(code: Code, where: str, expected: str, got: str) -> Finding:
    return refuse(Check.FILE_SET, code, where, expected, got)
