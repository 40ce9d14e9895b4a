"""Each static line of 'Bad input and faults', on a folder as ``adapterctl check`` sees it.

Every attack is one small change to an adapter that passes; the code of the finding is asserted,
and that nothing of the attack is opened, followed or loaded.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sample_adapter as sample

from cli.check import check_folder
from registry_service.domain.errors import MalformedError
from registry_service.domain.verification import BaseFacts

Q = "base_model.model.model.layers.0.self_attn.q_proj"
BASE = BaseFacts(sample.TOKENIZER, sample.TEMPLATE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return sample.write(tmp_path / "adapter", sample.files())


def report(folder: Path) -> dict[str, Any]:
    return check_folder(folder, sample.catalog(), BASE)


def refused(folder: Path) -> set[str]:
    result = report(folder)
    assert result["verdict"] == "refuse"
    assert json.loads(json.dumps(result)) == result
    assert {"check", "code", "where", "expected", "got", "severity"} == set(result["findings"][0])
    return {finding["code"] for finding in result["findings"]}


def spoil_weights(folder: Path, **changes: Any) -> None:
    tensors: dict[str, Any] = {**sample.tensors(), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    (folder / sample.WEIGHTS).write_bytes(sample.weights(kept))


def spoil_config(folder: Path, **changes: Any) -> None:
    (folder / sample.CONFIG).write_text(json.dumps(sample.config(**changes)))


def test_the_untouched_adapter_passes(folder: Path) -> None:
    result = report(folder)
    assert (result["verdict"], result["baseDigest"]) == ("pass", sample.BASE_DIGEST)
    assert result["findings"] == result["groups"] == []


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize(
    "name", [sample.WEIGHTS, sample.CONFIG, "README.md", "adapter_model.bin", "training_args.bin"]
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_under_any_name(folder: Path, name: str, protocol: int) -> None:
    trace = folder.parent / "trace"
    (folder / name).write_bytes(pickle.dumps(Bomb(trace), protocol))
    assert "CONTENT_PICKLE" in refused(folder)
    assert not trace.exists()


@pytest.mark.parametrize("name", [sample.WEIGHTS, "README.md", "adapter.gz"])
def test_an_archive(folder: Path, name: str) -> None:
    (folder / name).write_bytes(gzip.compress(b"{}"))
    assert "CONTENT_ARCHIVE" in refused(folder)


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / sample.WEIGHTS).write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
    )
    assert "CONTENT_LFS_POINTER" in refused(folder)


@pytest.mark.parametrize("name", [sample.WEIGHTS, sample.CONFIG, "README.md"])
def test_an_empty_file(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    assert "FILE_EMPTY" in refused(folder)


@pytest.mark.parametrize("name", [sample.WEIGHTS, sample.CONFIG, "README.md"])
def test_a_link_is_not_followed(folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"secret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    assert "FILE_IS_LINK" in refused(folder)
    assert "secret" not in json.dumps(report(folder))


def test_a_linked_folder_and_a_pipe_are_not_opened(folder: Path) -> None:
    (folder / "sub").symlink_to("/etc")
    os.mkfifo(folder / "README.md")
    assert {"FILE_IS_LINK", "FILE_NAME_FORBIDDEN"} == refused(folder)


@pytest.mark.parametrize("name", ["../x", "sub/../../x"])
def test_a_path_out_of_the_folder(name: str) -> None:
    content = {**sample.files(), name: b"{}"}
    assert sample.codes(sample.check(content)) == {"FILE_NAME_FORBIDDEN"}


@pytest.mark.parametrize("name", ["config.json", "modeling.py", "sub/README.md", ".hidden", "x"])
def test_an_unknown_file(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    assert refused(folder) == {"FILE_NAME_FORBIDDEN"}


def test_a_header_of_101_mb_is_refused_by_its_length(folder: Path) -> None:
    length = 101 * 1024 * 1024
    with (folder / sample.WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", length) + b'{"')
        file.truncate(length + 8)
    assert "HEADER_TOO_LARGE" in refused(folder)


@pytest.mark.parametrize("spelling", [f'"{Q}.lora_A.weight"', f'"\\u0062{Q[1:]}.lora_A.weight"'])
def test_a_duplicate_tensor_name(folder: Path, spelling: str) -> None:
    file = (folder / sample.WEIGHTS).read_bytes()
    size = int.from_bytes(file[:8], "little")
    header = file[8 : 8 + size].rstrip()
    data = file[8 + size :]
    entry = json.dumps({"dtype": "F32", "shape": [1], "data_offsets": [len(data), len(data) + 4]})
    header = header[:-1] + f",{spelling}:{entry}}}".encode()
    (folder / sample.WEIGHTS).write_bytes(sample.raw(header, data + bytes(4)))
    assert refused(folder) == {"TENSOR_DUPLICATE"}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{Q}.weight", (16, 16)),
        (f"{Q}.base_layer.weight", (16, 16)),
        ("base_model.model.lm_head.weight", (32, 16)),
        ("base_model.model.model.wte.weight", (32, 16)),
        ("base_model.model.model.layers.1.norm.weight", (16,)),
    ],
)
def test_a_key_that_names_a_base_tensor(folder: Path, name: str, shape: tuple[int, ...]) -> None:
    spoil_weights(folder, **{name: ("F32", shape)})
    assert refused(folder) == {"BASE_TENSOR"}


@pytest.mark.parametrize("key", ["lora_A.first.weight", "lora_B.default.weight"])
def test_another_adapters_name_in_a_key(folder: Path, key: str) -> None:
    spoil_weights(folder, **{f"{Q}.{key}": ("F32", (4, 16))})
    assert refused(folder) == {"ADAPTER_NAME_IN_KEY"}


SPOILED = [
    ({f"{Q}.lora_A.weight": None}, {"MISSING_TENSOR"}),
    ({f"{Q}.lora_X.weight": ("F32", (4, 16))}, {"UNEXPECTED_TENSOR"}),
    ({f"{Q}.lora_A.weight": ("F32", (8, 16))}, {"RANK_MISMATCH"}),
    ({f"{Q}.lora_A.weight": ("F32", (4, 12))}, {"SHAPE_MISMATCH"}),
    ({f"{Q}.lora_A.weight": ("F64", (4, 16))}, {"TENSOR_DTYPE", "DTYPE_MISMATCH"}),
    ({f"{Q}.lora_A.weight": ("I8", (8, 16))}, {"TENSOR_DTYPE", "DTYPE_MISMATCH", "RANK_MISMATCH"}),
]


def text_of(value: object) -> str:
    """A case's part as text that is the same in every process, which a set's own is not."""
    return str(sorted(value) if isinstance(value, set) else value)[:60]


@pytest.mark.parametrize(("changes", "codes"), SPOILED, ids=text_of)
def test_missing_extra_rank_width_and_dtype(
    folder: Path, changes: dict[str, Any], codes: set[str]
) -> None:
    spoil_weights(folder, **changes)
    assert refused(folder) == codes


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"lora_magic": 1}, "CONFIG_FIELD_UNKNOWN"),
        ({"auto_mapping": {"parent_library": "os"}}, "CONFIG_FIELD_FORBIDDEN"),
        ({"megatron_core": "os"}, "CONFIG_FIELD_FORBIDDEN"),
        ({"corda_config": {"cache_file": "/tmp/x"}}, "CONFIG_FIELD_FORBIDDEN"),
        ({"init_lora_weights": "pissa"}, "CONFIG_OPTION_UNSUPPORTED"),
        ({"target_modules": ".*(.*)*q_projX"}, "EXPRESSION_REFUSED"),
        ({"target_modules": None}, "TARGETS_MISSING"),
        ({"lora_alpha": -8}, "CONFIG_VALUE"),
        ({"r": 8}, "DECLARATION_MISMATCH"),
        ({"lora_alpha": 80}, "DECLARATION_MISMATCH"),
        ({"target_modules": ["q_proj"]}, "DECLARATION_MISMATCH"),
    ],
    ids=str,
)
def test_the_config(folder: Path, changes: dict[str, Any], code: str) -> None:
    spoil_config(folder, **changes)
    assert code in refused(folder)


def test_nan_in_the_config(folder: Path) -> None:
    (folder / sample.CONFIG).write_text('{"peft_type":"LORA","r":4,"lora_alpha":NaN}')
    assert "CONFIG_MALFORMED" in refused(folder)


def test_a_folder_without_a_declaration_is_checked_without_it(folder: Path) -> None:
    (folder / sample.DECLARATION).unlink()
    assert report(folder)["verdict"] == "pass"


def test_only_what_was_picked_is_checked(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(pickle.dumps(1))
    picked = frozenset(sample.files())
    assert check_folder(folder, sample.catalog(), BASE, only=picked)["verdict"] == "pass"
    assert report(folder)["verdict"] == "refuse"


def test_what_cannot_be_read_at_all_is_malformed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path in ("none", "file", "empty"):
        with pytest.raises(MalformedError):
            report(tmp_path / path)


def test_the_check_needs_no_torch() -> None:
    code = "import cli.check, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
