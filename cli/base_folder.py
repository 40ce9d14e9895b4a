"""Reading a base model's folder: what is sent to the registry instead of the weights."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from registry_service.client_transfer import HashingReader, Progress
from registry_service.domain import limits
from registry_service.domain.base_model import (
    BASE_CONFIG_PATH,
    WEIGHT_SUFFIX,
    base_config_parse,
    base_json_check,
    base_media_type,
    base_names_check,
    base_precision,
    chat_template_digest,
    chat_template_of,
    is_base_file,
    is_tokenizer_file,
    may_ask_for_code,
    tokenizer_digest,
)
from registry_service.domain.canonical import json_parse
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError
from registry_service.domain.manifest import FileEntry, base_manifest_build
from registry_service.domain.verification import BaseFacts

_HEADER_BYTES = 32 * limits.MIB


@dataclass(frozen=True, slots=True)
class BaseFolder:
    """A base as it is registered: digest, manifest, small files, safetensors headers."""

    digest: Digest
    manifest: bytes
    files: dict[str, bytes]
    headers: dict[str, bytes]


def base_read(name: str, folder: Path, progress: Progress | None = None) -> BaseFolder:
    """Hash a base's config and weights, and read its small files and headers.

    Raises:
        MalformedError: not a base's folder. RefusedError: it would run code.
    """
    if not folder.is_dir():
        raise MalformedError(f"{folder}: expected a folder with config.json and *.safetensors")
    base_names_check(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    paths = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    for path in filter(may_ask_for_code, paths):
        base_json_check(path, (folder / path).read_bytes())
    entries, headers = [], {}
    for path in filter(is_base_file, paths):
        with HashingReader(folder / path) as reader:
            if path.endswith(WEIGHT_SUFFIX):
                headers[path] = _header(path, reader)
            done = 0
            for chunk in reader.chunks(0):
                done += len(chunk)
                if progress is not None:
                    progress(path, done, reader.size)
            entries.append(FileEntry(path, reader.digest(), reader.size, base_media_type(path)))
    small = [path for path in paths if path == BASE_CONFIG_PATH or is_tokenizer_file(path)]
    files = {path: (folder / path).read_bytes() for path in small}
    base_config_parse(files[BASE_CONFIG_PATH])
    precision = base_precision(_dtypes(headers))
    built = base_manifest_build(name, entries, precision)
    return BaseFolder(built.digest, built.manifest, files, headers)


def base_facts(folder: Path) -> BaseFacts:
    """Digests of a base's own tokenizer and chat template."""
    small = {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.is_file() and is_tokenizer_file(entry.name)
    }
    digests = {path: digest_of(data) for path, data in small.items()}
    return BaseFacts(tokenizer_digest(digests), chat_template_digest(chat_template_of(small)))


def _header(path: str, reader: HashingReader) -> bytes:
    head = reader.head(8)
    if len(head) < 8:
        raise MalformedError(f"{path}: not a safetensors file")
    (length,) = struct.unpack("<Q", head)
    if length > min(_HEADER_BYTES, reader.size):
        raise MalformedError(f"{path}: not a safetensors file; its header is over its limit")
    return reader.head(8 + length)


def _dtypes(headers: dict[str, bytes]) -> list[str]:
    found = []
    for path, content in headers.items():
        header = json_parse(content[8:].rstrip(b" "), what=path, limit=_HEADER_BYTES)
        try:
            found += [str(info["dtype"]) for key, info in header.items() if key != "__metadata__"]
        except (AttributeError, KeyError, TypeError) as error:
            raise MalformedError(f"{path}: not a safetensors file") from error
    return found
