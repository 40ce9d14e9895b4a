"""Failures that others reported, one test each, named after the report.

Those about keys and files stand where keys and files are tested: vllm#42125 and vllm#44701 in
``tests/unit/test_serving_identity.py``, vllm#44250 and llama.cpp#26207 in ``test_slots.py``; wrong
adapters under load (lorax PR#62) in ``test_serving_soak.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gpu_worker.serving.adapter import Adapter, LoraError
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.sequence import EngineError, Job
from gpu_worker.serving.workspace import Workspace
from tests.integration import engine_world as ew

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

WORKSPACE = Workspace(lanes=2, lane_tokens=256, adapters=2, rank=4, step_tokens=128)
PROMPT = ew.prompt_of(90)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with ew.one_thread():
        engine = Engine(ew.base_build("llama"), stop_tokens=frozenset(), workspace=WORKSPACE)
        engine.start()
        yield engine
        engine.stop()


def adapter(seed: int) -> Adapter:
    return ew.adapter_from(ew.peft_build(ew.base_build("llama"), seed))


def answer(engine: Engine, name: str | None, key: bytes | None = None) -> list[int]:
    return list(engine.submit(Job(PROMPT, 6, name, root_key=key)).tokens())


def bank_bytes(engine: Engine) -> int:
    """Bytes of the bank that are not zero in rows of adapters."""
    stacks = engine._runner.bank.stacks.values()
    return sum(int(part[1:].count_nonzero()) for s in stacks for part in (s.a, s.b))


def test_vllm_54839_and_42207_an_unload_leaves_weights_and_memory(engine: Engine) -> None:
    answers = answer(engine, None)
    engine.attach("one", adapter(1))
    assert answer(engine, "one", b"one") != answers
    assert bank_bytes(engine) > 0
    assert engine.memory().blocks > 0
    assert engine.detach("one") > 0
    assert bank_bytes(engine) == 0
    assert engine.memory().blocks == 0
    with pytest.raises(EngineError, match="not attached"):
        answer(engine, "one")


def test_vllm_47724_a_running_request_is_served_another_users_adapter(engine: Engine) -> None:
    engine.attach("one", adapter(1))
    alone = list(engine.submit(Job(PROMPT, 60, "one")).tokens())
    running = engine.submit(Job(PROMPT, 60, "one"))
    outputs = running.tokens()
    said = [next(outputs)]
    # While it runs its row can neither be taken away nor be given to another.
    with pytest.raises(EngineError, match="still in use"):
        engine.detach("one")
    engine.attach("two", adapter(2))
    assert said + list(outputs) == alone


def test_vllm_55193_the_base_is_served_when_nothing_was_applied(engine: Engine) -> None:
    parts = {f"no.such.{name}": part for name, part in adapter(1).parts.items()}
    with pytest.raises(LoraError):
        engine.attach("one", Adapter(parts))
    with pytest.raises(EngineError, match="not attached"):
        answer(engine, "one")
    whole = adapter(1)
    applied, _ = engine.attach("one", whole)
    assert applied == len(whole.parts)


def test_sglang_13771_the_same_adapter_is_loaded_twice(engine: Engine) -> None:
    engine.attach("one", adapter(1))
    with pytest.raises(EngineError, match="attached already"):
        engine.attach("one", adapter(1))
    engine.attach("two", adapter(2))
    engine.detach("one")
    assert answer(engine, "two")


def test_tensorrt_llm_18407_a_suspended_request_pins_its_adapter(engine: Engine) -> None:
    engine.attach("one", adapter(1))
    running = [engine.submit(Job(PROMPT, 100)) for _ in range(WORKSPACE.lanes)]
    waiting = engine.submit(Job(PROMPT, 100, "one"))
    waiting.cancel()
    list(waiting.tokens())
    assert waiting.produced == 0
    assert engine.detach("one") > 0
    for generation in running:
        generation.cancel()
        list(generation.tokens())


def test_peft_3475_hooks_leak_after_an_exception(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.attach("one", adapter(1))
    engine.attach("two", adapter(2))
    before = [answer(engine, name) for name in (None, "one", "two")]

    def fail(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("injected")

    model = engine._runner.model
    layer = next(m for m in model.modules() if type(m).__name__ == "LlamaDecoderLayer")
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", fail)
        with pytest.raises(EngineError):
            answer(engine, "one")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [answer(engine, name) for name in (None, "one", "two")] == before
