"""JSON that the standard parser takes and no reader of ours may: one spoiled way at a time.

Every document of an adapter goes through each of them: config, declaration, manifest, catalog and
tokenizer files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import sample_adapter as sample
from bounded import run_bounded

from registry_service.domain import limits
from registry_service.domain.catalog import catalog_parse
from registry_service.domain.declaration import declaration_parse
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError
from registry_service.domain.manifest import (
    FileEntry,
    adapter_manifest_build,
    manifest_parse,
    media_type_of,
)
from registry_service.domain.peft_config import peft_config_parse
from registry_service.domain.tokenizer_files import tokenizer_file_check

Reader = Callable[[bytes], str | None]


def raising(parse: Callable[[bytes], Any]) -> Reader:
    """Why a parser that raises refuses, or None."""

    def why(content: bytes) -> str | None:
        try:
            parse(content)
        except MalformedError as error:
            return error.message
        return None

    return why


def config_reason(content: bytes) -> str | None:
    config, findings = peft_config_parse(content)
    assert (config is None) == bool(findings)
    malformed = [f.got for f in findings if f.code == "CONFIG_MALFORMED"]
    return malformed[0] if malformed else None


def tokenizer_reason(content: bytes) -> str | None:
    findings = tokenizer_file_check("tokenizer_config.json", content)
    unknown = [f.got for f in findings if f.code == "CONTENT_UNKNOWN"]
    return unknown[0] if unknown else None


ENTRIES = [
    FileEntry(path, digest_of(data), len(data), media_type_of(path))
    for path, data in sample.files().items()
]
READERS: dict[str, tuple[bytes, Reader]] = {
    "config": (json.dumps(sample.config()).encode(), config_reason),
    "declaration": (json.dumps(sample.declaration()).encode(), raising(declaration_parse)),
    "manifest": (
        adapter_manifest_build("support-zh", ENTRIES, "fp32").manifest,
        raising(manifest_parse),
    ),
    "catalog": (sample.catalog().to_bytes(), raising(catalog_parse)),
    "tokenizer": (b'{"tokenizer_class": "X", "a": {"b": [1]}}', tokenizer_reason),
}


def with_field(field: str) -> Callable[[bytes], bytes]:
    """Adds a field's text behind the first brace."""
    return lambda content: content.replace(b"{", b"{" + field.encode() + b",", 1)


def first_key(content: bytes) -> str:
    return next(iter(json.loads(content)))


def key_twice(content: bytes) -> bytes:
    return with_field(f'"{first_key(content)}":1')(content)


def key_twice_escaped(content: bytes) -> bytes:
    key = first_key(content)
    return with_field(f'"\\u{ord(key[0]):04x}{key[1:]}":1')(content)


