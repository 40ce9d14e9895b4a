"""Time to the first token behind a shared prefix: 512 tokens that are known, against all cold."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.slots import smollm2
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.sequence import Job
from gpu_worker.serving.workspace import Workspace

SHARED, OWN, ROUNDS = 512, 16, 7
GOAL = 0.2


def prefix() -> list[dict[str, Any]]:
    """Medians of rounds in turns, in milliseconds, and their ratio."""
    return [_measured(dtype) for dtype in (torch.float32, torch.bfloat16)]


def _measured(dtype: torch.dtype) -> dict[str, Any]:
    workspace = Workspace(lanes=2, lane_tokens=640, adapters=1, rank=8)
    engine = Engine(smollm2(dtype), stop_tokens=frozenset(), workspace=workspace)
    engine.start()
    # Seconds by how many tokens were reused.
    found: dict[int, list[float]] = {0: [], SHARED: []}
    for turn in range(ROUNDS + 1):
        for half in range(2):
            # A turn has a prefix of its own: it is cold the first time, and known the second.
            tokens = tuple((7919 * n + turn) % 40_000 + 100 for n in range(SHARED))
            own = tuple(200 + n + half for n in range(OWN))
            begin = time.perf_counter()
            generation = engine.submit(Job(tokens + own, 1, root_key=b"prefix"))
            next(generation.tokens())
            if turn:
                found[generation.reused_tokens].append(time.perf_counter() - begin)
    engine.stop()
    cold, warm = (statistics.median(found[reused]) * 1000 for reused in (0, SHARED))
    return {
        "what": f"first token behind {SHARED} shared tokens, {str(dtype).removeprefix('torch.')}",
        "warm ms": round(warm, 1),
        "cold ms": round(cold, 1),
        "ratio": round(warm / cold, 2),
        "goal": GOAL,
    }


if __name__ == "__main__":
    for row in prefix():
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
