"""Proving a base directory: its bytes are hashed, and the digest of the manifest names the base.

The validation worker and the serving worker both start here. What counts is what is hashed here,
never the directory's name.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from registry_service.domain import limits
from registry_service.domain.base_model import (
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
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import MalformedError, RefusedError
from registry_service.domain.manifest import FileEntry, base_manifest_build

_CHUNK_BYTES: Final = 4 * limits.MIB

Stamp = tuple[str, int, int, int]
"""A file's path, size, mtime in nanoseconds and inode."""


@dataclass(frozen=True, slots=True)
class ProvenBase:
    """A base directory whose bytes were hashed; ``files`` are its config and weights."""

    digest: Digest
    manifest: bytes
    config: bytes
    tokenizer_digest: Digest
    chat_template_digest: Digest
    dir: Path
    files: tuple[FileEntry, ...]
    stamps: tuple[Stamp, ...]


def base_prove(directory: Path) -> ProvenBase:
    """Hash a base directory's config, weights and tokenizer.

    Raises:
        RefusedError: files that no base may have, or none where some must be.
        MalformedError: a file that cannot be read.
    """
    directory = directory.resolve()
    try:
        paths = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
        every = (path for path in directory.rglob("*") if path.is_file())
        base_names_check(path.relative_to(directory).as_posix() for path in every)
        for path in filter(may_ask_for_code, paths):
            base_json_check(path, _small_file(directory / path))
        stamps = _stamps(directory, paths)
        entries = tuple(_entry(directory, path) for path in paths if is_base_file(path))
        tokenizer = {p: _small_file(directory / p) for p in paths if is_tokenizer_file(p)}
        config = _small_file(directory / "config.json")
        precision = base_precision(_dtypes(directory, [entry.path for entry in entries]))
        changed = _stamps(directory, paths) != stamps
    except OSError as error:
        raise MalformedError(f"base {directory}: {error.strerror or error}") from error
    if changed:
        raise RefusedError(f"base {directory}: changed while it was hashed; start again")
    base_config_parse(config)
    built = base_manifest_build(directory.name, entries, precision)
    return ProvenBase(
        digest=built.digest,
        manifest=built.manifest,
        config=config,
        tokenizer_digest=tokenizer_digest({p: digest_of(data) for p, data in tokenizer.items()}),
        chat_template_digest=chat_template_digest(chat_template_of(tokenizer)),
        dir=directory,
        files=entries,
        stamps=stamps,
    )


def base_reprove(proven: ProvenBase) -> ProvenBase:
    """The same base, proven still to be what it was.

    Hashing all weights for every job costs seconds for small bases and minutes for large ones, so
    files whose size, modification time and inode are as they were count as unchanged; when one
    differs, everything is hashed again. Whoever can forge those three on this node can also
    replace the worker; the loaded parameters' own hash is compared after every job besides.

    Raises:
        RefusedError: other bytes lie there now. MalformedError: they cannot be read.
    """
    try:
        paths = sorted(entry.name for entry in proven.dir.iterdir() if entry.is_file())
        if _stamps(proven.dir, paths) == proven.stamps:
            return proven
    except OSError as error:
        raise MalformedError(f"base {proven.dir}: {error.strerror or error}") from error
    again = base_prove(proven.dir)
    if again.digest != proven.digest:
        raise RefusedError(
            f"BASE_DIFFERS: base {proven.dir}: expected {proven.digest}, got {again.digest}"
        )
    return again


def _stamps(directory: Path, paths: list[str]) -> tuple[Stamp, ...]:
    # Only what enters a digest: an editor's leftover beside the weights changes nothing.
    wanted = [path for path in paths if is_base_file(path) or is_tokenizer_file(path)]
    stats = [(path, (directory / path).stat()) for path in wanted]
    return tuple((path, s.st_size, s.st_mtime_ns, s.st_ino) for path, s in stats)


def _entry(directory: Path, path: str) -> FileEntry:
    state, size = hashlib.sha256(), 0
    for chunk in _chunks(directory / path):
        state.update(chunk)
        size += len(chunk)
    return FileEntry(path, Digest("sha256:" + state.hexdigest()), size, base_media_type(path))


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _small_file(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(limits.TOKENIZER_FILE_BYTES + 1)
    if len(content) > limits.TOKENIZER_FILE_BYTES:
        raise MalformedError(f"{path}: expected at most {limits.TOKENIZER_FILE_BYTES} bytes")
    return content


def _dtypes(directory: Path, paths: list[str]) -> Iterator[str]:
    for path in paths:
        if path.endswith(".safetensors"):
            yield from _header_dtypes(directory / path)


def _header_dtypes(path: Path) -> set[str]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > 100 * limits.MIB:
                raise MalformedError(f"{path}: not a safetensors file")
            header = json.loads(file.read(length))
        return {str(info["dtype"]) for name, info in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedError(f"{path}: not a safetensors file") from error
