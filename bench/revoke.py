"""From a revocation to the moment when no node takes a new request for it: 8 nodes, one machine.

The service runs as processes, its background too. The nodes are threads of this process, each with
a follower, residents, store and connection of its own, and with no model: what is measured is how
fast the word gets round, and not how fast a model lets go.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.stand import process_start
from tests.integration import revocation_world as rw
from tests.integration.conftest import World
from tests.waiting import until

NODES, ROUNDS, GOAL_SECONDS = 8, 100, 1.0
_POLL_SECONDS = 0.005


def revoke(world: World, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Seconds from sending the revocation to the last node's first refusal: p50, p99, most."""
    trust = Path(environment["REGISTRY_KEY_DIR"]) / "trust.json"
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wide = {"max_replicas": NODES}
        digests = [world.admit(root / f"a{n}", fill=n + 1, declare=wide) for n in range(ROUNDS)]
        command = [sys.executable, "-m", "registry_service", "background"]
        process_start(command, environment, stack)
        nodes = rw.nodes_make(world, root, [f"bench-{n}" for n in range(NODES)], trust)
        for node in nodes:
            stack.callback(node.end)
            node.follow()
        seconds = sorted(_round(world, nodes, digest) for digest in digests)
        assert all(node.follower.stale_reason is None for node in nodes)
    p99 = seconds[-(-99 * ROUNDS // 100) - 1]
    return [
        {
            "what": f"revoke to refused by {NODES} nodes (threads), {ROUNDS} rounds",
            "p50 s": round(seconds[ROUNDS // 2], 3),
            "p99 s": round(p99, 3),
            "most s": round(seconds[-1], 3),
            "goal p99 s": GOAL_SECONDS,
            "met": p99 <= GOAL_SECONDS,
        }
    ]


def _round(world: World, nodes: list[rw.ServingNode], digest: str) -> float:
    for node in nodes:
        node.lease(digest).release()
    # What the round before left to do is not measured here.
    until(lambda: not any(node.residents.letting_go for node in nodes))
    refused = [0.0] * len(nodes)
    watchers = [
        threading.Thread(target=_watch, args=(node, digest, refused, n))
        for n, node in enumerate(nodes)
    ]
    for watcher in watchers:
        watcher.start()
    with world.client("operator") as operator:
        start = time.perf_counter()
        operator.revoke(rw.TENANT, digest, "bench")
        for watcher in watchers:
            watcher.join()
    return max(refused) - start


def _watch(node: rw.ServingNode, digest: str, refused: list[float], index: int) -> None:
    while node.accepts(digest):
        time.sleep(_POLL_SECONDS)
    refused[index] = time.perf_counter()