SPOILED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a key twice": (key_twice, "occurs twice"),
    "a key twice by an escape": (key_twice_escaped, "occurs twice"),
    "a key twice inside": (with_field('"x":[{"y":1,"y":1}]'), "occurs twice"),
    "NaN": (with_field('"x":NaN'), "NaN is not JSON"),
    "Infinity": (with_field('"x":Infinity'), "Infinity is not JSON"),
    "minus Infinity": (with_field('"x":-Infinity'), "-Infinity is not JSON"),
    "infinity by its size": (with_field('"x":1e999'), "outside the range"),
    "minus infinity by its size": (with_field('"x":-1e999'), "outside the range"),
    "an integer past 2^53": (with_field(f'"x":{2**107}'), "integer"),
    "an integer of 5,000 digits": (with_field(f'"x":1{"0" * 5000}'), "integer"),
    "a byte-order mark": (lambda c: b"\xef\xbb\xbf" + c, "byte-order mark"),
    "UTF-16": (lambda c: c.decode().encode("utf-16"), "not UTF-8"),
    "UTF-16 without a mark": (lambda c: c.decode().encode("utf-16-le"), "not JSON"),
    "UTF-32": (lambda c: c.decode().encode("utf-32"), "not UTF-8"),
    "Latin-1": (lambda c: with_field('"x":"?"')(c).replace(b"?", b"\xfc"), "not UTF-8"),
    "an overlong character": (
        lambda c: with_field('"x":"?"')(c).replace(b"?", b"\xc0\xaf"),
        "not UTF-8",
    ),
    "a lone surrogate": (with_field('"x":"\\ud800"'), "lone surrogate"),
    "a lone surrogate in a key": (with_field('"\\udc00":1'), "lone surrogate"),
    "surrogates as UTF-8": (
        lambda c: with_field('"x":"?"')(c).replace(b"?", b"\xed\xa0\x80"),
        "not UTF-8",
    ),
    "data behind the end": (lambda c: c + b"{}", "not JSON"),
    "a comment": (lambda c: c + b"// end", "not JSON"),
    "a comment inside": (lambda c: c.replace(b"{", b"{/* x */", 1), "not JSON"),
    "a newline in a text": (with_field('"x":"\n"'), "not JSON"),
    "NUL in a text": (with_field('"x":"\0"'), "not JSON"),
    "a form feed as space": (lambda c: b"\f" + c, "not JSON"),
    "a space that is no JSON space": (lambda c: "\u00a0".encode() + c, "not JSON"),
    "single quotes": (lambda c: c.replace(b'"', b"'"), "not JSON"),
    "a comma at the end": (lambda c: c.rstrip()[:-1] + b",}", "not JSON"),
    "a number with a zero in front": (with_field('"x":01'), "not JSON"),
    "a hexadecimal number": (with_field('"x":0x1'), "not JSON"),
    "a number with a plus": (with_field('"x":+1'), "not JSON"),
    "True in Python's spelling": (with_field('"x":True'), "not JSON"),
    "10,000 levels of lists": (with_field(f'"x":{"[" * 10_000}{"]" * 10_000}'), "nested deeper"),
    "10,000 levels of objects": (
        with_field('"x":' + '{"a":' * 10_000 + "1" + "}" * 10_000),
        "nested deeper|expected at most",
    ),
    "an end that is missing": (lambda c: c.rstrip()[:-1], "not JSON"),
    "nothing": (lambda _: b"", "not JSON"),
    "a list": (lambda _: b"[]", ""),
    "a number": (lambda _: b"1", ""),
    "null": (lambda _: b"null", ""),
    "33 megabytes of spaces": (lambda c: c + b" " * (33 << 20), "expected at most"),
    "33 megabytes of text": (with_field(f'"x":"{"x" * (33 << 20)}"'), "expected at most"),
}


@pytest.mark.parametrize(("content", "reader"), READERS.values(), ids=READERS)
def test_the_documents_that_are_spoiled_here_are_good_ones(content: bytes, reader: Reader) -> None:
    assert reader(content) is None


