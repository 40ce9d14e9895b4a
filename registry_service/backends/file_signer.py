"""A signer whose Ed25519 key is a file that only its owner can read."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from registry_service.domain.errors import UnavailableError
from registry_service.trust.keys import key_id


class FileSigner:
    """Implements ``ports.Signer``."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._key_id = key_id(key.public_key())

    @classmethod
    def create(cls, path: Path) -> FileSigner:
        """Make a key and write it to a new file.

        Raises:
            FileExistsError: the file is there.
        """
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> FileSigner:
        """Read a key.

        Raises:
            UnavailableError: no such file, not an Ed25519 key, or others can read it.
        """
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise UnavailableError(
                        f"key {path.name}: expected mode 0600, got one that others can read"
                    )
                key = serialization.load_pem_private_key(file.read(), password=None)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise UnavailableError(
                f"key {path.name}: cannot be read; make it with 'python -m registry_service keys'"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise UnavailableError(f"key {path.name}: expected Ed25519")
        return cls(key)

    @property
    def key_id(self) -> str:
        """SHA-256 of the public key's DER form."""
        return self._key_id

    @property
    def public_pem(self) -> str:
        """The public key as PEM."""
        return (
            self._key.public_key()
            .public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            .decode()
        )

    def sign(self, message: bytes) -> bytes:
        """The Ed25519 signature of ``message``, 64 bytes."""
        return self._key.sign(message)
