"""Bad adapters through the whole service: refused by code, and nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from registry_service.domain.errors import RegistryError
from tests.integration.conftest import WIDTH, World, lora_tensors, safetensors_bytes

TENANT, ADAPTER = "t-1042", "support-zh"
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def tensors(**changes: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    """The right tensors with some added, changed or (None) left out."""
    named = {name.replace("__", "."): shape for name, shape in changes.items()}
    merged = {**lora_tensors(), **named}
    return {name: shape for name, shape in merged.items() if shape is not None}


def renamed(old: str, new: str) -> dict[str, tuple[int, ...]]:
    return {(new if name == old else name): shape for name, shape in lora_tensors().items()}


def retyped(dtype: str, size: int) -> bytes:
    """A file whose first tensor has another dtype, in the bytes that it needs."""
    content = safetensors_bytes(lora_tensors())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    position = 0
    for index, row in enumerate(header.values()):
        width = size if index == 0 else 4
        count = 1
        for dimension in row["shape"]:
            count *= dimension
        row["dtype"] = dtype if index == 0 else "F32"
        row["data_offsets"] = [position, position + count * width]
        position += count * width
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"\x01" * position


A, B = f"{FIRST}.lora_A.weight", f"{FIRST}.lora_B.weight"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pickle": ("CONTENT_PICKLE", {"weights": b"\x80\x04\x95\x00" + b"x" * 100 + b"."}),
    "archive": ("CONTENT_ARCHIVE", {"weights": b"PK\x03\x04" + b"\x00" * 100}),
    "git-lfs": (
        "CONTENT_LFS_POINTER",
        {"weights": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
    ),
    "long header": ("HEADER_TOO_LARGE", {"weights": (101 << 20).to_bytes(8, "little") + b"{" * 99}),
    "duplicate": (
        "TENSOR_DUPLICATE",
        {
            "weights": safetensors_bytes(lora_tensors()).replace(
                b".1.self_attn.v", b".0.self_attn.v"
            )
        },
    ),
    "base tensor": (
        "BASE_TENSOR",
        {"weights": safetensors_bytes(tensors(**{f"{FIRST}.weight": (WIDTH, WIDTH)}))},
    ),
    "adapter's name": (
        "ADAPTER_NAME_IN_KEY",
        {"weights": safetensors_bytes(renamed(A, f"{FIRST}.lora_A.first.weight"))},
    ),
    "missing": ("MISSING_TENSOR", {"weights": safetensors_bytes(tensors(**{B: None}))}),
    "extra": (
        "UNEXPECTED_TENSOR",
        {"weights": safetensors_bytes(tensors(**{f"{FIRST}.surprise": (2, 2)}))},
    ),
    "rank": ("RANK_MISMATCH", {"weights": safetensors_bytes(tensors(**{A: (8, WIDTH)}))}),
    "width": ("SHAPE_MISMATCH", {"weights": safetensors_bytes(tensors(**{A: (4, 24)}))}),
    "dtype": ("TENSOR_DTYPE", {"weights": retyped("F64", 8)}),
    "unknown field": ("CONFIG_FIELD_UNKNOWN", {"config": {"surprise": True}}),
    "forbidden field": (
        "CONFIG_FIELD_FORBIDDEN",
        {"config": {"auto_mapping": {"parent_library": "os"}}},
    ),
    "unsupported option": ("CONFIG_OPTION_UNSUPPORTED", {"config": {"bias": "all"}}),
    "other type": ("PEFT_TYPE_UNSUPPORTED", {"config": {"peft_type": "LOHA"}}),
    "declared rank": ("DECLARATION_MISMATCH", {"declare": {"rank": 8}}),
    "unknown base": (
        "BASE_UNKNOWN",
        {"declare": {"base_model_digest": "sha256:" + "9" * 64}},
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_it_is_rejected_with_its_code(world: World, tmp_path: Path, case: str) -> None:
    code, options = CASES[case]
    digest = world.publish(tmp_path / "a", **options)
    world.settle()
    with world.client("publisher:t-1042") as publisher:
        assert publisher.artifact_show(TENANT, digest)["state"] == "REJECTED"
        (scan,) = publisher.report_list(TENANT, digest)
    found = {f["code"] for f in scan["findings"] if f["severity"] == "refuse"}
    assert code in found, found
    with world.client("validator") as worker:
        assert worker.job_claim("w", ["validate"], [world.base_digest]) is None
    with world.client("node") as node, pytest.raises(RegistryError):
        node.pull(TENANT, ADAPTER, digest, tmp_path / "pulled")


def test_an_empty_file_is_rejected(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a", weights=b"\x00")
    world.settle()
    with world.client("operator") as operator:
        assert operator.artifact_show(TENANT, digest)["state"] == "REJECTED"
