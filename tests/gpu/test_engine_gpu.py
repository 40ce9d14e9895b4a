"""The engine on CUDA. Needs torch, transformers, peft, safetensors and pytest, nothing else."""

from __future__ import annotations

import pytest
import torch

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.selfcheck import NEIGHBOUR_BOUND
from gpu_worker.serving.sequence import Job
from tests.integration import engine_world as ew
from tests.integration.engine_checks import (
    neighbours_check,
    oracle_check,
    poison_check,
    prefix_check,
    unload_check,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", sorted(ew.CONFIGS))
def test_every_row_of_a_crowd_answers_as_peft_does(kind: str) -> None:
    oracle_check(kind, "cuda", 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "wide", "gemma2", "gpt2"])
def test_a_crowd_changes_logits_within_the_bound(kind: str, dtype: torch.dtype) -> None:
    assert neighbours_check(kind, dtype, "cuda") <= NEIGHBOUR_BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_warm_prefix_changes_logits_within_the_bound(dtype: torch.dtype) -> None:
    assert prefix_check(dtype, "cuda") <= NEIGHBOUR_BOUND[dtype]


def test_nan_reaches_nobody() -> None:
    assert poison_check("cuda") <= NEIGHBOUR_BOUND[torch.float32]


def test_an_adapter_that_went_left_nothing() -> None:
    unload_check("cuda", torch.cuda.memory_allocated)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_starts_and_answers(dtype: torch.dtype) -> None:
    engine = Engine(
        ew.base_build("llama", dtype, "cuda"), stop_tokens=frozenset(), workspace=ew.SMALL
    )
    engine.start()
    try:
        state = []
        job = Job(ew.prompt_of(70), 5, on_lane_state=state.append)
        tokens = list(engine.submit(job).tokens())
        again = engine.submit(Job((*job.prompt, *tokens, 1), 2, lane_state=state[0]))
        assert (len(list(again.tokens())), again.reused_tokens) == (2, 74)
    finally:
        engine.stop()
