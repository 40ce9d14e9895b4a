"""The files of a folder that is this process's alone: whole or not there, and never through a link.

Everything goes through the folder's descriptor, so that a folder moved or replaced under its name
changes nothing. Modes are 0700 and 0600.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from registry_service.domain.errors import UnavailableError

_NEW: Final = ".new-"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class SlotFiles:
    """Reads, writes and removes files by name in one flat folder."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, made if there is none.

        Raises:
            UnavailableError: a link, somebody else's, or one that others can enter.
        """
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            self._folder = os.open(
                folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            raise UnavailableError(f"{folder}: cannot be used: {error.strerror}") from error
        status = os.fstat(self._folder)
        if status.st_mode & 0o077 or status.st_uid != os.geteuid():
            os.close(self._folder)
            raise UnavailableError(
                f"{folder}: expected mode 0700 and this process's user, "
                f"got {stat.filemode(status.st_mode)} of user {status.st_uid}"
            )

    def close(self) -> None:
        """Let the folder go."""
        os.close(self._folder)

    def names(self) -> set[str]:
        """Every name in the folder."""
        with os.scandir(self._folder) as entries:
            return {entry.name for entry in entries}

    def read(self, name: str, limit: int) -> bytes:
        """A plain file of at most ``limit`` bytes, read once.

        Raises:
            FileNotFoundError: there is none. OSError: a link, not a plain file, too large, or one
                that cannot be read.
        """
        with os.fdopen(os.open(name, _READ, dir_fd=self._folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
                raise OSError(f"expected a plain file of at most {limit} bytes")
            # One byte more than it had: a file that grows meanwhile is not taken for whole.
            content = file.read(status.st_size + 1)
        if len(content) != status.st_size:
            raise OSError("expected a file that does not change while it is read")
        return content

    def write(self, name: str, content: bytes | bytearray) -> None:
        """Make ``name`` hold exactly this: written beside, synced, renamed, the folder synced.

        Raises:
            OSError: it cannot; ``name`` is then whole, as it was or as it should be.
        """
        beside = _NEW + os.urandom(8).hex()
        try:
            with os.fdopen(os.open(beside, _WRITE, 0o600, dir_fd=self._folder), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(beside, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            # Whatever stopped it, nothing half written stays beside.
            with contextlib.suppress(OSError):
                self.remove(beside)
            raise
        os.fsync(self._folder)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)
