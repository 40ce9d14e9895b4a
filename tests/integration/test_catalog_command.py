"""A base's catalog from its ``config.json`` alone, by the command line's own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from registry_service.domain.catalog import Catalog, catalog_parse
from tests import sample_adapter as sample

pytestmark = pytest.mark.torch

WIDTH, RANK, LAYERS = 32, 4, 2
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
DIGEST = "sha256:" + "d" * 64


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def adapter(path: Path, *, declared: bool = False) -> str:
    tensors = {}
    for layer in range(LAYERS):
        for name in ("q_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = ("F32", (RANK, WIDTH))
            tensors[f"{key}.lora_B.weight"] = ("F32", (WIDTH, RANK))
    content = sample.files(
        weights=sample.weights(tensors),
        config=json.dumps(sample.config(target_modules=r".*\.(q|v)_proj")).encode(),
        declaration=_declaration() if declared else None,
    )
    return str(sample.write(path / "adapter", content))


def _declaration() -> bytes:
    changes: dict[str, Any] = {"baseModelDigest": DIGEST, "targetModules": r".*\.(q|v)_proj"}
    return json.dumps(sample.declaration(**changes)).encode()


def made(config: Path, out: Path) -> Catalog:
    assert main(["base", "catalog", str(config), "--base-digest", DIGEST, "-o", str(out)]) == 0
    return catalog_parse(out.read_bytes())


def test_a_config_alone_gives_the_catalog_that_a_worker_makes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu_worker.validation.catalog_builder import catalog_build
    from registry_service.domain.digests import Digest

    catalog = made(config, tmp_path / "catalog.json")
    assert catalog == catalog_build(dict(LLAMA), Digest(DIGEST))
    arguments = ["check", adapter(tmp_path), "--catalog", str(tmp_path / "catalog.json"), "--json"]
    capsys.readouterr()
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["baseDigest"] == DIGEST


def test_a_config_can_be_checked_against_without_naming_a_base(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", adapter(tmp_path), "--base-config", str(config), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["baseDigest"] is None
    assert f"making the catalog of {config}" in captured.err


def test_a_declared_base_is_compared_with_the_one_that_is_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", adapter(tmp_path, declared=True), "--base-config", str(config), "--json"]
    assert main([*arguments, "--base-digest", DIGEST]) == 0
    capsys.readouterr()
    assert main([*arguments, "--base-digest", "sha256:" + "e" * 64]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["code"], f["got"]) for f in findings] == [("DECLARATION_MISMATCH", DIGEST)]


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ({**LLAMA, "auto_map": {}}, 3, "auto_map"),
        ({"model_type": "nonesuch"}, 3, "model_type"),
        ([], 2, "expected an object"),
    ],
)
def test_a_config_that_makes_no_base_is_refused_with_the_builders_reason(
    config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: Any,
    code: int,
    said: str,
) -> None:
    config.write_text(json.dumps(content))
    out = tmp_path / "out"
    arguments = ["base", "catalog", str(config), "--base-digest", DIGEST, "-o", str(out)]
    assert main(arguments) == code
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("module", ["torch.py", "json.py", "gpu_worker/__init__.py"])
def test_nothing_is_imported_from_the_folder_that_is_checked(
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    module: str,
) -> None:
    folder, trace = Path(adapter(tmp_path)), tmp_path / "trace"
    (folder / module).parent.mkdir(exist_ok=True)
    (folder / module).write_text(f"import os; os.mkdir({str(trace)!r})")
    monkeypatch.chdir(folder)
    assert main(["check", ".", "--base-config", str(config), "--json"]) == 3
    found = {finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert "FILE_NAME_FORBIDDEN" in found
    assert not trace.exists()
