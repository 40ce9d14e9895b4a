"""``GET /v1/residency``: what an operator sees of each adapter on a node, by its digest."""

from __future__ import annotations

from typing import Any

from gpu_worker.serving.adapter_statistics import AdapterNumbers, AdapterStatistics
from gpu_worker.serving.ledger import Category, Ledger
from gpu_worker.serving.residency import Key, Resident
from gpu_worker.serving.residents import Residents


def residency_report(
    residents: Residents, statistics: AdapterStatistics, ledger: Ledger
) -> list[dict[str, Any]]:
    """One entry for each adapter that is here or was; one that is gone has no state.

    ``swapIns`` are the loads after it had been unloaded, ``loads`` all since the node's start.
    ``residentBytes`` are its weights'; ``kvBytes`` those of the lanes that its requests run in and
    of the prefix blocks that are kept for it.
    """
    held = ledger.by_owner()
    here = {item.key: item for item in residents.residents()}
    keys = dict.fromkeys((*here, *statistics.keys()))
    return [
        {
            **_entry(key, here.get(key), statistics.of(key)),
            "kvBytes": held.get(key, {}).get(Category.KV, 0),
            "unloads": {str(reason): count for reason, count in residents.unloads_of(key).items()},
        }
        for key in keys
    ]


def _entry(key: Key, item: Resident | None, numbers: AdapterNumbers) -> dict[str, Any]:
    pace = numbers.token_seconds / numbers.tokens if numbers.tokens else None
    return {
        "adapterDigest": key.digest,
        "tenantId": str(key.tenant_id),
        "state": None if item is None else str(item.state),
        "references": 0 if item is None else item.references,
        "residentBytes": 0 if item is None else item.size,
        "hits": numbers.hits,
        "loads": numbers.loads,
        "swapIns": max(0, numbers.loads - 1),
        "loadFailures": numbers.load_failures,
        "loadSeconds": round(numbers.load_seconds, 4) if numbers.loads else None,
        "secondsPerToken": None if pace is None else round(pace, 6),
    }
