"""A base model: its file set, and the digests of its tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.manifest import (
    TOKENIZER_PATHS,
    WEIGHT_CONFIG_MEDIA_TYPE,
    WEIGHT_MEDIA_TYPE,
)
from registry_service.domain.text import shown
from registry_service.domain.tokenizer_files import LARGEST_INTEGER

BASE_CONFIG_PATH: Final = "config.json"
WEIGHT_SUFFIX: Final = ".safetensors"
# Vocabularies and lists of tensors: large, and read as data alone.
_DATA_PATHS: Final = frozenset(
    {"tokenizer.json", "vocab.json", "added_tokens.json", "model.safetensors.index.json"}
)
_TEMPLATE_PATH: Final = "chat_template.jinja"
_PRECISIONS: Final = {"F32": "fp32", "F16": "fp16", "BF16": "bf16", "F64": "fp64"}


def is_tokenizer_file(path: str) -> bool:
    """True for the names that make up a tokenizer."""
    return path in TOKENIZER_PATHS


def is_base_file(path: str) -> bool:
    """True for the files whose bytes name the base: its config and its weights."""
    return path == BASE_CONFIG_PATH or path.endswith(WEIGHT_SUFFIX)


def base_media_type(path: str) -> str:
    """The layer media type of a base's file."""
    return WEIGHT_MEDIA_TYPE if path.endswith(WEIGHT_SUFFIX) else WEIGHT_CONFIG_MEDIA_TYPE


def base_precision(dtypes: Iterable[str]) -> str:
    """The precision in a base's manifest, from the dtypes in its safetensors headers.

    It is part of the bytes that name the base, so everyone who builds the manifest uses this.
    """
    names = {_PRECISIONS.get(dtype, "other") for dtype in dtypes}
    return names.pop() if len(names) == 1 else "mixed"


def base_names_check(paths: Iterable[str]) -> None:
    """Refuse a base directory that would run code or bring an adapter along.

    ``paths`` are those of all its files, with ``/`` between folders. transformers loads an
    ``adapter_config.json`` beside a base as an adapter of it.

    Raises:
        RefusedError: such a file is there, or config or weights are missing.
    """
    paths = sorted(paths)
    for path in paths:
        if path.rpartition("/")[2] == "adapter_config.json" or path.endswith(".py"):
            raise RefusedError(f"base: refused because it holds {shown(path)}; remove it")
    if BASE_CONFIG_PATH not in paths or not any(p.endswith(WEIGHT_SUFFIX) for p in paths):
        raise RefusedError("base: expected config.json and at least one .safetensors file")


def base_config_parse(content: bytes) -> dict[str, Any]:
    """A base's ``config.json``.

    Raises:
        MalformedError: not a JSON object. RefusedError: it asks for remote code.
    """
    config = json_parse(content, what="config.json", limit=limits.BASE_CONFIG_BYTES)
    if not isinstance(config, dict):
        raise MalformedError("config.json: expected an object")
    remote_code_refuse(config)
    return config


def may_ask_for_code(path: str) -> bool:
    """True for the names of a base's files that ``base_json_check`` has to see."""
    return path.endswith(".json") and path not in _DATA_PATHS


def base_json_check(path: str, content: bytes) -> None:
    """Refuse a JSON file beside a base's weights that asks for code.

    A tokenizer's and a processor's config may name a class of their own, as ``config.json`` may.
    What is no JSON says nothing to anybody.

    Raises:
        RefusedError: it holds an ``auto_map``.
    """
    try:
        remote_code_refuse(json.loads(content), path)
    except (ValueError, RecursionError):
        return


def remote_code_refuse(value: Any, path: str = BASE_CONFIG_PATH) -> None:
    """Refuse a config that asks for code, at any depth: the models inside a model have configs.

    Raises:
        RefusedError: it holds an ``auto_map``.
    """
    if isinstance(value, Mapping):
        if "auto_map" in value:
            raise RefusedError(
                f"{shown(path)}: auto_map asks for remote code, which is never run here"
            )
        for item in value.values():
            remote_code_refuse(item, path)
    elif isinstance(value, list):
        for item in value:
            remote_code_refuse(item, path)


def tokenizer_digest(files: Mapping[str, Digest]) -> Digest:
    """The digest of the canonical JSON list of tokenizer files, sorted by name."""
    listed = [
        {"path": path, "digest": files[path]}
        for path in sorted(files)
        if path != _TEMPLATE_PATH and is_tokenizer_file(path)
    ]
    return digest_of(canonical_json(listed))


def chat_template_of(files: Mapping[str, bytes]) -> str:
    """The chat template of a tokenizer's files, or the empty text.

    It stands in ``chat_template.jinja`` or, in older folders, in ``tokenizer_config.json``.

    Raises:
        MalformedError: neither text nor absent; several named templates are one choice too many.
    """
    if _TEMPLATE_PATH in files:
        try:
            return files[_TEMPLATE_PATH].decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedError(f"{_TEMPLATE_PATH}: not UTF-8") from error
    if "tokenizer_config.json" in files:
        config = json_parse(
            files["tokenizer_config.json"],
            what="tokenizer_config.json",
            limit=limits.DOC_BYTES,
            max_integer=LARGEST_INTEGER,
        )
        if not isinstance(config, dict):
            raise MalformedError("tokenizer_config.json: expected an object")
        template = config.get("chat_template", "")
        if template is None:
            return ""
        if not isinstance(template, str):
            raise MalformedError("tokenizer_config.json: chat_template: expected one text")
        return template
    return ""


def chat_template_digest(template: str) -> Digest:
    """The digest of a chat template's text."""
    return digest_of(template.encode("utf-8"))
