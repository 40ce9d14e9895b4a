"""What an adapter's tokenizer files may not say: they are arguments of the tokenizer's class.

transformers hands every field of ``tokenizer_config.json``, and in older folders every field of
``special_tokens_map.json``, to the class that the config names. ``auto_map`` brings remote code
in, ``init_inputs`` are arguments without a name, and a field whose name ends in ``_file`` is opened
as it stands by releases before 5.24.
Source: ``PreTrainedTokenizerBase._from_pretrained`` and ``AutoTokenizer.from_pretrained``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.canonical import json_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.text import shown

ARGUMENT_PATHS: Final = frozenset({"tokenizer_config.json", "special_tokens_map.json"})
# transformers writes int(1e30) for "no limit" into model_max_length.
LARGEST_INTEGER: Final = 10**31
_REMOTE_CODE: Final = frozenset({"auto_map", "trust_remote_code"})
_CLASS: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,127}")


def tokenizer_file_check(path: str, content: bytes) -> tuple[Finding, ...]:
    """Findings about one of ``ARGUMENT_PATHS``."""
    try:
        document = json_parse(
            content, what=path, limit=limits.DOC_BYTES, max_integer=LARGEST_INTEGER
        )
    except MalformedError as error:
        return (_finding(Code.CONTENT_UNKNOWN, path, "strict JSON", error.message),)
    if not isinstance(document, dict):
        got = type(document).__name__
        return (_finding(Code.CONTENT_UNKNOWN, path, "a JSON object", got),)
    fields = [
        *((name, "no such field anywhere; it loads remote code") for name in _remote(document)),
        *((name, "null; a file is found by its own name") for name in _opened(document)),
        *((name, "the name of a class, or null") for name in _odd_classes(document)),
    ]
    if document.get("init_inputs"):
        fields.append(("init_inputs", "none; arguments have names"))
    return tuple(
        _finding(
            Code.CONFIG_FIELD_FORBIDDEN,
            f"{path}: {name}",
            expected,
            shown(document.get(name, "inside another field")),
        )
        for name, expected in fields
    )


def _remote(document: dict[str, Any]) -> list[str]:
    return sorted(_REMOTE_CODE & {*_keys(document)})


def _keys(value: Any) -> Iterator[str]:
    # The parser has bounded the depth.
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _keys(item)


def _opened(document: dict[str, Any]) -> list[str]:
    return sorted(n for n, value in document.items() if n.endswith("_file") and value is not None)


def _odd_classes(document: dict[str, Any]) -> list[str]:
    return sorted(
        name
        for name, value in document.items()
        if name.endswith("_class")
        and value is not None
        and not (isinstance(value, str) and _CLASS.fullmatch(value))
    )


def _finding(code: Code, where: str, expected: str, got: str) -> Finding:
    return refuse(Check.FILE_SET, code, where, expected, got)
