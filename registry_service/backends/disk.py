"""Durable folders, and faults of the disk as the project's own errors."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from registry_service.domain.errors import UnavailableError


def file_size(path: Path) -> int | None:
    """Size of a file, or None when there is none."""
    with disk_faults():
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None


def folder_make(folder: Path) -> None:
    """Make a folder and its parents, each durable in the one above."""
    if folder.is_dir():
        return
    folder_make(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    folder_sync(folder.parent)


def folder_sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_faults() -> Iterator[None]:
    """Turn faults of the disk into UnavailableError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "is full" if full else "does not answer"
        raise UnavailableError(f"the blob store {what}; try again later", retry_after=30) from error