@pytest.mark.parametrize(("content", "reader"), READERS.values(), ids=READERS)
@pytest.mark.parametrize(("spoil", "reason"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_document_is_refused_with_its_reason(
    spoil: Callable[[bytes], bytes], reason: str, content: bytes, reader: Reader
) -> None:
    got = reader(spoil(content))
    assert got is not None
    assert re.search(reason, got)
    assert len(got) < 1000
    assert got.isascii() or not any(ord(c) < 32 for c in got)


CONFIG = {
    "a rank as text": ({"r": "4"}, "CONFIG_VALUE"),
    "a rank as a truth value": ({"r": True}, "CONFIG_VALUE"),
    "a rank with a fraction": ({"r": 4.0}, "CONFIG_VALUE"),
    "a rank in a list": ({"r": [4]}, "CONFIG_VALUE"),
    "a rank of null": ({"r": None}, "CONFIG_VALUE"),
    "a rank of zero": ({"r": 0}, "CONFIG_VALUE"),
    "a rank below zero": ({"r": -4}, "CONFIG_VALUE"),
    "a rank over the limit": ({"r": limits.RANK + 1}, "CONFIG_VALUE"),
    "an alpha as text": ({"lora_alpha": "8"}, "CONFIG_VALUE"),
    "an alpha as a truth value": ({"lora_alpha": True}, "CONFIG_VALUE"),
    "an alpha of zero": ({"lora_alpha": 0}, "CONFIG_VALUE"),
    "an alpha below zero": ({"lora_alpha": -8}, "CONFIG_VALUE"),
    "a switch as a number": ({"use_dora": 1}, "CONFIG_VALUE"),
    "a switch as text": ({"use_rslora": "false"}, "CONFIG_VALUE"),
    "a switch of null": ({"use_rslora": None}, "CONFIG_VALUE"),
    "a rank of a pattern as a truth value": ({"rank_pattern": {"q_proj": True}}, "CONFIG_VALUE"),
    "a rank of a pattern with a fraction": ({"rank_pattern": {"q_proj": 4.0}}, "CONFIG_VALUE"),
    "an alpha of a pattern as text": ({"alpha_pattern": {"q_proj": "8"}}, "CONFIG_VALUE"),
    "a layer as a truth value": ({"layers_to_transform": [True]}, "CONFIG_VALUE"),
    "a layer with a fraction": ({"layers_to_transform": [0.0]}, "CONFIG_VALUE"),
    "a layer as text": ({"layers_to_transform": "0"}, "CONFIG_VALUE"),
    "a target that is no text": ({"target_modules": ["q_proj", 1]}, "CONFIG_VALUE"),
    "a target with a path": ({"target_modules": ["../q_proj"]}, "CONFIG_VALUE"),
    "a target that is not ASCII": ({"target_modules": ["q_pr\u043ej"]}, "CONFIG_VALUE"),
    "a target with NUL": ({"target_modules": ["q_proj\0"]}, "CONFIG_VALUE"),
    "targets as an object": ({"target_modules": {"q_proj": 1}}, "CONFIG_VALUE"),
    "excluded modules as a truth value": ({"exclude_modules": True}, "CONFIG_VALUE"),
    "a type in small letters": ({"peft_type": "lora"}, "PEFT_TYPE_UNSUPPORTED"),
    "a type in a list": ({"peft_type": ["LORA"]}, "PEFT_TYPE_UNSUPPORTED"),
    "a bidirectional base name": ({"base_model_name_or_path": "a\u202eb"}, "CONFIG_VALUE"),
    "a megabyte of base name": ({"base_model_name_or_path": "a" * 2000}, "CONFIG_VALUE"),
    "excluded modules of false": ({"exclude_modules": False}, "CONFIG_VALUE"),
    "excluded modules as an object": ({"exclude_modules": {}}, "CONFIG_VALUE"),
    "a layers pattern of false": ({"layers_pattern": False}, "CONFIG_VALUE"),
    "a field in another case": ({"R": 4}, "CONFIG_FIELD_UNKNOWN"),
    "a field with a look-alike": ({"\u0433": 4}, "CONFIG_FIELD_UNKNOWN"),
    "remote code": ({"auto_map": {}}, "CONFIG_FIELD_FORBIDDEN"),
    "a library to import": ({"auto_mapping": {"parent_library": "os"}}, "CONFIG_FIELD_FORBIDDEN"),
    "a core to import": ({"megatron_core": "os"}, "CONFIG_FIELD_FORBIDDEN"),
    "modules of its own": ({"custom_modules": {}}, "CONFIG_FIELD_FORBIDDEN"),
    "a cache that is unpickled (corda)": (
        {"corda_config": {"cache_file": "/tmp/x"}},
        "CONFIG_FIELD_FORBIDDEN",
    ),
    "a cache that is unpickled (lora_ga)": (
        {"lora_ga_config": {"cache_file": "/tmp/x"}},
        "CONFIG_FIELD_FORBIDDEN",
    ),
    "a cache that is unpickled (eva)": ({"eva_config": {}}, "CONFIG_FIELD_FORBIDDEN"),
}


@pytest.mark.parametrize(("changes", "code"), CONFIG.values(), ids=CONFIG)
def test_a_config_field_of_the_wrong_kind(changes: dict[str, Any], code: str) -> None:
    config, findings = peft_config_parse(json.dumps(sample.config(**changes)).encode())
    assert config is None
    assert sample.codes(findings) == {code}
    assert all(f.where.isascii() and f.got.isascii() for f in findings)


DECLARATION = {
    "a rank as text": {"rank": "4"},
    "a rank as a truth value": {"rank": True},
    "a rank with a fraction": {"rank": 4.0},
    "an alpha as text": {"alpha": "8"},
    "an alpha as a truth value": {"alpha": True},
    "replicas as text": {"maxReplicas": "2"},
    "replicas with a fraction": {"maxReplicas": 2.0},
    "a version as text": {"schemaVersion": "1"},
    "a version as a truth value": {"schemaVersion": True},
    "a version with a fraction": {"schemaVersion": 1.0},
    "a tenant as a number": {"tenant": 1},
    "a tenant with a bidirectional mark": {"tenant": "t\u202e1"},
    "a digest with a newline": {"baseModelDigest": sample.BASE_DIGEST + "\n"},
    "a digest in capitals": {"baseModelDigest": sample.BASE_DIGEST.upper()},
    "targets as an object": {"targetModules": {"q_proj": 1}},
    "a control character": {"trainingDataVersion": "a\u0007"},
    "a name in snake case": {"max_replicas": 2},
    "an unknown field": {"surprise": 1},
}


@pytest.mark.parametrize("changes", DECLARATION.values(), ids=DECLARATION)
def test_a_declaration_field_of_the_wrong_kind(changes: dict[str, Any]) -> None:
    content = json.dumps(sample.declaration(**changes)).encode()
    with pytest.raises(MalformedError):
        declaration_parse(content)
    findings = sample.check(sample.files(declaration=content))
    assert "DECLARATION_MALFORMED" in sample.codes(findings)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"schemaVersion":2', b'"schemaVersion":2.0'),
        (b'"schemaVersion":2', b'"schemaVersion":true'),
        (b'"schemaVersion":2', b'"schemaVersion":"2"'),
        (b'"size":', b'"size":-'),
        (b'"size":', b'"size":0'),
        (b'"size":', b'"size":1e'),
        (b"{", b"{ "),
    ],
)
def test_a_manifest_in_another_spelling_is_refused(old: bytes, new: bytes) -> None:
    content, reader = READERS["manifest"]
    assert old in content
    assert reader(content.replace(old, new, 1)) is not None


