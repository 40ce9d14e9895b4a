"""What a node does before an adapter may run: numbered steps, all of them, every time.

1. the revocation list does not name it, and the verdict is fetched; 2. it verifies offline against
the pinned key, for this base, tenant and time, and over a catalog that this base was
admitted with; 3. the files are
pulled, unless they lie there from before; 4. they are read once and hashed against the verdict;
5. config, header and tensors agree exactly with the catalog, and neither weights nor tensors are
those of a revoked one; 6. the tensors of that very buffer are attached; 7. they are applied to as
many modules as expected; 8. the base's parameters are as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from gpu_worker.serving.adapter import Adapter, LoraError
from gpu_worker.serving.adapter_load import BaseIdentity, adapter_read, files_read
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sealed import Sealed
from gpu_worker.serving.sequence import EngineError
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.trust import Trust
from registry_service.client import RegistryClient
from registry_service.domain.digests import Digest, digest_equal
from registry_service.domain.errors import (
    NotFoundError,
    RefusedError,
    UntrustedError,
)
from registry_service.domain.manifest import WEIGHT_PATH, manifest_parse
from registry_service.domain.roles import PLATFORM
from registry_service.trust.verdict import VerdictClaims, base_verify, verdict_verify

_LOG = logging.getLogger(__name__)


class Clock(Protocol):
    """The time."""

    def __call__(self) -> datetime:
        """Now, with its zone."""
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A loaded adapter: what its verdict says, and its resident bytes.

    ``chat_template`` is its own; None where it has its base's.
    """

    claims: VerdictClaims
    chat_template_digest: Digest
    chat_template: str | None
    size: int


class RevokedBytesError(RefusedError):
    """The adapter's weights or tensors are those of a revoked one."""


class AdapterHost(Protocol):
    """Runs attached adapters."""

    def attach(self, name: Key, adapter: Adapter) -> tuple[int, int]:
        """Make an adapter usable: modules that carry it now, and its resident bytes."""
        ...

    def detach(self, name: Key) -> int:
        """Let it go; the bytes it took. Refused while it is in use."""
        ...

    def cancel(self, name: Key) -> int:
        """Cancel what runs on it; how many."""
        ...


class Admission:
    """Fetches, proves and loads adapters for one base."""

    def __init__(
        self,
        client: RegistryClient,
        trust: Trust,
        base: BaseIdentity,
        engine: AdapterHost,
        store: NodeStore,
        held: HeldList,
        *,
        now: Clock,
        base_unchanged: Callable[[], bool],
    ) -> None:
        self.base = base
        self._client = client
        self._trust = trust
        self._engine = engine
        self._store = store
        self._held = held
        self._now = now
        self._base_unchanged = base_unchanged
        # What the engine may have something of.
        self._attached: set[Key] = set()
        self._catalogs: frozenset[Digest] = frozenset()

    def verdict(
        self, tenant: str, adapter: str, digest: Digest, tenant_id: UUID | None
    ) -> VerdictClaims:
        """Steps 1 and 2.

        Raises:
            NotFoundError: not admitted, or revoked. UntrustedError: it does not hold here.
        """
        if self._held.find(tenant_id or PLATFORM, digest):
            raise NotFoundError("not found")
        claims = verdict_verify(
            self._client.verdict(tenant, digest),
            trusted=self._trust.verifiers,
            adapter_digest=digest,
            base_digest=self.base.digest,
            tenant_id=tenant_id,
            now=self._now(),
        )
        if (claims.tenant, claims.adapter) != (tenant, adapter):
            raise UntrustedError("a verdict of another tenant or adapter")
        self._catalog_check(claims.catalog_digest)
        return claims

    def size(self, claims: VerdictClaims) -> int:
        """Bytes of the files, from the manifest that the adapter digest names.

        Raises:
            UntrustedError: the manifest does not hold, or names other files than the verdict.
        """
        content = self._client.manifest(claims.tenant, claims.adapter, claims.adapter_digest)
        manifest = manifest_parse(content)
        if not digest_equal(manifest.digest, claims.adapter_digest):
            raise UntrustedError("manifest: expected that of the adapter digest, got another")
        if sorted((file.path, file.digest) for file in manifest.files) != sorted(claims.files):
            raise UntrustedError("manifest: expected the files of the verdict, got others")
        return sum(file.size for file in manifest.files)

    def _catalog_check(self, digest: Digest) -> None:
        """Step 2 for a catalog that is not this node's own: the base's statement has to name both.

        A base's catalog is replaced when transformers is, and a verdict goes on naming the one that
        its artifact was checked against. What is loaded is compared with this node's own in step 5.
        """
        own = self.base.catalog_digest
        if digest_equal(digest, own) or {digest, own} <= self._catalogs:
            return
        claims = base_verify(
            self._client.base_statement(self.base.digest),
            trusted=self._trust.verifiers,
            base_digest=self.base.digest,
            now=self._now(),
        )
        self._catalogs = claims.catalog_digests
        if not {digest, own} <= self._catalogs:
            raise UntrustedError("a verdict over a catalog that this node's base has not")

    def load(self, claims: VerdictClaims, most_rank: int) -> Admitted:
        """Steps 3 to 8. When it raises, ``detach`` lets go of what was attached.

        Raises:
            RevokedBytesError: its bytes are those of a revoked one. RegistryError: another reason.
        """
        key = Key(claims.tenant_id, claims.adapter_digest)
        read = adapter_read(self._files(key, claims), self.base)
        if read.rank > most_rank:
            raise RefusedError(f"adapter: expected a rank of at most {most_rank}, got {read.rank}")
        weights = dict(claims.files)[WEIGHT_PATH]
        self._store.revocable_write(key, weights, read.content_digest)
        if self._held.find(key.tenant_id, key.digest, weights, read.content_digest):
            raise RevokedBytesError("adapter: its weights or tensors are those of a revoked one")
        declared = (read.declaration.tenant, read.declaration.adapter)
        if declared != (claims.tenant, claims.adapter):
            raise UntrustedError("a declaration of another tenant or adapter than the verdict's")
        applied, size = self._attach(key, read.adapter)
        if applied != read.modules:
            raise RefusedError(f"adapter: expected {read.modules} modules, got {applied}")
        if not self._base_unchanged():
            raise RefusedError("adapter: the base's parameters changed while it was loaded")
        template = Digest(read.declaration.chat_template_digest)
        return Admitted(claims, template, read.chat_template, size)

    def detach(self, key: Key) -> None:
        """Let go of an adapter's weights, if the engine has any: asked again, it goes on.

        Raises:
            EngineError: it is in use; nothing changed.
        """
        if key in self._attached:
            self._engine.detach(key)
            self._attached.discard(key)

    def _attach(self, key: Key, adapter: Adapter) -> tuple[int, int]:
        self._attached.add(key)
        try:
            return self._engine.attach(key, adapter)
        except BaseException as error:
            # Whatever stopped it, the engine has nothing of what it did not attach.
            self._attached.discard(key)
            if isinstance(error, LoraError | EngineError):
                raise RefusedError(f"adapter: does not load: {error}") from error
            raise

    def _files(self, key: Key, claims: VerdictClaims) -> dict[str, Sealed]:
        folder = self._store.folder(key)
        if folder.exists():
            try:
                return files_read(folder, claims.files)
            except UntrustedError as error:
                _LOG.warning("%s: %s; pulled again", key.digest, error.message)
                self._store.files_remove(key)
        self._client.pull(claims.tenant, claims.adapter, claims.adapter_digest, folder)
        return files_read(folder, claims.files)
