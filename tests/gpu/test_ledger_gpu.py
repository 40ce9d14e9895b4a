"""The ledger on CUDA against the driver. Needs torch, transformers, peft, safetensors, pytest."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
import torch

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.ledger import Category, error_of
from gpu_worker.serving.memory import device_bytes, ledgers_open
from gpu_worker.serving.residency import Key
from gpu_worker.serving.sequence import Job
from registry_service.domain.digests import digest_of
from tests.integration import engine_world as ew

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
KEY = Key(UUID(int=1), digest_of(b"adapter"))


def test_the_ledger_is_what_the_driver_counts_through_load_run_and_unload() -> None:
    model = ew.base_build("llama", device="cuda")
    parameters = list(model.state_dict(keep_vars=True).values())
    # Many adapters, so that bank and lanes are no rounding error beside what CUDA itself takes.
    workspace = replace(ew.SMALL, adapters=4096, lanes=128, step_tokens=512)
    engine = Engine(model, stop_tokens=frozenset(), workspace=workspace)
    engine.start()
    try:
        ledgers = ledgers_open(engine, parameters, device="cuda", budget=0)
        assert ledgers.device is not ledgers.host

        def error() -> float:
            return error_of(ledgers.device.taken(), device_bytes("cuda"))

        assert error() < 0.05
        row = ledgers.device.reserve(Category.ADAPTER, ledgers.row, KEY)
        _, size = engine.attach(KEY, ew.adapter_from(ew.peft_build(ew.base_build("llama"), 1)))
        row.commit(size)
        assert error() < 0.05
        list(engine.submit(Job(ew.prompt_of(70), 5, KEY, root_key=b"root")).tokens())
        assert engine.memory().blocks > 0
        assert error() < 0.05
        engine.detach(KEY)
        row.release()
        assert ledgers.device.by_owner() == {}
        assert error() < 0.05
    finally:
        engine.stop()
