"""Check 1: the file set. Allow-listed flat names, no links, bounded sizes, content as named.

The name decides what a file should be; ``content`` decides what it is. A pickle, an archive or a
script is refused under any name, also where another reader would accept the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from registry_service.domain import limits
from registry_service.domain.content import (
    forbidden_content,
    is_json_text,
    is_safetensors,
    is_sentencepiece,
    is_text,
)
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
from registry_service.domain.tokenizer_files import ARGUMENT_PATHS

TEMPLATE_PATHS: Final = frozenset({"chat_template.jinja", "tokenizer_config.json"})
# Read whole, so they are bounded like a document.
WHOLE_PATHS: Final = TEMPLATE_PATHS | ARGUMENT_PATHS
# A zip's end record with the longest comment, so that an archive behind other data is seen.
# An archive's end record has a comment of up to 64 KiB behind it, and torch's reader looks some
# pages further than that.
TAIL_BYTES: Final = 128 * limits.KIB
HEAD_BYTES: Final = 32 * limits.KIB + 8


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
    if path in WHOLE_PATHS:
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
    sniffed = forbidden_content(file.head, file.tail, file.size)
    if sniffed is None:
        return None
    code, name = sniffed
    return _finding(code, file.path, "safetensors, JSON or text", name)


def _content_unlike_name(file: FileFact) -> Finding | None:
    path, head, tail = file.path, file.head, file.tail
    if path not in ADAPTER_PATHS:
        return None
    if path == WEIGHT_PATH:
        is_right, expected = is_safetensors(head), "safetensors"
    elif path == "tokenizer.model":
        is_right, expected = is_sentencepiece(head), "a SentencePiece model"
    else:
        is_right, expected = is_text(head, tail, file.size), "UTF-8 text"
        if is_right and path.endswith(".json"):
            is_right, expected = is_json_text(head, tail), "a JSON object or list"
    if is_right:
        return None
    return _finding(Code.CONTENT_UNKNOWN, path, expected, "something else")


def _finding(code: Code, where: str, expected: str, got: str) -> Finding:
    return refuse(Check.FILE_SET, code, where, expected, got)
