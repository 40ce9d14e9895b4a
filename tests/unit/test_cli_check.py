"""``adapterctl check`` and ``adapterctl base catalog`` without a service and without torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cli.main import main
from registry_service import matching
from registry_service.domain import limits
from tests import sample_adapter as sample


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    path = tmp_path / "catalog.json"
    path.write_bytes(sample.catalog().to_bytes())
    return str(path)


def folder(
    path: Path, tensors: Mapping[str, Any] | None = None, declared: bool = False, **config: Any
) -> str:
    content = sample.files(
        config=json.dumps(sample.config(**config)).encode(),
        weights=sample.weights(tensors or sample.tensors()),
        declaration=json.dumps(sample.declaration()).encode() if declared else None,
    )
    return str(sample.write(path / "adapter", content))


def codes(capsys: pytest.CaptureFixture[str]) -> set[str]:
    return {finding["code"] for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.parametrize("expression", [r".*\.(q|v)_proj", r"model(?!.*(c_fc|norm)).*\.\w_proj"])
def test_targets_may_be_a_regular_expression(tmp_path: Path, catalog: str, expression: str) -> None:
    adapter = folder(tmp_path, target_modules=expression)
    assert main(["check", adapter, "--catalog", catalog]) == 0


@pytest.mark.parametrize(
    ("expression", "said"), [(".*(.*)*q_projX", "processor time"), ("(", "unterminated")]
)
def test_an_expression_that_runs_on_or_does_not_compile_is_refused(
    tmp_path: Path,
    catalog: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    expression: str,
    said: str,
) -> None:
    monkeypatch.setattr(limits, "MATCH_CPU_SECONDS", 0)
    adapter = folder(tmp_path, target_modules=expression)
    assert main(["check", adapter, "--catalog", catalog, "--json"]) == 3
    out = capsys.readouterr().out
    assert said in out
    assert {finding["code"] for finding in json.loads(out)["findings"]} == {"EXPRESSION_REFUSED"}


def test_a_machine_that_cannot_match_says_try_again(
    tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_PROCESS", tmp_path / "none.py")
    adapter = folder(tmp_path, target_modules=r".*\.(q|v)_proj")
    assert main(["check", adapter, "--catalog", catalog]) == 7


def test_full_tensors_pass_only_for_a_tenant_that_may(
    tmp_path: Path, catalog: str, capsys: pytest.CaptureFixture[str]
) -> None:
    norm = "model.layers.0.norm"
    saved = {f"base_model.model.{norm}.weight": ("F32", (sample.WIDTH,))}
    adapter = folder(tmp_path, {**sample.tensors(), **saved}, modules_to_save=[norm])
    assert main(["check", adapter, "--catalog", catalog, "--json"]) == 3
    assert "FULL_TENSOR" in codes(capsys)
    arguments = ["check", adapter, "--catalog", catalog, "--allow-full-tensors", "--json"]
    assert main(arguments) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--catalog FILE"),
        (["--catalog", "c", "--base", "b"], "name one of"),
        (["--base", "b", "--base-config", "c"], "name one of"),
        (["--catalog", "c", "--base-digest", sample.BASE_DIGEST], "a catalog names its base"),
        (["--base-config", "c", "--base-digest", "sha256:short"], "64 lower-case hex"),
        (["--base-config", "c"], "names a base digest: give --base-digest"),
    ],
)
def test_check_wants_one_base_to_check_against(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["check", folder(tmp_path, declared=True), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_catalog_names_its_base_and_nothing_is_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config, out = tmp_path / "config.json", tmp_path / "catalog.json"
    config.write_text('{"model_type": "llama"}')
    for source in (config, tmp_path, tmp_path / "none"):
        assert main(["base", "catalog", str(source), "-o", str(out)]) == 2
        assert "give --base-digest" in capsys.readouterr().err
    assert not out.exists()


def test_without_the_worker_extra_it_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = ["--base-digest", sample.BASE_DIGEST]
    out = ["-o", str(tmp_path / "out")]
    assert main(["base", "catalog", str(tmp_path), *arguments, *out]) == 7
    said = capsys.readouterr().err
    assert "torch and transformers" in said and "adapter-registry[worker]" in said
    adapter = folder(tmp_path)
    assert main(["check", adapter, "--base-config", str(tmp_path / "c"), *arguments]) == 7
