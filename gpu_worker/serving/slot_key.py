"""The node's key: what it writes about sessions can be read, and be written, by this node alone.

AES-256-GCM with a fresh random nonce for each sealed text (NIST SP 800-38D, 8.2.2: at most 2^32 of
them under one key, which at a hundred a second takes over a year; making a new key costs one cold
prefill a session). Digests of what a session said are keyed as well, since a plain one would let
whoever reads it confirm a guess.
"""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from registry_service.domain.digests import Digest
from registry_service.domain.errors import UnavailableError, UntrustedError

KEY_BYTES: Final = 32
SEAL_BYTES: Final = 28
"""How much longer a sealed text is: its nonce and its tag."""
_NONCE_BYTES: Final = 12


class NodeKey:
    """Seals, opens and digests under 32 secret bytes, which it never shows."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise UnavailableError(f"node key: expected {KEY_BYTES} bytes, got {len(secret)}")
        # Each use has a key of its own, so that no use can be turned into another.
        self._seal = AESGCM(hmac.digest(secret, b"adapter-registry/node-key/seal", "sha256"))
        self._digest = hmac.digest(secret, b"adapter-registry/node-key/digest", "sha256")
        self.key_id = Digest(
            "sha256:" + hmac.digest(secret, b"adapter-registry/node-key/id", "sha256").hex()
        )

    @classmethod
    def load_or_create(cls, path: Path) -> NodeKey:
        """The key in a file of mode 0600, made if there is none.

        Raises:
            UnavailableError: it cannot be read, is a link, or others can read it.
        """
        try:
            if not path.is_symlink() and not path.exists():
                _create(path)
            return cls(_read(path))
        except OSError as error:
            raise UnavailableError(
                f"node key {path.name}: cannot be used: {error.strerror}"
            ) from error

    def seal(self, plain: bytes, associated: bytes) -> bytearray:
        """Encrypt, and bind to ``associated``: nonce, ciphertext and tag."""
        nonce = os.urandom(_NONCE_BYTES)
        # In place: a page is large, and this is its only copy.
        sealed = bytearray(len(plain) + SEAL_BYTES)
        sealed[:_NONCE_BYTES] = nonce
        with memoryview(sealed) as view:
            self._seal.encrypt_into(nonce, plain, associated, view[_NONCE_BYTES:])
        return sealed

    def open(self, sealed: bytes | bytearray, associated: bytes) -> bytes:
        """What was sealed with this key and ``associated``.

        Raises:
            UntrustedError: other bytes, another key, or other associated data.
        """
        try:
            view = memoryview(sealed)
            return self._seal.decrypt(view[:_NONCE_BYTES], view[_NONCE_BYTES:], associated)
        except (InvalidTag, ValueError) as error:
            raise UntrustedError("expected what this node sealed, got other bytes") from error

    def digest(self, purpose: str, data: bytes) -> Digest:
        """A keyed SHA-256 of ``data`` for one purpose."""
        state = hmac.new(self._digest, purpose.encode() + b"\0", "sha256")
        state.update(data)
        return Digest("sha256:" + state.hexdigest())


def _create(path: Path) -> None:
    """Written beside and linked into place: a key that is there is whole, and never replaced."""
    beside = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(KEY_BYTES))
            file.flush()
            os.fsync(descriptor)
        os.link(beside, path)
    finally:
        beside.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
            raise UnavailableError(
                f"node key {path.name}: expected a plain file of mode 0600, "
                f"got {stat.filemode(status.st_mode)}; correct it, or remove it for a new one"
            )
        return file.read(KEY_BYTES + 1)
