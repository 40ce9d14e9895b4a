"""What the engine cannot run is refused by name: bases when it starts, adapters when they load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gpu_worker.serving import attention, runner
from gpu_worker.serving.adapter import Adapter, LoraError, Part, adapter_of
from gpu_worker.serving.bank import Bank, placeable
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.inspection import inspect_base
from gpu_worker.serving.sequence import EngineError, Job
from gpu_worker.serving.workspace import Workspace
from tests.integration import engine_world as ew

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

UP = "model.layers.0.mlp.up_proj"
NAME = f"base_model.model.{UP}"


def _model(**raw: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _engine(model: PreTrainedModel, lane_tokens: int = 256) -> Engine:
    workspace = Workspace(lanes=4, lane_tokens=lane_tokens, adapters=2, rank=4, step_tokens=256)
    return Engine(model, stop_tokens=frozenset(), workspace=workspace)


# Bases


def test_a_base_without_the_attention_interface_is_refused() -> None:
    falcon = _model(
        model_type="falcon",
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    with pytest.raises(EngineError, match=r"FalconForCausalLM: .*attends in its own way"):
        _engine(falcon)


ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotations_that_depend_on_the_longest_neighbour_are_refused(rope: str) -> None:
    positions = 128 if rope == "dynamic" else 256
    base = {"rope_parameters": ROPES[rope], "max_position_embeddings": positions}
    model = ew.base_build("llama", **base)
    # Within the length at which they change they change for nobody.
    assert len(inspect_base(model, 128).layers) == 2
    config = model.config
    config.max_position_embeddings = 256
    if rope == "dynamic":
        config.rope_parameters["original_max_position_embeddings"] = 128
    with pytest.raises(EngineError, match="rotations"):
        inspect_base(model, 256)


def test_lanes_beyond_the_positions_of_a_base_are_refused() -> None:
    with pytest.raises(EngineError, match="expected lanes of at most the base's 128"):
        _engine(ew.base_build("llama", max_position_embeddings=128))
    assert Workspace.of(128).lane_tokens == 128
    assert Workspace.of(1000).lane_tokens == 960
    assert Workspace.of(1000, tokens=130).lane_tokens == 192
    assert Workspace.of(64, lanes=2, tokens=1).lanes == 2


@pytest.mark.parametrize(
    ("option", "value"), [("s_aux", torch.zeros(4)), ("position_bias", 1), ("attention_mask", 1)]
)
def test_what_changes_attention_and_is_not_implemented_is_refused(option: str, value: Any) -> None:
    model = ew.base_build("llama")
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *a, **o: forward(*a, **{**o, option: value})
    with pytest.raises(EngineError, match="not implemented"):
        _engine(model)


def test_a_base_that_answers_otherwise_than_the_library_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = attention.attention

    def without_cap(*args: Any, softcap: Any = None, **options: Any) -> Any:
        return attend(*args, **options)

    attention.AttentionInterface.register(attention.NAME, without_cap)
    try:
        engine = _engine(ew.base_build("gemma2"))
        with pytest.raises(EngineError, match="library"):
            engine.start()
    finally:
        attention.AttentionInterface.register(attention.NAME, attend)


@pytest.mark.parametrize("ignored", ["sliding_window", "softcap"])
def test_window_and_cap_do_something(ignored: str) -> None:
    driven = ew.Driven(ew.base_build("gemma2"))
    job = Job(ew.prompt_of(70), 2)
    _, honest = driven.answer(job)
    attend = attention.attention
    attention.AttentionInterface.register(
        attention.NAME, lambda *a, **o: attend(*a, **{**o, ignored: None})
    )
    try:
        _, other = driven.answer(job)
    finally:
        attention.AttentionInterface.register(attention.NAME, attend)
    assert ew.difference(honest[:1], other[:1]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_base_of_experts_is_refused_on_the_cpu(dtype: torch.dtype) -> None:
    # How many rows an expert multiplies is what the neighbours' tokens choose.
    mixtral = _model(
        model_type="mixtral",
        **{k: v for k, v in ew.CONFIGS["llama"].items() if k != "model_type"},
        num_local_experts=4,
    )
    with pytest.raises(EngineError, match=r"MixtralForCausalLM: model\.layers\.0\..*experts do so"):
        inspect_base(mixtral.to(dtype), 256)


# Adapters


def test_a_rank_above_the_banks_is_refused() -> None:
    driven = ew.Driven(ew.base_build("llama"), Workspace(lanes=1, lane_tokens=64, rank=4))
    model = ew.base_build("llama")
    driven.attach("four", ew.adapter_from(ew.peft_build(model, 1, r=4)))
    pattern = {"rank_pattern": {"layers.1.mlp.up_proj": 5}}
    with pytest.raises(LoraError, match=r"layers\.1\.mlp\.up_proj: rank 5 is above the bank's 4"):
        driven.attach("five", ew.adapter_from(ew.peft_build(model, 1, r=4, **pattern)))


def test_a_full_bank_takes_no_more_and_keeps_what_it_has() -> None:
    driven = ew.Driven(ew.base_build("llama"), Workspace(lanes=1, lane_tokens=64, adapters=1))
    model = ew.base_build("llama")
    one, other = (ew.adapter_from(ew.peft_build(model, seed)) for seed in range(2))
    driven.attach("one", one)
    job = Job(ew.prompt_of(9), 3, "one")
    before = driven.answer(job)
    with pytest.raises(LoraError, match="taken"):
        driven.attach("other", other)
    assert ew.same_bits(driven.answer(job)[1], before[1])


def test_a_row_in_use_is_not_given_up() -> None:
    driven = ew.Driven(ew.base_build("llama"))
    row = driven.attach("a", ew.adapter_from(ew.peft_build(ew.base_build("llama"), 1)))
    driven.add(Job(ew.prompt_of(9), 5, "a"))
    driven.requests.step()
    with pytest.raises(LoraError, match="references"):
        driven.runner.bank.detach(row)
    driven.finish()
    driven.runner.bank.detach(row)
    with pytest.raises(LoraError):
        driven.runner.bank.detach(row)
    with pytest.raises(LoraError):
        driven.runner.bank.detach(0)


def test_modules_without_a_place_are_refused_by_name() -> None:
    workspace = Workspace(lanes=1, lane_tokens=64, targets=frozenset({"q_proj"}))
    bank = ew.Driven(ew.base_build("llama"), workspace).runner.bank
    assert {name.rpartition(".")[2] for name in bank.stacks} == {"q_proj"}
    adapter = ew.adapter_from(ew.peft_build(ew.base_build("llama"), 1, target_modules=["v_proj"]))
    with pytest.raises(LoraError, match=r"model\.layers\.0\.self_attn\.v_proj: the bank has no"):
        bank.prepare(adapter)


@pytest.fixture(scope="module")
def bank() -> Bank:
    return ew.Driven(ew.base_build("llama")).runner.bank


SIZES: dict[str, Part] = {
    "in": Part(torch.zeros(4, 63), torch.zeros(96, 4), 1),
    "out": Part(torch.zeros(4, 64), torch.zeros(95, 4), 1),
    "ranks": Part(torch.zeros(4, 64), torch.zeros(96, 3), 1),
    "axes": Part(torch.zeros(4, 64, 1), torch.zeros(96, 4), 1),
    "magnitude": Part(torch.zeros(4, 64), torch.zeros(96, 4), 1, torch.zeros(95)),
}


@pytest.mark.parametrize("part", SIZES.values(), ids=SIZES)
def test_sizes_that_do_not_fit_are_refused_by_name(part: Part, bank: Bank) -> None:
    good = Part(torch.zeros(4, 64), torch.zeros(96, 4), 1)
    assert set(bank.prepare(Adapter({UP: good}))) == {UP}
    with pytest.raises(LoraError, match=r"model\.layers\.0\.mlp\.up_proj: expected"):
        bank.prepare(Adapter({UP: part}))


def _lora_bias() -> dict[str, Tensor]:
    return _saved(lora_bias=True, target_modules=["up_proj"])


def _whole_module() -> dict[str, Tensor]:
    return _saved(modules_to_save=["lm_head"], target_modules=["up_proj"])


def _token_rows() -> dict[str, Tensor]:
    return _saved(
        trainable_token_indices={"embed_tokens": [1, 2]},
        target_modules=["up_proj"],
    )


def _copied_embedding() -> dict[str, Tensor]:
    return _saved(target_modules=["up_proj", "embed_tokens"])


def _saved(**options: Any) -> dict[str, Tensor]:
    model = ew.base_build("llama")
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    return dict(get_peft_model_state_dict(peft, save_embedding_layers="auto"))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (_lora_bias, "bias of lora_B"),
        (_whole_module, "a whole module"),
        (_token_rows, "trained token rows"),
        (_copied_embedding, "a tensor of the base"),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(
    saved: Callable[[], dict[str, Tensor]], words: str
) -> None:
    tensors = saved()
    modules = {
        n.removeprefix("base_model.model.").rpartition(".lora_")[0]
        for n in tensors
        if "lora_A" in n or "lora_embedding_A" in n
    }
    with pytest.raises(LoraError, match=rf"base_model\.model\..*: .*{words}"):
        adapter_of(tensors, dict.fromkeys(modules, 1.0))


def test_a_missing_tensor_is_refused_by_name() -> None:
    tensors = {f"{NAME}.lora_A.weight": torch.zeros(1, 64)}
    with pytest.raises(LoraError, match=r"lora_B\.weight: missing"):
        adapter_of(tensors, {UP: 1.0})


class Quantized(torch.nn.Linear):  # type: ignore[misc]  # the checker does not see torch
    """A linear that stores its weight in its own way."""


@pytest.mark.parametrize("module", [torch.nn.Conv2d(3, 4, 2), Quantized(2, 2)])
def test_convolutions_and_linears_of_another_kind_have_no_place(module: torch.nn.Module) -> None:
    assert not placeable(module)
    assert placeable(torch.nn.Linear(2, 2))


OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
}


def test_an_embedding_with_more_inputs_has_no_place_and_works() -> None:
    engine = _engine(_model(**OPT))
    engine.start()
    engine.stop()
    names = set(engine._runner.bank.stacks)
    assert "model.decoder.embed_tokens" in names
    # Its feed-forward layers see the tokens without the first axis.
    assert not any("positions" in name or "fc1" in name for name in names)


def test_a_product_that_cannot_be_cut_has_to_be_the_same_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = runner.rows_at_once

    def narrow(module: torch.nn.Module, most: int) -> int | None:
        # Only the feed-forward layers are of this width.
        return 48 if 96 in (module.in_features, module.out_features) else measured(module, most)

    monkeypatch.setattr(runner, "rows_at_once", narrow)
    opt = _model(**{**OPT, "vocab_size": 80})
    with pytest.raises(EngineError, match=r"layers\.0\.fc1: its rows depend on how many there are"):
        _engine(opt)