HOSTILE = {
    "brackets": 'b"[" * N',
    "pairs of brackets": 'b"[" + b"[]," * (N // 3 - 2) + b"[]]"',
    "objects in objects": "b'{\"a\":' * (N // 5)",
    "quotes": "b'\"' * N",
    "escaped quotes": "b'{\"' + b'\\\\\"' * (N // 2 - 2)",
    "backslashes": "b'{\"' + b'\\\\' * (N - 2)",
    "one key again and again": "b'{' + b'\"a\":0,' * (N // 6 - 2) + b'\"a\":0}'",
    "many keys, one of them twice": "b'{' + b','.join(b'\"%d\":0' % n for n in range(N // 12))"
    " + b',\"0\":0}'",
    "digits": "b'[' + b'9' * (N - 2) + b']'",
    "a long fraction": "b'[0.' + b'9' * (N - 5) + b']'",
    "a long exponent": "b'[1e' + b'9' * (N - 5) + b']'",
    "escapes": "b'\"' + b'\\\\u0061' * (N // 6 - 1) + b'\"'",
    "surrogates": "b'\"' + b'\\\\ud800' * (N // 6 - 1) + b'\"'",
}


@pytest.mark.parametrize("name", ["config", "declaration", "manifest", "tokenizer"])
def test_no_document_costs_more_than_its_bound_of_time_and_memory(name: str) -> None:
    limit = {
        "config": "CONFIG_BYTES",
        "declaration": "DECLARATION_BYTES",
        "manifest": "MANIFEST_BYTES",
        "tokenizer": "DOC_BYTES",
    }[name]
    code = f"""
sys.path.insert(0, "tests/attacks")
from registry_service.domain import limits
from test_json import READERS
reader = READERS[{name!r}][1]
N = limits.{limit}
for content in [{", ".join(HOSTILE.values())}]:
    assert len(content) <= N, (len(content), content[:20])
    assert reader(content) is not None, content[:20]
print("refused")
"""
    # At their bound all of them take 7 s of a slow processor for the largest kind; a reader whose
    # cost grows with the square of the length would take hours.
    assert run_bounded(code, cpu_seconds=40, memory_mib=512) == "refused\n"
