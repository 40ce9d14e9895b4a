"""The memory of a node: what it may take, and what it takes, by its ledgers and in fact."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import torch
from torch import Tensor

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.ledger import Category, Ledger, LedgerFullError, Owner
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sequence import Holder
from registry_service.domain import limits
from registry_service.domain.errors import RefusedError

_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The ledger of the memory that adapters run in, and of that in which they are read.

    On the CPU both are one. In bytes: ``row`` is a row of the bank, and ``preparing`` what an
    adapter takes of the device for the moment in which it gets one.
    """

    device: Ledger
    host: Ledger
    row: int
    preparing: int


def ledgers_open(engine: Engine, base: Iterable[Tensor], *, device: str, budget: int) -> Ledgers:
    """The ledgers of a node whose base and engine are in memory; ``budget`` 0 is the device's.

    Raises:
        RefusedError: base, bank, lanes and blocks together are over the budget.
    """
    memory, workspace = engine.memory(), engine.workspace
    try:
        ledger = Ledger(budget or memory_budget(device), bank=memory.row * workspace.adapters)
        ledger.hold(Category.BASE, storages_bytes({"base": base})["base"])
        # Row 0 is the base's and never an adapter's.
        ledger.hold(Category.WORKSPACE, memory.row + context_bytes(device))
        ledger.pool(Category.KV, memory.lanes + workspace.prefix_bytes, lambda: _kv(engine))
    except LedgerFullError as error:
        raise RefusedError(
            f"memory: {error}; give the node more with --memory-mib, or fewer or smaller adapters"
        ) from error
    host = ledger if device == "cpu" else Ledger(memory_budget("cpu"))
    return Ledgers(ledger, host, memory.row, memory.preparing)


def _kv(engine: Engine) -> Mapping[Owner | None, int]:
    found = Counter[Owner | None]()
    for holder, size in engine.kv().items():
        found[None if holder is None else _owner(holder)] += size
    return found


def _owner(holder: Holder) -> Owner | None:
    """A node names an adapter by its key; a request on the base alone has its tenant only."""
    if isinstance(holder.adapter, Key):
        return holder.adapter
    return holder.tenant if isinstance(holder.tenant, UUID) else None


def storages_bytes(named: Mapping[str, Iterable[Tensor]]) -> dict[str, int]:
    """Bytes of the storages behind tensors, each counted once, under the first name that has it."""
    seen: set[int] = set()
    found = dict.fromkeys(named, 0)
    for name, tensors in named.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[name] += storage.nbytes()
    return found


def memory_budget(device: str) -> int:
    """Bytes that a node may take: a part of the device's memory, or of what its container has."""
    if device == "cpu":
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        bound = _CGROUP.read_text("ascii").strip() if _CGROUP.is_file() else "max"
        total = min(total, int(bound)) if bound.isdigit() else total
    else:
        _, total = torch.cuda.mem_get_info(device)
    part: int = total * limits.NODE_MEMORY_PERCENT // 100
    return part


def context_bytes(device: str) -> int:
    """What CUDA itself takes of a device: all that is taken there, less what torch holds."""
    if device == "cpu":
        return 0
    reserved: int = torch.cuda.memory_reserved(device)
    return max(0, device_bytes(device) - reserved)


def device_bytes(device: str) -> int:
    """Bytes that the driver counts as taken on a CUDA device.

    They are this process's only where it has the device alone, which a node is deployed with: the
    driver counts whatever anyone took, and torch's own figures (``memory_reserved``) leave out the
    context, cuBLAS and whatever else is taken beside its allocator. A figure for each process comes
    from NVML alone, which knows processes by ids that a container does not see.
    """
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total) - int(free)
