"""The leases under which a node holds adapters: taken before a load, and given back afterwards.

Giving back is done beside whoever lets go, since an answer that hangs must hold up no load. A lease
that is not given back ends by itself: nobody renews it.
"""

from __future__ import annotations

import logging
import threading
from typing import Final, Protocol

from gpu_worker.serving.keyed_executor import KeyedExecutor
from gpu_worker.serving.loader import plainly
from gpu_worker.serving.residency import Key
from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import (
    ConflictError,
    PoolFullError,
    PoolTenantFullError,
    UnavailableError,
)

_LOG = logging.getLogger(__name__)
_RETURN_SECONDS: Final = 5.0


class NoPlaceError(UnavailableError):
    """The pool is full, in all or (``of_tenant``) of one tenant: first another one has to go."""

    def __init__(self, message: str, *, of_tenant: bool) -> None:
        super().__init__(message, retry_after=limits.NODE_LEASE_SECONDS)
        self.of_tenant = of_tenant


class Registry(Protocol):
    """Issues the leases."""

    def placement_take(self, node: str, tenant: str, digest: str) -> dict[str, object]:
        """Raises ConflictError when as many nodes hold it as it declares, or the pool is full."""
        ...

    def placement_release(self, node: str, tenant: str, digest: str) -> None:
        """The node does not hold it any more."""
        ...


class Placements:
    """One node's leases. Thread-safe."""

    def __init__(self, registry: Registry, node: str) -> None:
        self._registry = registry
        self._node = node
        self._changed = threading.Condition()
        # The tenant's name by key.
        self._held: dict[Key, str] = {}
        self._returns = KeyedExecutor("placements", 1, self._changed)
        self._closed = False

    def take(self, tenant: str, key: Key) -> None:
        """Hold a key from now on.

        Raises:
            NoPlaceError: another one has to be given back first.
            UnavailableError: as many nodes hold it as may, no answer, or the node is stopping.
            RegistryError: it may not be held here.
        """
        # The lease that is still given back from before is this one, and would be taken away.
        if not self._returns.withdraw(key, _RETURN_SECONDS):
            raise UnavailableError("the adapter's place is still being given back", retry_after=1)
        self._open_check()
        try:
            with plainly(key):
                self._registry.placement_take(self._node, tenant, key.digest)
        except ConflictError as error:
            raise _refusal(error) from error
        with self._changed:
            self._held[key] = tenant
            if self._closed:
                self.release(key)
        self._open_check()

    def release(self, key: Key) -> None:
        """Give a lease back, beside the caller; without one nothing happens."""
        with self._changed:
            tenant = self._held.pop(key, None)
            if tenant is None:
                return
            try:
                self._returns.submit(key, lambda _: self._give_back(tenant, key.digest))
            except Exception as error:  # noqa: BLE001 - the lease ends by itself
                _LOG.warning("%s: placement not released: %r", key.digest, error)

    def returned_wait(self) -> bool:
        """Wait until the service was told of what was given back; False when it takes too long."""
        return self._returns.idle_wait(_RETURN_SECONDS)

    def close(self, seconds: float) -> None:
        """Give everything back and take nothing more; no answer is waited for longer than this."""
        with self._changed:
            self._closed = True
            for key in tuple(self._held):
                self.release(key)
        if not self._returns.idle_wait(seconds):
            _LOG.warning("placements not released within %.0f s: they end by themselves", seconds)

    def _open_check(self) -> None:
        if self._closed:
            raise UnavailableError("the node is stopping")

    def _give_back(self, tenant: str, digest: Digest) -> None:
        try:
            self._registry.placement_release(self._node, tenant, digest)
        except Exception as error:  # noqa: BLE001 - the lease ends by itself
            _LOG.warning("%s: placement not released: %r", digest, error)


def _refusal(error: ConflictError) -> UnavailableError:
    message = f"no place in the pool: {error.message}"
    if isinstance(error, PoolFullError):
        return NoPlaceError(message, of_tenant=isinstance(error, PoolTenantFullError))
    return UnavailableError(message, retry_after=limits.NODE_LEASE_SECONDS)
