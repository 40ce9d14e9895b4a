"""``make slot-receipt``: one session, saved and restored over a restart, and what was reused."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.slots import PROMPT, smollm2
from gpu_worker.serving.slot_events import SlotEventKind
from gpu_worker.serving.slot_sidecar import Refusal
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import A, B
from tests.integration.turn_world import Answer, TurnWorld

# What empties a lane because the adapter changed.
_ADAPTER_CHANGE = frozenset({Refusal.ADAPTER, Refusal.SCALE, Refusal.COMBINATION})


def main() -> int:
    """Print the receipt; 1 when it does not hold."""
    with tempfile.TemporaryDirectory(prefix="slot-receipt-") as folder:
        world = TurnWorld(Path(folder) / "slots", base=smollm2, lane_tokens=640)
        first, before, after = _session(world)
        cleared = _cleared(world)
        others = _others(world, (*PROMPT[:512], *first.tokens, 900))
    holds = after.same(before) and after.reused > before.reused == 0 == cleared
    refused = {name: answer.reused for name, answer in others.items()}
    for name, value in (
        ("commit", _commit()),
        ("time", datetime.now(UTC).isoformat(timespec="seconds")),
        ("device", f"cpu, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"),
        ("base", "SmolLM2-135M-Instruct, fp32"),
        ("prompt", "512 tokens, one adapter; the node restarts; then a second turn"),
        ("reused before", f"{before.reused} tokens, without the slot"),
        ("reused after", f"{after.reused} tokens, restored from the slot"),
        ("same answer", "yes" if after.same(before) else "NO"),
        ("adapter-change clearing", f"{cleared} in the session"),
        ("reused by others", ", ".join(f"{name}: {count}" for name, count in refused.items())),
    ):
        print(f"{name:24}{value}")
    return 0 if holds and not any(refused.values()) else 1


def _session(world: TurnWorld) -> tuple[Answer, Answer, Answer]:
    """The first turn, and the second one without and with the slot, after a restart."""
    with world.node() as node:
        first = node.turn(A, PROMPT[:512])
    prompt = (*PROMPT[:512], *first.tokens, 900)
    with world.node() as node:
        return first, node.run(A, prompt), node.turn(A, prompt)


def _others(world: TurnWorld, prompt: tuple[int, ...]) -> dict[str, Answer]:
    """The same session's prompt under another adapter and under none."""
    with world.node() as node:
        return {"other adapter": node.turn(B, prompt), "base": node.turn(BASE_MARKER, prompt)}


def _cleared(world: TurnWorld) -> int:
    refused = [event for event in world.events if event.kind is SlotEventKind.REFUSED]
    return sum(event.reason in _ADAPTER_CHANGE for event in refused)


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = " with uncommitted changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "HEAD") or "not in a repository") + changed


if __name__ == "__main__":
    sys.exit(main())
