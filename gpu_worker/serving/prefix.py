"""Prefix KV in blocks, shared between requests of one identity.

A block's key is chained: SHA-256 over the key of the block before it and its own tokens. The first
one follows the request's root key, which states tenant, base, adapter and everything else that KV
depends on. The blocks themselves are opaque here.

Blocks come and go on the model's thread. How many bytes there are of whom may be asked anywhere.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpu_worker.serving.sequence import Holder
from gpu_worker.serving.workspace import BLOCK_TOKENS

_DOMAIN: Final = b"adapter-registry prefix block 1\0"


@dataclass(frozen=True, slots=True)
class Block:
    """KV of one block of tokens. ``size`` is in bytes."""

    kv: Any
    size: int
    tenant: Hashable
    adapter: Hashable | None

    @property
    def holder(self) -> Holder:
        """Whose it is."""
        return Holder(self.tenant, self.adapter)


def block_keys(root: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
    """The keys of the whole blocks of ``tokens``, in order."""
    key = hashlib.sha256(_DOMAIN + len(root).to_bytes(8, "big") + root).digest()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = tokens[start : start + BLOCK_TOKENS]
        key = hashlib.sha256(key + b"".join(t.to_bytes(8, "big") for t in block)).digest()
        yield key


class PrefixCache:
    """Blocks by key; the least recently used of a tenant go when its budget is spent."""

    def __init__(self, *, tenant_bytes: int, total_bytes: int) -> None:
        self._budgets = (tenant_bytes, total_bytes)
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        # Guards the bytes alone.
        self._lock = threading.Lock()
        self._bytes: dict[Holder, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def held(self) -> dict[Holder, int]:
        """Bytes of each holder's blocks, of those who have any. On any thread."""
        with self._lock:
            return dict(self._bytes)

    @property
    def size(self) -> int:
        """Bytes of all blocks. On any thread."""
        return sum(self.held().values())

    def tenant_size(self, tenant: Hashable) -> int:
        """Bytes of a tenant's blocks. On any thread."""
        return sum(size for holder, size in self.held().items() if holder.tenant == tenant)

    def find(self, keys: Sequence[bytes], adapter: Hashable | None) -> list[Block]:
        """The blocks of the longest known beginning of ``keys``."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or block.adapter != adapter:
                break
            found.append(block)
        self._touch(keys[: len(found)])
        return found

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def publish(self, key: bytes, block: Block, after: Sequence[bytes] = ()) -> bool:
        """Keep a block; False when it is known already or does not fit.

        ``after`` are the keys of those before it. They stay: without them it cannot be reached.
        """
        tenant_bytes, total_bytes = self._budgets
        kept = set(after)
        size = block.size + sum(self._blocks[k].size for k in kept if k in self._blocks)
        if key in self._blocks or size > min(tenant_bytes, total_bytes):
            return False
        others = [k for k in self._blocks if k not in kept]
        own = [k for k in others if self._blocks[k].tenant == block.tenant]
        self._evict(own, self.tenant_size(block.tenant) + block.size - tenant_bytes)
        self._evict((k for k in others if k in self._blocks), self.size + block.size - total_bytes)
        self._blocks[key] = block
        self._count(block.holder, block.size)
        return True

    def drop(self, keys: Iterable[bytes]) -> int:
        """Forget blocks; how many there were."""
        return sum(self._drop(key) for key in keys)

    def purge(self, adapter: Hashable) -> int:
        """Forget every block of an adapter; how many there were."""
        return self.drop([key for key, block in self._blocks.items() if block.adapter == adapter])

    def touched(self, keys: Sequence[bytes]) -> None:
        """Note that these blocks were used now."""
        self._touch([key for key in keys if key in self._blocks])

    def _touch(self, keys: Sequence[bytes]) -> None:
        # Last to first: a block outlives those after it, which cannot be reached without it.
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _evict(self, oldest_first: Iterable[bytes], excess: int) -> None:
        for key in oldest_first:
            if excess <= 0:
                return
            excess -= self._blocks[key].size
            self._drop(key)

    def _drop(self, key: bytes) -> bool:
        block = self._blocks.pop(key, None)
        if block is None:
            return False
        self._count(block.holder, -block.size)
        return True

    def _count(self, holder: Holder, change: int) -> None:
        with self._lock:
            size = self._bytes.pop(holder, 0) + change
            if size:
                self._bytes[holder] = size
