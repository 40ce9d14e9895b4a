"""From a training output folder to an artifact: what is taken, what is left out, what is stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli import main as cli_main
from cli.base_folder import base_read
from cli.publish_folder import (
    Statement,
    declaration_build,
    files_choose,
    publish_files,
)
from registry_service.domain.base_model import chat_template_digest, tokenizer_digest
from registry_service.domain.declaration import declaration_parse
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError, RefusedError

TOKENIZER = b'{"version": "1.0"}'
BASE = {
    "baseModelDigest": digest_of(b"base"),
    "tokenizerDigest": tokenizer_digest({"tokenizer.json": digest_of(TOKENIZER)}),
    "chatTemplateDigest": chat_template_digest(""),
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["v_proj", "q_proj"],
    "bias": "none",
    "peft_version": "0.21.2",
}
STATEMENT = Statement("t-1042", "support-zh", "data-1", "none", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_what_does_not_belong_is_left_out_with_a_reason(folder: Path) -> None:
    for name in ("optimizer.pt", "training_args.bin", "adapter_model.bin", "notes.txt"):
        (folder / name).write_bytes(b"x")
    (folder / "checkpoint-30").mkdir()
    (folder / "README.md").write_text("about")
    (folder / "adapter-declaration.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to("/etc/passwd")
    chosen = files_choose(folder, BASE)
    assert sorted(chosen.files) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    reasons = dict(chosen.left_out)
    assert "trainer" in reasons["optimizer.pt"]
    assert "pickle" in reasons["adapter_model.bin"]
    assert "checkpoint" in reasons["checkpoint-30"]
    assert reasons["tokenizer.json"] == "a link"
    assert "anew" in reasons["adapter-declaration.json"]
    assert reasons["notes.txt"] == "not a file of an adapter"


def test_the_bases_own_tokenizer_is_left_out(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    chosen = files_choose(folder, BASE)
    assert "tokenizer.json" not in chosen.files
    assert chosen.own.tokenizer_digest is None
    assert "base's own" in dict(chosen.left_out)["tokenizer.json"]


def test_a_tokenizer_of_its_own_is_taken_and_declared(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "evaluation-report.json").write_text("{}")
    chosen = files_choose(folder, BASE)
    declaration = declaration_build(chosen, BASE, STATEMENT)
    assert declaration.tokenizer_digest == tokenizer_digest({"tokenizer.json": digest_of(b"{}")})
    assert declaration.chat_template_digest == chat_template_digest("{{ x }}")
    assert declaration.evaluation_report_digest == digest_of(b"{}")


def test_the_declaration_says_what_the_config_says(folder: Path) -> None:
    chosen = files_choose(folder, BASE)
    declaration = declaration_build(chosen, BASE, STATEMENT)
    assert (declaration.rank, declaration.alpha) == (8, 16)
    assert declaration.target_modules == ("q_proj", "v_proj")
    assert declaration.base_model_digest == BASE["baseModelDigest"]
    assert declaration.tokenizer_digest == BASE["tokenizerDigest"]
    assert declaration.max_replicas == 2
    files = {file.path: file.source for file in publish_files(chosen, declaration)}
    source = files["adapter-declaration.json"]
    assert isinstance(source, bytes) and declaration_parse(source) == declaration


@pytest.mark.parametrize("missing", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_folder_without_weights_or_config_is_malformed(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(MalformedError, match=missing):
        files_choose(folder, BASE)


def test_a_config_that_would_be_refused_is_refused_before_it_is_sent(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "bias": "all"}))
    with pytest.raises(RefusedError) as refused:
        declaration_build(files_choose(folder, BASE), BASE, STATEMENT)
    assert refused.value.findings


def test_options_in_another_form_are_malformed(folder: Path) -> None:
    statement = Statement("t-1042", "support-zh", "data-1", "NF4 ?", 2)
    with pytest.raises(MalformedError, match="declaration"):
        declaration_build(files_choose(folder, BASE), BASE, statement)


def test_publish_takes_no_version_in_the_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["publish", str(folder), "t/a:v1", "--base", "b", "--training-data-version", "d"]
    assert cli_main.main(arguments) == 2
    assert "--label" in capsys.readouterr().err


def base_folder(folder: Path) -> Path:
    header = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\x00\x00"
    )
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    (folder / "generation_config.json").write_text("{}")
    return folder


def test_a_base_is_read_without_its_weights(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    base = base_read("b", base_folder(tmp_path), lambda *step: seen.append(step))
    assert sorted(base.files) == ["config.json", "tokenizer.json"]
    assert list(base.headers) == ["model.safetensors"]
    assert base.headers["model.safetensors"].endswith(b"}}")
    assert digest_of(base.manifest) == base.digest
    assert ("model.safetensors", seen[-1][2], seen[-1][2]) == seen[-1]
    assert base_read("another-name", tmp_path).digest == base.digest


@pytest.mark.parametrize("name", ["modeling_x.py", "adapter_config.json"])
def test_a_base_that_would_run_code_is_refused(tmp_path: Path, name: str) -> None:
    (base_folder(tmp_path) / name).write_text("{}")
    with pytest.raises(RefusedError):
        base_read("b", tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x80\x04junk"])
def test_weights_that_are_no_safetensors_are_malformed(tmp_path: Path, content: bytes) -> None:
    (base_folder(tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(MalformedError, match=r"model\.safetensors"):
        base_read("b", tmp_path)
