"""Which keys a layer sees: what only a model's mask function knows is refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.inspection import inspect_base
from gpu_worker.serving.sequence import EngineError, Job, Sampling
from gpu_worker.serving.workspace import Workspace
from tests.integration import engine_world as ew

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

LANE = 256
WITHIN = 1e-4


def llama4(chunk: int) -> PreTrainedModel:
    options: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": []}
    options |= {"attention_chunk_size": chunk, "intermediate_size_mlp": 96, "head_dim": 16}
    common = {**ew.CONFIGS["llama"], "model_type": "llama4_text"}
    config = AutoConfig.for_model(**common, **options)
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def engine_start(model: PreTrainedModel) -> Engine:
    workspace = Workspace(lanes=2, lane_tokens=LANE, adapters=1, rank=2, step_tokens=256)
    engine = Engine(model, stop_tokens=frozenset(), workspace=workspace)
    engine.start()
    return engine


def test_chunks_shorter_than_a_lane_are_refused() -> None:
    with pytest.raises(EngineError, match=f"chunks of 64 tokens.* at most that, got {LANE}"):
        engine_start(llama4(64))


def test_chunks_as_long_as_a_lane_change_nothing_there() -> None:
    model, prompt = llama4(LANE), ew.prompt_of(200)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
    expected = torch.log_softmax(logits.float(), -1)
    engine = engine_start(model)
    output = next(engine.submit(Job(prompt, 1, sampling=Sampling(logprobs=5))).outputs())
    engine.stop()
    assert output.top
    assert all(abs(float(expected[token]) - said) < WITHIN for token, said in output.top)


def test_a_kind_of_attention_that_is_not_known_is_refused() -> None:
    model = ew.base_build("llama")
    model.config.layer_types = ["full_attention", "compressed_attention"]
    with pytest.raises(EngineError, match="kind compressed_attention is not implemented"):
        inspect_base(model, LANE)


def test_a_sliding_layer_that_names_no_window_is_refused() -> None:
    model = ew.base_build("llama")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(EngineError, match="layer 1: expected the window of sliding_attention"):
        inspect_base(model, LANE)
