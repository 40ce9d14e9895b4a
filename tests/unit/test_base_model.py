"""A base's files and the digests of its tokenizer and template."""

from __future__ import annotations

import json

import pytest

from registry_service.domain import base_model as b
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError, RefusedError


def test_tokenizer_digest_takes_tokenizer_files_only() -> None:
    files = {"tokenizer.json": digest_of(b"1"), "vocab.json": digest_of(b"2")}
    expected = b.tokenizer_digest(files)
    more = {"chat_template.jinja": digest_of(b"3"), "README.md": digest_of(b"4")}
    assert b.tokenizer_digest(more | dict(reversed(files.items()))) == expected
    assert b.tokenizer_digest(files | {"vocab.json": digest_of(b"3")}) != expected
    assert b.tokenizer_digest({"tokenizer.json": digest_of(b"1")}) != expected


def test_template_comes_from_its_file_first() -> None:
    config = json.dumps({"chat_template": "old"}).encode()
    files = {"tokenizer_config.json": config}
    assert b.chat_template_of(files) == "old"
    assert b.chat_template_of(files | {"chat_template.jinja": b"new"}) == "new"
    assert b.chat_template_of({}) == b.chat_template_of({"tokenizer_config.json": b"{}"}) == ""
    assert b.chat_template_digest("") == digest_of(b"")


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": b"\xff"},
        {"tokenizer_config.json": b"[]"},
        {"tokenizer_config.json": b'{"chat_template":[{"name":"a","template":"b"}]}'},
    ],
)
def test_no_guessing_about_templates(files: dict[str, bytes]) -> None:
    with pytest.raises(MalformedError):
        b.chat_template_of(files)


def test_names_and_config_of_a_base() -> None:
    b.base_names_check(["config.json", "model-00001-of-00002.safetensors", "tokenizer.json"])
    for paths in (["config.json"], ["m.safetensors"]):
        with pytest.raises(RefusedError):
            b.base_names_check(paths)
    for extra in ("adapter_config.json", "modeling.py", "sub/adapter_config.json", "a/b/x.py"):
        with pytest.raises(RefusedError, match=extra):
            b.base_names_check(["config.json", "m.safetensors", extra])
    assert b.base_config_parse(b'{"model_type":"llama"}') == {"model_type": "llama"}


@pytest.mark.parametrize(
    "config",
    [
        b'{"auto_map":{}}',
        b'{"text_config":{"auto_map":{"AutoModel":"evil.Model"}}}',
        b'{"parts":[{"more":[{"auto_map":null}]}]}',
    ],
)
def test_a_config_that_asks_for_code_at_any_depth_is_refused(config: bytes) -> None:
    with pytest.raises(RefusedError, match="auto_map"):
        b.base_config_parse(config)


@pytest.mark.parametrize("path", ["tokenizer_config.json", "processor_config.json"])
def test_a_file_beside_the_config_may_not_ask_for_code_either(path: str) -> None:
    assert b.may_ask_for_code(path)
    b.base_json_check(path, b'{"tokenizer_class": "LlamaTokenizer", "model_max_length": 1e30}')
    b.base_json_check(path, b"no JSON")
    with pytest.raises(RefusedError, match=f"{path}.*auto_map"):
        b.base_json_check(path, b'{"deep": [{"auto_map": {"AutoTokenizer": "evil.T"}}]}')


def test_a_vocabulary_is_data() -> None:
    assert not b.may_ask_for_code("tokenizer.json")
    assert not b.may_ask_for_code("tokenizer.model")
