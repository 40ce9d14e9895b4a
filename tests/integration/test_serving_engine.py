"""The engine against PEFT as its oracle, and what running together must not change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.serving.adapter import Adapter, LoraError, Part
from gpu_worker.serving.adapter_load import BaseIdentity, adapter_read, files_read
from gpu_worker.serving.base_load import LoadedBase, base_load
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.parameters import parameters_digest
from gpu_worker.serving.sealed import Sealed
from gpu_worker.serving.sequence import EngineBusyError, EngineError, Job
from gpu_worker.serving.workspace import Workspace
from registry_service.domain.errors import RefusedError, UntrustedError
from tests.integration import engine_world as ew
from tests.integration import serving_world as sw
from tests.integration.engine_world import Driven

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

PROMPT = torch.arange(1, 20).unsqueeze(0)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {}),
    "rslora": ("llama", {"use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    "patterns": (
        "llama",
        {
            "rank_pattern": {"layers.0.self_attn.q_proj": 2},
            "alpha_pattern": {"layers.1.self_attn.v_proj": 3},
        },
    ),
    "dora": ("llama", {"use_dora": True, "target_modules": ["q_proj", "o_proj", "up_proj"]}),
    "all-linear": ("llama", {"target_modules": "all-linear"}),
    "expression": ("llama", {"target_modules": r"^model(?=\.).*\.(q|v)_proj"}),
    "layers": ("llama", {"layers_to_transform": [1]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d dora": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "embedding": ("gpt2", {"target_modules": ["wte", "c_fc"], "fan_in_fan_out": True}),
    "embedding dora": ("gpt2", {"target_modules": ["wte"], "use_dora": True}),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {kind: sw.base_make(root / kind, kind) for kind in sw.CONFIGS}


@pytest.fixture
def loaded(bases: dict[str, Path]) -> tuple[LoadedBase, BaseIdentity]:
    proven = sw.prove(bases["llama"])
    return base_load(proven, "cpu"), sw.identity(proven)


@pytest.fixture
def engine(loaded: tuple[LoadedBase, BaseIdentity]) -> Iterator[Engine]:
    engine = Engine(loaded[0].model, stop_tokens=frozenset(), workspace=Workspace.of(1024))
    engine.start()
    yield engine
    engine.stop()


def _sealed(files: dict[str, bytes]) -> dict[str, Sealed]:
    return {name: Sealed(bytearray(content)) for name, content in files.items()}


def _adapter(bases: dict[str, Path], folder: Path, seed: int, **options: Any) -> Adapter:
    sw.peft_make(bases["llama"], folder, seed, **options)
    proven = sw.prove(bases["llama"])
    return adapter_read(_sealed(sw.adapter_files(proven, folder)), sw.identity(proven)).adapter


def _tokens(engine: Engine, name: str | None, count: int = 12, start: int = 1) -> list[int]:
    prompt = tuple(range(start, start + 8))
    return list(engine.submit(Job(prompt, count, name)).tokens())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_peft(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    kind, options = CASES[case]
    peft = sw.peft_make(bases[kind], tmp_path / "adapter", 3, **options)
    proven = sw.prove(bases[kind])
    base = base_load(proven, "cpu")
    read = adapter_read(
        _sealed(sw.adapter_files(proven, tmp_path / "adapter")), sw.identity(proven)
    )
    driven = Driven(base.model)
    row = driven.attach("a", read.adapter)
    assert driven.runner.bank.applied(row) == read.modules
    prompt = tuple(PROMPT[0].tolist())
    on, off = (driven.answer(Job(prompt, 1, name))[1][0] for name in ("a", None))
    with torch.inference_mode():
        expected = peft(PROMPT).logits[0, -1]
        with peft.disable_adapter():
            expected_off = peft(PROMPT).logits[0, -1]
    assert (off - expected_off).abs().max() < 1e-4
    assert (on - expected).abs().max() < 1e-4
    assert (on - off).abs().max() > 1e-2
    assert parameters_digest(base.parameters) == base.parameters_digest


def test_interleaved_gives_the_same_tokens_as_alone(
    engine: Engine, bases: dict[str, Path], tmp_path: Path
) -> None:
    for number, name in enumerate(("a", "b")):
        applied, size = engine.attach(name, _adapter(bases, tmp_path / name, number, lora_alpha=64))
        assert applied == 4
        assert size > 0
    names = ["a", "b", None]
    alone = [_tokens(engine, name) for name in names]
    assert len({tuple(tokens) for tokens in alone}) == 3
    running = [engine.submit(Job(tuple(range(1, 9)), 12, name)) for name in names * 4]
    together = [list(generation.tokens()) for generation in running]
    assert together == alone * 4


def test_a_long_request_does_not_hold_up_the_next(engine: Engine) -> None:
    with ew.lasting(engine):
        long = engine.submit(Job(tuple(range(1, 90)) * 6, 400))
        assert len(_tokens(engine, None, count=3)) == 3
        assert not long.ended
        long.cancel()
        list(long.tokens())
    assert long.finish_reason == "cancelled"


def test_a_failing_forward_leaves_nothing(
    engine: Engine,
    loaded: tuple[LoadedBase, BaseIdentity],
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.attach("a", _adapter(bases, tmp_path / "a", 1))
    before = [_tokens(engine, name) for name in ("a", None)]
    ended = threading.Event()
    layer = loaded[0].model.model.layers[1].mlp

    def broken(_: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", broken)
        generation = engine.submit(Job((1, 2, 3), 4, "a", on_end=ended.set))
        with pytest.raises(EngineError):
            list(generation.tokens())
    assert ended.is_set()
    assert [_tokens(engine, name) for name in ("a", None)] == before
    assert parameters_digest(loaded[0].parameters) == loaded[0].parameters_digest
    assert engine.detach("a") > 0


def test_nan_ends_its_own_request_only(
    engine: Engine, bases: dict[str, Path], tmp_path: Path
) -> None:
    good = _adapter(bases, tmp_path / "a", 1)
    bad = Adapter({n: Part(p.a * float("nan"), p.b, p.scaling) for n, p in good.parts.items()})
    engine.attach("good", good)
    engine.attach("bad", bad)
    alone = _tokens(engine, "good")
    poisoned = engine.submit(Job((1, 2, 3), 4, "bad"))
    assert _tokens(engine, "good") == alone
    with pytest.raises(EngineError):
        list(poisoned.tokens())


def test_an_adapter_in_use_is_not_detached_and_cancel_frees_it(
    engine: Engine, bases: dict[str, Path], tmp_path: Path
) -> None:
    engine.attach("a", _adapter(bases, tmp_path / "a", 1))
    with ew.lasting(engine):
        running = engine.submit(Job((1, 2, 3), 500, "a"))
        with pytest.raises(EngineError):
            engine.detach("a")
        assert engine.cancel("a") == 1
        list(running.tokens())
    engine.detach("a")
    with pytest.raises(EngineError):
        _tokens(engine, "a")


def test_admit_and_bounds(loaded: tuple[LoadedBase, BaseIdentity]) -> None:
    workspace = Workspace(lanes=1, lane_tokens=1024, outstanding=2)
    engine = Engine(loaded[0].model, stop_tokens=frozenset(), workspace=workspace)
    engine.start()

    def refuse() -> None:
        raise UntrustedError("too late")

    with ew.lasting(engine):
        first = engine.submit(Job((1, 2), 300))
        second = engine.submit(Job((1, 2), 3, admit=refuse))
        with pytest.raises(EngineBusyError):
            engine.submit(Job((1, 2), 3))
        first.cancel()
        with pytest.raises(UntrustedError):
            list(second.tokens())
        last = engine.submit(Job((1, 2), 500))
        engine.stop()
        list(last.tokens())
    assert last.finish_reason == "cancelled"
    with pytest.raises(EngineError):
        engine.submit(Job((1, 2), 3))


def test_an_adapter_that_does_not_fit_is_refused(
    engine: Engine, bases: dict[str, Path], tmp_path: Path
) -> None:
    sw.peft_make(bases["llama"], tmp_path / "a", 1)
    proven = sw.prove(bases["llama"])
    files = sw.adapter_files(proven, tmp_path / "a")
    config = files["adapter_config.json"]
    for changed in (config.replace(b'"q_proj"', b'"k_proj"'), config.replace(b'"r": 4', b'"r": 8')):
        assert changed != config
        with pytest.raises(RefusedError):
            adapter_read(_sealed(files | {"adapter_config.json": changed}), sw.identity(proven))
    wrong = Adapter({"model.layers.0.mlp.up_proj": Part(torch.zeros(4, 3), torch.zeros(3, 4), 1)})
    for adapter in (wrong, Adapter({"nowhere": Part(torch.zeros(1, 1), torch.zeros(1, 1), 1)})):
        with pytest.raises(LoraError):
            engine.attach("wrong", adapter)


def test_only_the_files_of_the_verdict_are_read(bases: dict[str, Path], tmp_path: Path) -> None:
    from registry_service.domain.digests import digest_of

    (tmp_path / "one").write_bytes(b"1")
    one = (("one", digest_of(b"1")),)
    assert {name: bytes(file.view) for name, file in files_read(tmp_path, one).items()} == {
        "one": b"1"
    }
    with pytest.raises(UntrustedError):
        files_read(tmp_path, (("one", digest_of(b"2")),))
    (tmp_path / "two").symlink_to(tmp_path / "one")
    for expected in (one, (*one, ("two", digest_of(b"1")))):
        with pytest.raises(UntrustedError):
            files_read(tmp_path, expected)


def test_a_base_that_changed_after_it_was_proven_is_refused(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    folder = sw.base_make(tmp_path / "base")
    proven = sw.prove(folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(RefusedError, match="changed"):
        base_load(proven, "cpu")


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"lora_bias": True}, "lora_B.bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_tokens_delta"),
    ],
)
def test_a_tensor_that_the_engine_has_no_place_for_is_refused(
    bases: dict[str, Path], tmp_path: Path, options: dict[str, Any], left: str
) -> None:
    with pytest.raises(RefusedError, match=f"{left}: the engine has no place for"):
        _adapter(bases, tmp_path / "adapter", 3, **options)
