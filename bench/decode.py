"""Decode of 32 rows over 32 adapters, against the base alone and against PEFT's mixed batch.

``python -m bench.decode [BASE]`` measures in a process of its own and prints a line of JSON for
each comparison. What is compared is measured in turns, so that a busy machine is busy for both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROWS, RANK, PROMPT, ROUNDS = 32, 8, 24, 21
TARGETS = {
    "q,v": ("q_proj", "v_proj"),
    "all-linear": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
}

# A speed as a share of the base's alone.
GOALS = {
    ("fp32", "q,v"): 0.9,
    ("fp32", "all-linear"): 0.7,
    ("bf16", "q,v"): 0.8,
    ("bf16", "all-linear"): 0.5,
}


def decode() -> list[dict[str, Any]]:
    """Ratios to the base alone (more is better), and to PEFT's mixed batch."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        # Torch takes the threads and the memory of its process: each step has one of its own.
        _run("gpu_worker.demo_training", "base", str(base))
        return [json.loads(line) for line in _run("bench.decode", str(base)).splitlines()]


def _run(module: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def measure(base: Path) -> Iterator[dict[str, Any]]:
    """Two lines for each dtype and set of targets: to the base alone, and to PEFT."""
    import torch

    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        ours = Ours(base, dtype)
        for what, targets in TARGETS.items():
            with ours.adapters(targets):
                goal = GOALS[name, what]
                times = in_turns(ours.plain, ours.mixed)
                yield _line(f"decode {name} {what}, to the base alone", times, goal)
                theirs = Peft(base, dtype, targets)
                times = in_turns(theirs.mixed, ours.mixed)
                yield _line(f"decode {name} {what}, to PEFT's mixed batch", times, 1.6)
                del theirs


def _line(what: str, times: list[list[float]], goal: float) -> dict[str, Any]:
    """Two ratios of speeds: of the best rounds, as on a quiet machine, and of the medians."""
    other, ours = times
    return {
        "what": what,
        "best": round(min(other) / min(ours), 2),
        "median": round(median(other) / median(ours), 2),
        "goal": goal,
        "other ms": round(min(other) * 1000, 1),
        "ours ms": round(min(ours) * 1000, 1),
    }


def in_turns(*functions: Callable[[], None]) -> list[list[float]]:
    """The seconds of each function's rounds, called in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(ROUNDS + 2):
        for function, found in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if turn >= 2:
                found.append(time.perf_counter() - start)
    return times


class Ours:
    """The engine's forward, with 32 rows in decode."""

    def __init__(self, base: Path, dtype: Any) -> None:
        from gpu_worker.serving.runner import Runner
        from gpu_worker.serving.sampler import Sampler
        from gpu_worker.serving.scheduler import Scheduler
        from gpu_worker.serving.sequence import Generation, Job, Sampling, Sequence
        from gpu_worker.serving.workspace import Workspace

        workspace = Workspace(
            lanes=ROWS,
            lane_tokens=128,
            adapters=ROWS,
            rank=RANK,
            targets=frozenset(TARGETS["all-linear"]),
        )
        self.runner = Runner(_model(base, dtype), workspace)
        prompts = [tuple(range(n, n + PROMPT)) for n in range(ROWS)]
        self.sequences = [
            Sequence(Job(p, 8), Generation(), Sampler(Sampling()), lane=self.runner.lanes.take())
            for p in prompts
        ]
        scheduler = Scheduler(ROWS * PROMPT)
        scheduler.running += self.sequences
        step = scheduler.plan()
        assert step is not None
        self.runner.forward(step)
        for sequence in self.sequences:
            sequence.cached = PROMPT
            sequence.produced.append(1)
        self.plan = scheduler.plan

    @contextmanager
    def adapters(self, targets: tuple[str, ...]) -> Iterator[None]:
        """32 adapters on these modules, in rows 1 to 32."""
        import torch

        from gpu_worker.serving.adapter import Adapter, Part

        bank = self.runner.bank
        rows = []
        for _ in range(ROWS):
            parts = {
                name: Part(
                    torch.randn(RANK, stack.a.shape[1]) * 0.02,
                    torch.randn(stack.b.shape[2], RANK) * 0.02,
                    2.0,
                )
                for name, stack in bank.stacks.items()
                if name.rpartition(".")[2] in targets
            }
            rows.append(bank.attach(bank.prepare(Adapter(parts))))
        yield
        for row in rows:
            bank.detach(row)

    def plain(self) -> None:
        """One token for each row, of the base alone."""
        self._step([0] * ROWS)

    def mixed(self) -> None:
        """One token for each row, each of its own adapter."""
        # Lane and bank row of a request have nothing to do with each other.
        self._step([1 + number * 7 % ROWS for number in range(ROWS)])

    def _step(self, rows: list[int]) -> None:
        for sequence, row in zip(self.sequences, rows, strict=True):
            sequence.bank_row = row
        step = self.plan()
        assert step is not None
        self.runner.forward(step)


class Peft:
    """PEFT's mixed batch with the same adapters, rows and cache."""

    def __init__(self, base: Path, dtype: Any, targets: tuple[str, ...]) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import DynamicCache

        config = LoraConfig(
            r=RANK,
            lora_alpha=16,
            target_modules=list(targets),
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        )
        self.model = get_peft_model(_model(base, dtype), config, "a0").eval()
        for number in range(1, ROWS):
            self.model.add_adapter(f"a{number}", config)
        self.names = [f"a{number * 7 % ROWS}" for number in range(ROWS)]
        self.cache = DynamicCache(config=self.model.config)
        prompts = torch.arange(PROMPT) + torch.arange(ROWS)[:, None]
        with torch.inference_mode():
            self.model(input_ids=prompts, cache=self.cache, adapter_names=self.names)
        self.token = torch.ones(ROWS, 1, dtype=torch.long)

    def mixed(self) -> None:
        """One token for each row, each of its own adapter."""
        import torch

        with torch.inference_mode():
            self.model(input_ids=self.token, cache=self.cache, adapter_names=self.names)
        self.cache.crop(-1)


def _model(base: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()


def main() -> None:
    """Measure, and print JSON."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.disable_progress_bar()
    for row in decode() if len(sys.argv) == 1 else measure(Path(sys.argv[1])):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
