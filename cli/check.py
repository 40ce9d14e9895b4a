"""``adapterctl check``: the static checks on a folder, without a service and without torch.

Tensor data is not read: of each file its first and last bytes, of the weights the header. The
agreement with the safetensors library (part of check 2 in the service) is left to ``library``.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog
from registry_service.domain.digests import Digest
from registry_service.domain.errors import MalformedError
from registry_service.domain.file_set import HEAD_BYTES, TAIL_BYTES, FileFact, size_limit
from registry_service.domain.manifest import (
    ADAPTER_PATHS,
    CONFIG_PATH,
    DECLARATION_PATH,
    DOC_PATHS,
    TOKENIZER_PATHS,
    WEIGHT_PATH,
)
from registry_service.domain.report import findings_group
from registry_service.domain.safetensors_header import LENGTH_BYTES, header_end
from registry_service.domain.text import shown
from registry_service.domain.verification import (
    WHOLE_PATHS,
    BaseFacts,
    LibraryCheck,
    OwnFacts,
    StaticInputs,
    own_facts,
    static_check,
    verdict_of,
)
from registry_service.matching import expressions_match

_UNKNOWN_BASE: Final = BaseFacts(None, None)
_SEEN_FILES: Final = limits.ADAPTER_FILES + 1


def check_folder(
    folder: Path,
    catalog: Catalog,
    base: BaseFacts = _UNKNOWN_BASE,
    *,
    only: frozenset[str] | None = None,
    library: LibraryCheck | None = None,
    full_tensors: bool = False,
) -> dict[str, Any]:
    """The report on an adapter's folder: verdict, base digest, all findings, groups and modules.

    ``only`` limits it to these paths (what a publisher has picked). A declaration is checked when
    it is there; ``publish`` writes it. ``full_tensors`` stands for the tenant's policy.

    Raises:
        MalformedError: the folder or a file of it cannot be read at all.
        UnavailableError: this machine had no room or time to match its regular expressions.
    """
    try:
        inputs = replace(_inputs(folder, catalog, base, only), full_tensors=full_tensors)
    except OSError as error:
        raise MalformedError(
            f"{shown(str(folder))}: cannot be read: {error.strerror or 'no such folder'}"
        ) from error
    report = static_check(inputs, library, expressions_match)
    return {
        "verdict": verdict_of(report.findings),
        "baseDigest": catalog.base_digest,
        "findings": [finding.to_json() for finding in report.findings],
        "groups": [group.to_json() for group in findings_group(report.findings)],
        "modules": [group.to_json() for group in report.modules],
    }


def _inputs(
    folder: Path, catalog: Catalog, base: BaseFacts, only: frozenset[str] | None
) -> StaticInputs:
    facts = tuple(_fact(folder, path) for path in _paths(folder) if only is None or path in only)
    if not facts:
        raise MalformedError(f"{shown(str(folder))}: expected an adapter's folder, got no files")
    regular = {fact.path: fact for fact in facts if not fact.is_link}
    weight = regular.get(WEIGHT_PATH)
    return StaticInputs(
        files=facts,
        header_prefix=_header(folder, weight),
        weight_size=weight.size if weight else 0,
        config=_bytes(folder, regular.get(CONFIG_PATH), limits.CONFIG_BYTES + 1),
        declaration=_bytes(folder, regular.get(DECLARATION_PATH), limits.DECLARATION_BYTES + 1),
        catalog=catalog,
        base=base,
        own=_own(folder, regular),
        declaration_required=False,
    )


def _paths(folder: Path) -> list[str]:
    """Relative paths of files and links, sorted; a few more than an adapter may have at most."""
    if not folder.is_dir():
        raise NotADirectoryError(20, "expected a folder")
    paths = sorted(_walk(folder))
    known = [path for path in paths if path in ADAPTER_PATHS]
    others = [path for path in paths if path not in ADAPTER_PATHS]
    return known + others[:_SEEN_FILES]


def _walk(folder: Path) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for parent, directories, files in os.walk(folder, onerror=fail, followlinks=False):
        links = [name for name in directories if (Path(parent) / name).is_symlink()]
        for name in (*files, *links):
            yield (Path(parent) / name).relative_to(folder).as_posix()


def _fact(folder: Path, path: str) -> FileFact:
    status = (folder / path).lstat()
    if not stat.S_ISREG(status.st_mode):
        # A device or pipe is no more a file of an adapter than a link is, and is never opened.
        return FileFact(path, 0, b"", b"", is_link=True)
    with (folder / path).open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, status.st_size - TAIL_BYTES))
        tail = file.read(TAIL_BYTES)
    return FileFact(path, status.st_size, head, tail, is_link=False)


def _header(folder: Path, weight: FileFact | None) -> bytes | None:
    start = _bytes(folder, weight, LENGTH_BYTES)
    return None if start is None else _bytes(folder, weight, header_end(start))


def _bytes(folder: Path, fact: FileFact | None, count: int) -> bytes | None:
    if fact is None:
        return None
    with (folder / fact.path).open("rb") as file:
        return file.read(count)


def _own(folder: Path, regular: dict[str, FileFact]) -> OwnFacts:
    small = {
        path: fact
        for path, fact in regular.items()
        if path in TOKENIZER_PATHS | DOC_PATHS and fact.size <= size_limit(path)
    }
    digests = {path: _digest(folder / path) for path in small}
    templates = {
        path: _bytes(folder, small[path], limits.DOC_BYTES) for path in WHOLE_PATHS & small.keys()
    }
    return own_facts(digests, {path: data for path, data in templates.items() if data is not None})


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return Digest("sha256:" + hashlib.file_digest(file, "sha256").hexdigest())
