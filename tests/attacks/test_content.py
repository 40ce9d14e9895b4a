"""Files are what their bytes say: every case of the scanners, under every name."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sample_adapter as sample
from payloads import ARCHIVES, MODELS, PICKLES, PROGRAMS, UNKNOWN, patched, zipped
from safetensors import deserialize

from registry_service.domain.file_set import file_set_check
from registry_service.domain.safetensors_header import header_parse

PATHS = [
    sample.WEIGHTS,
    sample.CONFIG,
    sample.DECLARATION,
    "README.md",
    "merges.txt",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer.model",
    "adapter_model.bin",
    "weights.tensors",
    "model",
]


def codes(path: str, content: bytes) -> set[str]:
    return sample.codes(file_set_check([sample.fact(path, content)], frozenset()))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", PICKLES.values(), ids=PICKLES)
def test_a_pickle_is_one_under_any_name(path: str, content: bytes) -> None:
    assert "CONTENT_PICKLE" in codes(path, content)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", ARCHIVES.values(), ids=ARCHIVES)
def test_an_archive_is_one_under_any_name(path: str, content: bytes) -> None:
    assert "CONTENT_ARCHIVE" in codes(path, content)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_or_a_page_is_one_under_any_name(path: str, content: bytes) -> None:
    assert "CONTENT_SCRIPT" in codes(path, content)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content", MODELS.values(), ids=MODELS)
def test_another_kind_of_model_is_one_under_any_name(path: str, content: bytes) -> None:
    assert "CONTENT_UNKNOWN" in codes(path, content)


@pytest.mark.parametrize(
    "path", [sample.WEIGHTS, sample.CONFIG, "tokenizer.json", "tokenizer.model"]
)
@pytest.mark.parametrize("content", UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_what_the_name_says_is_refused(path: str, content: bytes) -> None:
    assert codes(path, content) == {"CONTENT_UNKNOWN"}


@pytest.mark.parametrize("version", ["git-lfs.github.com", "hawser.github.com"])
@pytest.mark.parametrize("path", PATHS)
def test_a_pointer_is_not_the_file(path: str, version: str) -> None:
    pointer = f"version https://{version}/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
    assert "CONTENT_LFS_POINTER" in codes(path, pointer.encode())


@pytest.mark.parametrize(
    "path", ["adapter_model.bin", "pytorch_model.bin", "adapter_model.pt", "adapter_model.h5"]
)
def test_no_other_weight_file_is_a_fall_back(path: str) -> None:
    content = {**sample.files(weights=None), path: sample.weights(sample.tensors())}
    assert sample.codes(sample.check(content)) == {"FILE_NAME_FORBIDDEN", "FILE_MISSING"}


@pytest.mark.parametrize("path", ["modeling_x.py", "config.json", "configuration_x.py", "x.so"])
def test_nothing_beside_the_adapter_can_bring_code(path: str) -> None:
    content = {**sample.files(), path: b'{"auto_map": {"AutoModel": "modeling_x.X"}}'}
    assert sample.codes(sample.check(content)) == {"FILE_NAME_FORBIDDEN"}


PROSE = {
    "a title": b"# An adapter\n\nIt answers.\n",
    "a first word": b"classification\nadapter\n\nIt answers.\n",
    "a letter that is an opcode": b"N. B. This is text.\n",
    "a version": b"V2\n\nBetter.\n",
    "an abbreviation": b"I.\nFirst.\n",
    "markdown with HTML": b'<p align="center">x</p>\n',
    "an exponent": b"x^2 + y^2\n",
}


@pytest.mark.parametrize("content", PROSE.values(), ids=PROSE)
def test_prose_is_prose(content: bytes) -> None:
    assert codes("README.md", content) == set()


def with_header(length: int, data: bytes, metadata: str = "") -> bytes:
    """A well-formed file whose header has exactly this many bytes; its metadata begins so."""
    names = [f"{'n' * 480}.{number}" for number in range(length // 2_000)]
    tensors: dict[str, Any] = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * index, 4 * index + 4]}
        for index, name in enumerate(names)
    }
    start, end = 4 * len(names), 4 * len(names) + len(data)
    tensors["x"] = {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [start, end]}
    fields = {"__metadata__": {"p": ""}, **tensors}
    bare = len(json.dumps(fields, separators=(",", ":")))
    fields["__metadata__"]["p"] = metadata.ljust(length - bare, "p")
    header = json.dumps(fields, separators=(",", ":")).encode()
    assert len(header) == length
    return sample.raw(header, b"\1" * start + data)


def padded(content: bytes) -> bytes:
    """``content`` filled to whole 32-bit numbers."""
    return content + b" " * (-len(content) % 4)


@pytest.mark.parametrize(
    ("length", "metadata"),
    [(0x5688, ""), (0x5628, ""), (0x1958, "V")],
    ids=["NEWTRUE, UNICODE", "MARK, UNICODE", "BINUNICODE, UNICODE"],
)
def test_a_file_that_is_safetensors_and_a_pickle(
    length: int, metadata: str, tmp_path: Path
) -> None:
    # The bytes of the length read as opcodes, and UNICODE takes all up to a newline as its text.
    # The text is thrown away, and then the code begins, inside a tensor.
    trace = tmp_path / "trace"
    call = b"\n0cos\nmkdir\n(S'" + str(trace).encode() + b"'\ntR."
    content = with_header(length, padded(call), metadata)
    header, findings = header_parse(content, len(content))
    assert header is not None
    assert findings == ()
    assert len(deserialize(content)) == len(header.tensors)
    assert codes(sample.WEIGHTS, content) == {"CONTENT_PICKLE"}
    assert not trace.exists()
    # It is one: the standard library runs it.
    pickle.loads(content)  # noqa: S301 - the bytes are made above
    assert trace.exists()


@pytest.mark.parametrize("length", range(0x150, 0x950, 8))
def test_a_header_length_alone_makes_no_pickle(length: int) -> None:
    content = with_header(length, bytes(16))
    assert codes(sample.WEIGHTS, content) == set()
    with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)):
        pickle.loads(content)  # noqa: S301 - the bytes are made above


def in_last_tensor(inside: bytes, behind: int = 0) -> bytes:
    """Safetensors that ends with these bytes and then ``behind`` bytes of tensor data."""
    data = padded(bytes(64) + inside + bytes(behind))
    start = sample.weights({"x": ("F32", (len(data) // 4,))})
    return start[: len(start) - len(data)] + data


ZIP_END = b"PK\x05\x06"


def far_prefix(content: bytes, by: int) -> bytes:
    """A zip whose offsets count from the start of the file that it is behind."""
    at = content.rindex(ZIP_END)
    offset = int.from_bytes(content[at + 16 : at + 20], "little") + by
    moved = content[: at + 16] + struct.pack("<I", offset) + content[at + 20 :]
    directory = moved.index(b"PK\x01\x02")
    return moved[: directory + 42] + struct.pack("<I", by) + moved[directory + 46 :]


def zip64() -> bytes:
    """A zip whose end record says nothing: all is in the zip64 record before it."""
    plain = zipped()
    at = plain.rindex(ZIP_END)
    count, length, offset = struct.unpack("<HII", plain[at + 10 : at + 20])
    record = struct.pack(
        "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, offset
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, at, 1)
    nonsense = patched(plain[at:], ZIP_END, 8, b"\x11\x11\x22\x22\xee\xee\xee\xee\xdd\xdd\xdd\xdd")
    return plain[:at] + record + locator + nonsense


ZIPS = {
    "behind tensors": zipped(),
    "with offsets from the start of the file": far_prefix(zipped(), len(in_last_tensor(b""))),
    "with a disk number": patched(zipped(), ZIP_END, 4, b"\x07\x00\x09\x00"),
    "with counts that differ": patched(zipped(), ZIP_END, 8, b"\x01\x00\x05\x00"),
    "zip64": zip64(),
}


@pytest.mark.parametrize("behind", [66_000, 69_000, 100_000])
def test_a_zip_further_from_the_end_than_zipfile_looks(behind: int) -> None:
    # torch's reader looks a few pages further: at 69,000 bytes it still loads what is inside.
    content = in_last_tensor(zipped(), behind)
    assert not zipfile.is_zipfile(io.BytesIO(content))
    assert codes(sample.WEIGHTS, content) == {"CONTENT_ARCHIVE"}


@pytest.mark.parametrize("behind", [0, 1000, 60_000])
@pytest.mark.parametrize("inside", ZIPS.values(), ids=ZIPS)
def test_a_file_that_is_safetensors_and_a_zip(inside: bytes, behind: int) -> None:
    content = in_last_tensor(inside, behind)
    assert [name for name, _ in deserialize(content)] == ["x"]
    assert header_parse(content, len(content))[1] == ()
    assert zipfile.is_zipfile(io.BytesIO(content))
    assert codes(sample.WEIGHTS, content) == {"CONTENT_ARCHIVE"}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.namelist() == ["archive/data.pkl"]


def test_a_zip_that_no_reader_finds_is_tensor_data() -> None:
    content = in_last_tensor(zipped(), behind=140_000)
    assert not zipfile.is_zipfile(io.BytesIO(content))
    assert codes(sample.WEIGHTS, content) == set()


def test_a_file_that_is_safetensors_and_gguf_has_too_long_a_header() -> None:
    content = b"GGUF\0\0\0\0{" + bytes(64)
    assert codes(sample.WEIGHTS, content) == set()
    assert sample.codes(header_parse(content, len(content))[1]) == {"HEADER_TOO_LARGE"}


def test_a_file_that_is_safetensors_and_a_tar() -> None:
    # An old tar has no magic: eight octal digits in the metadata make the header its first block.
    fields = {
        "__metadata__": {"p": "p" * 106 + "00000000" + "0" * 200},
        "x": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1024]},
    }
    plain = bytearray(sample.raw(json.dumps(fields, separators=(",", ":")).encode(), bytes(1024)))
    at = plain.index(b"00000000")
    assert at <= 148
    plain[148:156] = b"       0"
    total = sum(plain[:148]) + 8 * 0x20 + sum(plain[156:512])
    plain[148:156] = b"%08o" % total
    content = bytes(plain)
    assert header_parse(content, len(content))[1] == ()
    assert codes(sample.WEIGHTS, content) == {"CONTENT_ARCHIVE"}


def test_a_file_that_is_safetensors_and_hdf5() -> None:
    plain = sample.weights({"x": ("F32", (512,))})
    content = plain[:512] + b"\x89HDF\r\n\x1a\n" + plain[520:]
    assert header_parse(content, len(content))[1] == ()
    assert codes(sample.WEIGHTS, content) == {"CONTENT_UNKNOWN"}


TEMPLATE_ATTACKS = [
    "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('/nowhere/x') }}",
    "{% for c in ().__class__.__base__.__subclasses__() %}{{ c }}{% endfor %}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}",
    "{{ (''|attr('__class__')).mro() }}",
]


@pytest.mark.parametrize("template", TEMPLATE_ATTACKS)
@pytest.mark.parametrize("path", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_is_never_rendered_and_asks_for_approval(path: str, template: str) -> None:
    content = template if path.endswith("jinja") else json.dumps({"chat_template": template})
    findings = sample.check({**sample.files(), path: content.encode()})
    different = [f for f in findings if f.code == "TEMPLATE_DIFFERS"]
    assert [f.severity for f in different] == ["review"]
    # Declared with the base's digest it is refused besides.
    assert "DECLARATION_MISMATCH" in sample.codes(findings)


def test_no_template_engine_is_even_loaded() -> None:
    code = "import cli.check, sys; sys.exit('jinja2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


TOKENIZER = {
    "remote code": ({"auto_map": {"AutoTokenizer": ["x.Y", None]}}, "auto_map"),
    "remote code inside": ({"a": [{"b": {"auto_map": {}}}]}, "auto_map"),
    "leave for remote code": ({"trust_remote_code": True}, "trust_remote_code"),
    "a file elsewhere": ({"vocab_file": "/etc/passwd"}, "vocab_file"),
    "a tokenizer elsewhere": ({"tokenizer_file": "../../tokenizer.json"}, "tokenizer_file"),
    "tokens elsewhere": ({"added_tokens_file": "//host/share"}, "added_tokens_file"),
    "arguments without names": ({"init_inputs": ["/etc/passwd"]}, "init_inputs"),
    "a class with a path": ({"tokenizer_class": "os.system"}, "tokenizer_class"),
    "a class that is no text": ({"tokenizer_class": {"x": 1}}, "tokenizer_class"),
    "a processor with a path": ({"processor_class": "../x"}, "processor_class"),
}


@pytest.mark.parametrize("path", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(("fields", "name"), TOKENIZER.values(), ids=TOKENIZER)
def test_a_tokenizer_that_would_load_something(
    path: str, fields: dict[str, Any], name: str
) -> None:
    findings = sample.check({**sample.files(), path: json.dumps(fields).encode()})
    found = [f for f in findings if f.code == "CONFIG_FIELD_FORBIDDEN"]
    assert [(f.check, f.where, f.severity) for f in found] == [(1, f"{path}: {name}", "refuse")]


def test_a_usual_tokenizer_config_has_no_findings_of_its_own() -> None:
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1000000000000000019884624838656,
        "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
        "init_inputs": [],
        "tokenizer_file": None,
        "chat_template": "{{ messages }}",
    }
    content = {**sample.files(), "tokenizer_config.json": json.dumps(fields).encode()}
    assert sample.codes(sample.check(content)) == {
        "DECLARATION_MISMATCH",
        "TOKENIZER_DIFFERS",
        "TEMPLATE_DIFFERS",
    }


def test_a_tokenizer_config_that_nobody_read_is_refused() -> None:
    content = {**sample.files(), "tokenizer_config.json": b"{}"}
    findings = sample.check(content, own=None)
    assert ("CONTENT_UNKNOWN", "tokenizer_config.json") in {(f.code, f.where) for f in findings}
