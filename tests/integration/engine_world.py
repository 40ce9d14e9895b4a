"""Tiny bases, adapters made by PEFT, and an engine that is driven step by step.

Needs torch, transformers and peft, nothing else; runs on any device.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu_worker.serving.adapter import Adapter, Part, adapter_of
from gpu_worker.serving.engine import Engine, _Call
from gpu_worker.serving.prefix import PrefixCache
from gpu_worker.serving.requests import Requests
from gpu_worker.serving.runner import Runner
from gpu_worker.serving.sequence import Generation, Job, Sequence
from gpu_worker.serving.step import Step
from gpu_worker.serving.workspace import Workspace

VOCABULARY = 96
WINDOW = 24
PREFIX = "base_model.model."
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_COMMON},
    # Sizes at which MKL changes its kernels between 16 and 512 rows.
    "wide": {
        "model_type": "llama",
        **_COMMON,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen2": {"model_type": "qwen2", **_COMMON},
    "qwen3": {"model_type": "qwen3", **_COMMON, "head_dim": 16},
    "mistral": {"model_type": "mistral", **_COMMON, "sliding_window": WINDOW, "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        **_COMMON,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "model_type": "gemma3_text",
        **_COMMON,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"model_type": "phi3", **_COMMON},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "gpt_neox": {"model_type": "gpt_neox", **_COMMON, "num_key_value_heads": 4},
}
SMALL = Workspace(lanes=8, lane_tokens=256, adapters=6, rank=16, step_tokens=256)


@contextmanager
def held_up(engine: Engine) -> Iterator[None]:
    """The model's thread stands meanwhile: whatever is asked comes before its next step."""
    stands, go = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go.wait()

    engine._inbox.put(_Call(stand))
    assert stands.wait(60)
    try:
        yield
    finally:
        go.set()


@contextmanager
def lasting(engine: Engine) -> Iterator[None]:
    """Who asks for 100 tokens or more gets one, and others only when a shorter request needs steps.

    So it runs for as long as a test needs it to, on any machine.
    """
    scheduler = engine._requests._scheduler
    plan = scheduler.plan

    def needed() -> Step | None:
        if all(s.job.max_tokens >= 100 and s.generation.produced for s in scheduler.running):
            time.sleep(0.001)
            return None
        return plan()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "plan", needed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny products wait for a second thread longer than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def base_build(
    kind: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any
) -> PreTrainedModel:
    """A random base of one kind, the same at every call."""
    raw = {**CONFIGS[kind], **changes}
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.to(device, dtype).eval().requires_grad_(requires_grad=False)


def peft_build(model: PreTrainedModel, seed: int, **options: Any) -> Any:
    """A copy of a base with a random adapter on it."""
    wanted = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    peft = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **wanted))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" not in name:
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            if "magnitude" in name:
                parameter.mul_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.2 * noise)
    return peft.eval()


def adapter_from(peft: Any) -> Adapter:
    """What PEFT would save, as the engine takes it."""
    tensors = get_peft_model_state_dict(peft, save_embedding_layers=False)
    scaling = {
        name.removeprefix(PREFIX): module.scaling["default"]
        for name, module in peft.named_modules()
        if isinstance(module, LoraLayer)
    }
    return adapter_of({name: t.detach().clone() for name, t in tensors.items()}, scaling)


def poisoned(adapter: Adapter) -> Adapter:
    """The adapter with NaN in it."""
    parts = adapter.parts.items()
    return Adapter({n: Part(p.a * float("nan"), p.b, p.scaling) for n, p in parts})


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A prompt of this length."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


class Driven:
    """The engine's parts on this thread: requests are added, and steps are made one by one."""

    def __init__(
        self,
        model: PreTrainedModel,
        workspace: Workspace = SMALL,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.runner = Runner(model, workspace)
        self.prefix = PrefixCache(
            tenant_bytes=workspace.tenant_bytes, total_bytes=workspace.prefix_bytes
        )
        self.rows: dict[Hashable | None, int] = {None: 0}
        self.requests = Requests(
            self.runner, self.prefix, workspace, stop_tokens, self.rows.__getitem__, lambda _: None
        )
        self.logits: dict[Generation, list[Tensor]] = {}
        self._advance: Callable[..., None] = self.requests._advance
        self.requests._advance = self._note  # type: ignore[method-assign]  # a probe

    def attach(self, name: Hashable, adapter: Adapter) -> int:
        self.rows[name] = self.runner.bank.attach(self.runner.bank.prepare(adapter))
        return self.rows[name]

    def add(self, job: Job) -> Generation:
        generation = Generation()
        self.logits[generation] = []
        self.requests.add(job, generation)
        return generation

    def finish(self, *, steps: int = 10_000) -> None:
        for _ in range(steps):
            if self.requests.idle:
                return
            self.requests.step()
        raise AssertionError("the requests do not come to an end")

    def answer(self, job: Job) -> tuple[list[int], list[Tensor]]:
        """A job's tokens and logits, with nobody beside it."""
        generation = self.add(job)
        self.finish()
        return list(generation.tokens()), self.logits[generation]

    def idle_check(self) -> None:
        """Nothing is held: every lane free and zero, no reference to a row, no current batch."""
        lanes = self.runner.lanes
        assert self.requests.idle
        assert lanes.free == lanes.keys[0].shape[0]
        assert all(not bool(slab.any()) for slab in (*lanes.keys, *lanes.values))
        assert self.runner.bank.references == 0

    def _note(self, sequence: Sequence, logits: Tensor, *, finite: bool) -> None:
        self.logits[sequence.generation].append(logits.clone())
        self._advance(sequence, logits, finite=finite)


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """True when all logits are equal to the bit."""
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def share(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference as a share of the largest logit, as the engine's own bound has it."""
    return difference(ours, theirs) / max(float(t.float().abs().max()) for t in theirs)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference of a logit."""
    assert len(ours) == len(theirs)
    pairs = zip(ours, theirs, strict=True)
    return max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
