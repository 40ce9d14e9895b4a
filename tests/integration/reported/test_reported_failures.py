"""Failures that others reported, one test each, named after the report.

Those about keys and pages stand where these are tested: vllm#44701 (and the key of vllm#42125) in
``tests/unit/test_serving_identity.py``, vllm#44250 and llama.cpp#26207 in ``test_slots.py``, the
sequences measured on llama.cpp in ``test_slot_turns.py`` and on vLLM in ``test_vllm_sequences.py``;
wrong adapters under load (lorax PR#62) in ``test_serving_http_soak.py``.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.serving.adapter import Adapter, LoraError
from gpu_worker.serving.adapter_load import adapter_read
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.gate import DeniedError
from gpu_worker.serving.openai_bodies import BodyError
from gpu_worker.serving.sequence import CANCELLED, LENGTH, EngineError, Job
from gpu_worker.serving.workspace import Workspace
from tests.integration import engine_world as ew
from tests.integration import soak_world as soak
from tests.integration.scene_world import Scene, files_swap, right, says, start
from tests.waiting import until

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
    """Numbers of the bank that change a result, in rows of adapters."""
    stacks = engine._runner.bank.stacks.values()
    return sum(int(part[1:].count_nonzero()) for s in stacks for part in (s.a, s.b, s.m - 1))


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
    joins, go = threading.Event(), threading.Event()

    def admit() -> None:
        joins.set()
        go.wait()

    running = engine.submit(Job(PROMPT, 60, "one", admit=admit))
    assert joins.wait(60)
    with ThreadPoolExecutor(2) as callers:
        # While it runs its row can neither be taken away nor be given to another.
        leaving = callers.submit(engine.detach, "one")
        until(lambda: engine._inbox.qsize() == 1)
        coming = callers.submit(engine.attach, "two", adapter(2))
        until(lambda: engine._inbox.qsize() == 2)
        # Both are done after its first step.
        go.set()
    with pytest.raises(EngineError, match="still in use"):
        leaving.result()
    coming.result()
    assert list(running.tokens()) == alone


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
    with ew.lasting(engine):
        running = [engine.submit(Job(PROMPT, 100)) for _ in range(WORKSPACE.lanes)]
        waiting = engine.submit(Job(PROMPT, 100, "one"))
        waiting.cancel()
        list(waiting.tokens())
        assert waiting.produced == 0
        assert engine.detach("one") > 0
        assert not any(generation.ended for generation in running)
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


def test_vllm_42125_a_stale_prefix_after_a_reload_under_the_same_name(engine: Engine) -> None:
    engine.attach("one", adapter(1))
    answer(engine, "one", b"one")
    assert engine.memory().blocks > 0
    engine.detach("one")
    engine.attach("one", adapter(2))
    again = engine.submit(Job(PROMPT, 6, "one", root_key=b"one"))
    assert list(again.tokens()) == answer(engine, "one")
    assert again.reused_tokens == 0


def test_vllm_30931_two_ids_share_kv(scene: Scene, tmp_path: Path) -> None:
    # Two versions under one name: whoever comes second computes its own, and both are found again.
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        assert right(scene, world, scene.one, scene.two, scene.base)
        for who in (scene.one, scene.two, scene.base):
            running = start(scene, world, who, 1)
            assert says(running) == scene.cold.says[who, 1]
            assert running.amount.reused > 0
        blocks = world.node.engine._prefix._blocks.values()
        assert {block.adapter for block in blocks} == {None, scene.one.key, scene.two.key}


def test_vllm_33791_a_later_reload_reads_changed_files(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def changed(files: Any, base: Any) -> Any:
        # After they were hashed, and before a tensor is made of them.
        files_swap(scene, world)
        return adapter_read(files, base)

    with soak.node_of(scene.registry, tmp_path, adapters=1) as world:
        with monkeypatch.context() as patch:
            patch.setattr("gpu_worker.serving.admission.adapter_read", changed)
            assert right(scene, world, scene.one)
        # What serves is not read again, whether the files are others or none.
        assert right(scene, world, scene.one)
        assert scene.registry.pulls == 1
        # It makes room for the other one; what lies there when it comes back is not taken.
        assert right(scene, world, scene.two, scene.one)
        assert scene.registry.pulls == 3
        shutil.rmtree(world.node.store.folder(scene.one.key))
        assert right(scene, world, scene.one)
        assert right(scene, world, scene.two, scene.one)
        assert scene.registry.pulls == 4


@pytest.mark.parametrize("running", [False, True], ids=["ended", "running"])
def test_sglang_36894_an_unload_waits_for_ever_after_more_than_one_answer(
    scene: Scene, tmp_path: Path, running: bool
) -> None:
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        with ew.lasting(world.node.engine):
            asked = start(scene, world, scene.one, n=2, max_tokens=700 if running else 4)
            for generation in asked.generations:
                next(generation.tokens())
            scene.registry.revoke(scene.one.digest, deadline=0 if running else None)
            for generation in asked.generations:
                list(generation.tokens())
                assert generation.finish_reason == (CANCELLED if running else LENGTH)
        until(lambda: bool(scene.registry.acknowledged))
        world.clean()


def test_llama_cpp_28674_init_without_apply_applies_all(scene: Scene, tmp_path: Path) -> None:
    # Adapters that are there and not named are not applied, to the bit.
    crowded, plain = (ew.Driven(ew.base_build("llama")) for _ in range(2))
    for number in (1, 2):
        crowded.attach(number, adapter(number))
    assert ew.same_bits(crowded.answer(Job(PROMPT, 6))[1], plain.answer(Job(PROMPT, 6))[1])
    # A context names the base or one adapter, and nothing in a body does.
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        assert right(scene, world, scene.one, scene.two, scene.base)
        for value in ([], [{"id": 0, "scale": 1.0}], None):
            with pytest.raises(BodyError):
                start(scene, world, scene.base, lora=value)


def test_aibrix_236_adapters_are_lost_on_restart(scene: Scene, tmp_path: Path) -> None:
    registry, one, two = scene.registry, scene.one, scene.two
    with soak.node_of(registry, tmp_path, adapters=2) as world:
        assert right(scene, world, one, two)
    # While it was away one was revoked: the registry says so, and the other one is there again.
    registry.artifacts[two.digest].revoked = True
    registry.overdue = [
        {"tenantId": str(two.tenant_id), "adapterDigest": two.digest, "deadlineSeconds": None}
    ]
    registry.heartbeats.clear()
    with soak.node_of(registry, tmp_path, adapters=2) as world:
        told = {item["adapterDigest"]: item["state"] for item in registry.heartbeats[0]}
        assert told == {one.digest: "STORED", two.digest: "STORED"}
        until(lambda: bool(registry.acknowledged))
        assert right(scene, world, one)
        with pytest.raises(DeniedError):
            start(scene, world, two)
    assert registry.pulls == 2
    with soak.node_of(registry, tmp_path / "another disk", adapters=2) as world:
        assert right(scene, world, one)
    assert registry.pulls == 3
