"""Restoring 1,024 tokens of a session from disk, against prefilling them; one run, SmolLM2."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from bench.load import cache_drop
from tests.identities import A
from tests.integration.turn_world import TurnNode, TurnWorld, context_make

TOKENS, ROUNDS = 1_024, 5
BASE = Path("var/bench/smollm2-135m-instruct-bf16")
PROMPT = tuple((7919 * n) % 40_000 + 100 for n in range(TOKENS + 1))


def smollm2(dtype: torch.dtype) -> PreTrainedModel:
    """The demo's base, made once."""
    if not (BASE / "model.safetensors").exists():
        command = [sys.executable, "-m", "gpu_worker.demo_training", "base", str(BASE)]
        subprocess.run([*command, "--dtype", "bf16"], check=True)
    disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        BASE, dtype=dtype, local_files_only=True
    )
    return model.eval().requires_grad_(requires_grad=False)


def slots() -> list[dict[str, Any]]:
    """Medians of rounds in turns, in milliseconds, and their ratio; the goal is 0.1."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        with tempfile.TemporaryDirectory(dir=".", prefix=".bench-slots-") as folder:
            world = TurnWorld(Path(folder) / "slots", base=smollm2, lane_tokens=1_152)
            with world.node(dtype=dtype) as node:
                rows.append(_measured(node, world.folder, str(dtype).removeprefix("torch.")))
    return rows


def _measured(node: TurnNode, folder: Path, dtype: str) -> dict[str, Any]:
    node.turn(A, PROMPT)
    prefill, restore, one = [], [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        assert node.run(A, PROMPT[:TOKENS], new=1).reused == 0
        prefill.append(time.perf_counter() - begin)
        cache_drop(path for path in folder.iterdir() if path.is_file())
        begin = time.perf_counter()
        state = node.turns.begin(context_make(A)).lane_state
        assert node.run(A, PROMPT, new=1, lane_state=state).reused == TOKENS
        restore.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        node.run(A, PROMPT[:1], new=1)
        one.append(time.perf_counter() - begin)
    cold, warm, token = (statistics.median(times) for times in (prefill, restore, one))
    (entry,) = node.slots.entries()
    return {
        "what": f"slot restore of {TOKENS} tokens, {dtype}",
        "prefill ms": round(cold * 1000, 1),
        "restore and first token ms": round(warm * 1000, 1),
        "one token ms": round(token * 1000, 1),
        "page MB": round(entry.size / 1e6, 1),
        "ratio": round((warm - token) / cold, 3),
        "ratio with the first token": round(warm / cold, 3),
    }


if __name__ == "__main__":
    for row in slots():
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
