"""Check 1: names, links, sizes, and content by what it is."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from dataclasses import replace
from typing import Final

import pytest
import sample_adapter as sample

from registry_service.domain import limits
from registry_service.domain.file_set import file_set_check


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("never run",)


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1]))
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("data.pkl"))
    return buffer.getvalue()


CONTENT: Final = {
    **{f"pickle protocol {p}": (pickle.dumps(_Payload(), p), "CONTENT_PICKLE") for p in range(6)},
    "pickled dict, protocol 0": (pickle.dumps({"a": [1]}, 0), "CONTENT_PICKLE"),
    "zip": (_zip(), "CONTENT_ARCHIVE"),
    "zip behind text": (b'{"a": 1}\n' + _zip(), "CONTENT_ARCHIVE"),
    "zip behind tensors": (sample.weights(sample.tensors()) + _zip(), "CONTENT_ARCHIVE"),
    "zip with a trailer": (b"{}" + _zip() + b"trailer", "CONTENT_ARCHIVE"),
    "empty zip": (b"PK\x05\x06" + bytes(18), "CONTENT_ARCHIVE"),
    "tar": (_tar(), "CONTENT_ARCHIVE"),
    "gzip": (gzip.compress(b"{}"), "CONTENT_ARCHIVE"),
    "7z": (b"7z\xbc\xaf\x27\x1c" + bytes(40), "CONTENT_ARCHIVE"),
    "LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64,
        "CONTENT_LFS_POINTER",
    ),
    "shell script": (b"#!/bin/sh\nrm -rf /\n", "CONTENT_SCRIPT"),
    "ELF": (b"\x7fELF\x02\x01\x01" + bytes(64), "CONTENT_SCRIPT"),
    "PE": (b"MZ\x90\x00" + bytes(64), "CONTENT_SCRIPT"),
    "page with a script": (b"<script>alert(1)</script>", "CONTENT_SCRIPT"),
}
NAMES: Final = [
    "adapter_model.safetensors",
    "adapter_config.json",
    "README.md",
    "tokenizer.model",
    "vocab.json",
    "adapter_model.bin",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("data", "code"), CONTENT.values(), ids=CONTENT)
def test_forbidden_content_is_refused_under_any_name(name: str, data: bytes, code: str) -> None:
    findings = file_set_check([sample.fact(name, data)], frozenset())
    assert code in sample.codes(findings)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("adapter_config.json", b"hello"),
        ("tokenizer.json", b"\x93NUMPY\x01\x00"),
        ("README.md", b"\xff\xfe"),
        ("README.md", b"a\0b"),
        ("adapter_model.safetensors", b"GGUF\x03\x00\x00\x00" + bytes(40)),
        ("adapter_model.safetensors", b'{"a": 1}'),
        ("tokenizer.model", b"{}"),
    ],
)
def test_content_that_is_not_what_the_name_says(name: str, data: bytes) -> None:
    findings = file_set_check([sample.fact(name, data)], frozenset())
    assert sample.codes(findings) == {"CONTENT_UNKNOWN"}


@pytest.mark.parametrize(
    "name",
    [
        "../adapter_config.json",
        "a/README.md",
        "adapter_model.bin",
        "modeling.py",
        "config.json",
        "ADAPTER_CONFIG.JSON",
        "adapter_config.json ",
        "README.md\0",
        ".gitattributes",
        "/etc/passwd",
        "x\u202egnp.exe",
    ],
)
def test_other_names_are_forbidden(name: str) -> None:
    findings = file_set_check([sample.fact(name, b"{}")], frozenset())
    assert sample.codes(findings) == {"FILE_NAME_FORBIDDEN"}
    assert findings[0].where.isascii()


def test_a_good_set_has_no_findings() -> None:
    content = {
        **sample.files(),
        "README.md": "# Title\n\nüber".encode(),
        "merges.txt": b"#version: 0.2\na b\n",
        "vocab.json": b'{"a": 0}',
        "tokenizer.model": b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02",
        "chat_template.jinja": b"{% for m in messages %}{{ m }}{% endfor %}",
    }
    facts = [sample.fact(path, data) for path, data in content.items()]
    assert file_set_check(facts) == ()


def test_a_header_whose_length_looks_like_a_pickle_is_none() -> None:
    data = (0x0480).to_bytes(8, "little") + b"{" + b" " * 0x47F
    assert file_set_check([sample.fact("adapter_model.safetensors", data)], frozenset()) == ()


def test_four_bytes_in_tensor_data_are_no_zip() -> None:
    data = sample.weights({"x": ("F32", (8,))})[:-32] + b"PK\x05\x06" + b"\x93" * 28
    assert file_set_check([sample.fact("adapter_model.safetensors", data)], frozenset()) == ()


def test_a_character_cut_at_the_end_of_the_head_is_still_text() -> None:
    fact = sample.fact("README.md", b"a" + "é".encode() * 4096)
    assert file_set_check([fact], frozenset()) == ()


def test_links_empty_missing_double_large_and_many() -> None:
    readme = sample.fact("README.md", b"hello")
    none: frozenset[str] = frozenset()
    assert sample.codes(file_set_check([replace(readme, is_link=True)], none)) == {"FILE_IS_LINK"}
    assert sample.codes(file_set_check([sample.fact("README.md", b"")], none)) == {"FILE_EMPTY"}
    assert sample.codes(file_set_check([readme, readme], none)) == {"FILE_NAME_FORBIDDEN"}
    large = replace(readme, size=limits.DOC_BYTES + 1)
    assert sample.codes(file_set_check([large], none)) == {"FILE_TOO_LARGE"}
    missing = file_set_check([readme])
    assert sample.codes(missing) == {"FILE_MISSING"}
    assert {finding.where for finding in missing} == set(sample.files())
    many = [sample.fact(f"f{n}", b"{}") for n in range(limits.ADAPTER_FILES + 1)]
    assert "FILE_TOO_MANY" in sample.codes(file_set_check(many, none))
