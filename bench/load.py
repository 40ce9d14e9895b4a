"""Loading: an adapter of 50 MB, verified, against PEFT's load_adapter; and 1 GB, verified.

``python -m bench.load BASE`` measures in a process of its own and prints JSON. Both sides read the
same files, which are dropped from the page cache before each turn, and are measured in turns.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from registry_service.domain.limits import MIB
from tests.integration.conftest import safetensors_bytes

# 1.22 MB for each rank on every linear module of SmolLM2, in fp32.
RANK, ROUNDS, LARGE, LARGE_ROUNDS = 41, 7, 1024 * MIB, 12


def load() -> list[dict[str, Any]]:
    """Seconds and ratio of the cold load, and p95 of the large one."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        # Torch takes the threads and the memory of its process: each step has one of its own.
        _run("gpu_worker.demo_training", "base", str(base))
        rows: list[dict[str, Any]] = json.loads(_run("bench.load", str(base)))
    return rows


def _run(module: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def measure(base: Path, root: Path) -> Iterator[dict[str, Any]]:
    """One line for each of the two."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.integration import serving_world as sw

    folder = root / "adapter"
    sw.peft_make(base, folder, 1, target_modules="all-linear", r=RANK)
    peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype="float32"), folder, adapter_name="first"
    )
    ours = Ours(base, root, folder)
    theirs = [folder / name for name in ("adapter_model.safetensors", "adapter_config.json")]

    def peft_load(turn: int) -> None:
        peft.load_adapter(folder, adapter_name=f"a{turn}")

    def peft_unload(turn: int) -> None:
        peft.delete_adapter(f"a{turn}")

    times: dict[str, list[float]] = {"ours": [], "PEFT": []}
    for turn in range(ROUNDS + 1):
        for name, files, run, undo in (
            ("ours", ours.files(), ours.load, ours.unload),
            ("PEFT", theirs, peft_load, peft_unload),
        ):
            seconds = timed(files, partial(run, turn))
            undo(turn)
            if turn:
                times[name].append(seconds)
    yield {
        "what": f"cold load of {sum(f.stat().st_size for f in theirs) // 10**6} MB, verified",
        "ratio to PEFT, unverified": round(median(times["ours"]) / median(times["PEFT"]), 2),
        "ms": round(median(times["ours"]) * 1000),
        "PEFT ms": round(median(times["PEFT"]) * 1000),
    }
    ours.stop()
    yield large(root)


class Ours:
    """A node whose store holds the adapter's files; its registry answers from memory."""

    def __init__(self, base: Path, root: Path, folder: Path) -> None:
        from gpu_worker.serving.loader import QueueLimits
        from gpu_worker.serving.options import LoadLimits
        from tests.integration import serving_world as sw
        from tests.integration.load_world import world_start

        proven = sw.prove(base)
        registry = sw.FakeRegistry(root / "registry", proven)
        self.digest = registry.publish(sw.adapter_files(proven, folder))
        statement = registry.verdict(sw.TENANT, self.digest)
        registry.verdict = lambda *_: statement  # type: ignore[method-assign]  # signed once
        limits = LoadLimits(adapters=2, rank=RANK, queue=QueueLimits(per_minute=6000))
        self.world = world_start(registry, root, proven, limits)

    def load(self, _: int) -> None:
        """From a request to an adapter that serves, with every step of admission."""
        self.world.use(self.digest)

    def unload(self, _: int) -> None:
        """Its files stay in the store."""
        self.world.unload(self.digest)

    def files(self) -> list[Path]:
        """What the next load reads; none before the first, which fetches them."""
        folder = self.world.node.store.folder(self.world.key(self.digest))
        return list(folder.iterdir()) if folder.exists() else []

    def stop(self) -> None:
        """End its threads."""
        self.world.node.stop()


def large(root: Path) -> dict[str, Any]:
    """Read, verify (digest and content digest) and copy 1 GB."""
    import torch

    from gpu_worker.serving.sealed import sealed_read
    from registry_service.domain.safetensors_header import HEADER_PREFIX_BYTES, header_parse
    from registry_service.domain.tensor_content import content_digest

    path = root / "large"
    names = {f"layers.{number}.lora_A.weight": (4096, 4096) for number in range(LARGE // 2**26)}
    path.write_bytes(safetensors_bytes(names, fill=7))
    known = sealed_read(path).digest()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    times = []

    def run() -> None:
        sealed = sealed_read(path)
        header, _ = header_parse(bytes(sealed.view[:HEADER_PREFIX_BYTES]), len(sealed))
        if header is None or sealed.digest() != known:
            raise RuntimeError("expected the bytes that were written")
        content_digest(header, sealed.view)
        for info in header.tensors:
            sealed.tensor(info, header.data_start).clone().to(device)

    for _ in range(LARGE_ROUNDS):
        times.append(timed([path], run))
    times.sort()
    return {
        "what": f"read, verify and copy {path.stat().st_size // 10**6} MB to {device}",
        "p95 s": round(times[math.ceil(0.95 * len(times)) - 1], 2),
        "median s": round(median(times), 2),
    }


def timed(files: list[Path], run: Callable[[], None]) -> float:
    """Seconds of one call that reads these files from the disk."""
    cache_drop(files)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cache_drop(files: Iterable[Path]) -> None:
    """Let the next read of these files come from the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(list(measure(Path(sys.argv[1]), Path(scratch)))))
