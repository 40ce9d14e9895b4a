"""What the service needs from the outside, as Protocols; ``backends`` implement them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Protocol
from uuid import UUID

from registry_service.domain.digests import Digest


class Clock(Protocol):
    """The time."""

    def now(self) -> datetime:
        """Now, in UTC with its zone."""
        ...


class Signer(Protocol):
    """Signs with one key, which may live in another process or a KMS."""

    @property
    def key_id(self) -> str:
        """SHA-256 of the public key's DER form."""
        ...

    @property
    def public_pem(self) -> str:
        """The public key as PEM."""
        ...

    def sign(self, message: bytes) -> bytes:
        """The signature of ``message``."""
        ...


class StagedWriter(Protocol):
    """Takes the bytes of one request of an upload."""

    def write(self, chunk: bytes) -> None:
        """Append ``chunk``, whole or not at all.

        Raises UnavailableError when the store is full or down.
        """
        ...

    def close(self) -> None:
        """End the request; what was written counts. Safe to repeat."""
        ...


class BlobStore(Protocol):
    """Content-addressed bytes of each tenant, apart. What comes out is verified."""

    def upload_begin(self, tenant: UUID, upload: UUID) -> None:
        """Open an empty upload. Raises ConflictError when it was begun before."""
        ...

    def upload_writer(self, tenant: UUID, upload: UUID, offset: int) -> StagedWriter:
        """Append to an upload that holds ``offset`` bytes.

        Raises NotFoundError, and ConflictError when it holds another number of bytes or another
        request has it.
        """
        ...

    def upload_size(self, tenant: UUID, upload: UUID) -> int | None:
        """Bytes of an upload so far, or None when there is none."""
        ...

    def upload_commit(
        self, tenant: UUID, upload: UUID, digest: Digest, known: tuple[int, Digest] | None
    ) -> int:
        """Make an upload the blob ``digest``; its size.

        ``known`` is the size and digest of the bytes as they arrived; without it, or when the
        upload holds another number of bytes, they are read again. Repeating it, after the upload
        became the blob, is safe. Raises RefusedError when the digest differs, NotFoundError when
        there is neither upload nor blob.
        """
        ...

    def upload_abort(self, tenant: UUID, upload: UUID) -> None:
        """Drop an upload; safe to repeat."""
        ...

    def size(self, tenant: UUID, digest: Digest) -> int | None:
        """Size of a blob, or None."""
        ...

    def open(
        self, tenant: UUID, digest: Digest, *, size: int, start: int = 0, end: int | None = None
    ) -> Iterator[bytes]:
        """The bytes [start, end) of a blob of ``size`` bytes, in chunks.

        A whole read is hashed, and its last chunk is held back until the digest is right. Raises
        CorruptStoreError for wrong bytes, a wrong length or a missing blob, the latter two before
        the first chunk is asked for.
        """
        ...

    def read(self, tenant: UUID, digest: Digest, *, limit: int) -> bytes:
        """A small blob, whole and verified. Raises CorruptStoreError, TooLargeError."""
        ...

    def uploads(self, tenant: UUID) -> Iterator[tuple[UUID, datetime]]:
        """Every upload of a tenant and when it was last written, in no order."""
        ...

    def delete(self, tenant: UUID, digest: Digest) -> None:
        """Remove a blob; safe to repeat."""
        ...

    def list(self, tenant: UUID) -> Iterator[tuple[Digest, datetime]]:
        """Every blob of a tenant and when it was committed; for the sweeper."""
        ...
