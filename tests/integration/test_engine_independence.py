"""A request's tokens and logits are the same to the bit, whoever runs beside it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpu_worker.serving import batch, linear
from gpu_worker.serving import runner as runner_module
from gpu_worker.serving.batch import BankRows, least_rows
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.runner import rows_at_once
from gpu_worker.serving.sequence import EngineError, Generation, Job, Sampling
from gpu_worker.serving.workspace import BLOCK_TOKENS, Workspace
from tests.integration import engine_world as ew
from tests.integration.engine_checks import adapters_of, neighbours_check

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONG = Workspace(lanes=4, lane_tokens=1536, adapters=1, rank=4, step_tokens=512)


class Failing:
    """A decoder that fails at its third token."""

    def __init__(self) -> None:
        self.left = 2

    def push(self, token: int) -> str:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("injected")
        return "x"

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["llama", "wide", "gemma2", "gpt2"])
def test_a_crowd_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    assert neighbours_check(kind, dtype, "cpu") == 0.0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_whatever_joins_leaves_fails_or_hits_a_prefix(dtype: torch.dtype, grouped: bool) -> None:
    chance = random.Random(11)
    workspace = Workspace(
        lanes=6, lane_tokens=256, adapters=6, rank=16, step_tokens=128, grouped=grouped
    )
    driven = ew.Driven(ew.base_build("llama", dtype), workspace)
    model = ew.base_build("llama", dtype)
    for seed, (name, options) in enumerate(list(adapters_of("llama").items())[:5]):
        driven.attach(name, ew.adapter_from(ew.peft_build(model, seed, **options)))
    driven.attach("nan", ew.poisoned(ew.adapter_from(ew.peft_build(model, 9))))
    names = [None, *list(adapters_of("llama"))[:5]]
    jobs = [_random_job(chance, chance.choice(names)) for _ in range(20)]
    expected = {job: driven.answer(job) for job in jobs}
    running: dict[Generation, Job] = {}
    others: list[Generation] = []
    cancelled = set()
    for job in jobs:
        shared = Job(
            job.prompt,
            job.max_tokens,
            job.adapter,
            sampling=job.sampling,
            root_key=repr(job.adapter).encode(),
        )
        running[driven.add(shared)] = job
        if chance.random() < 0.3:
            others.append(driven.add(Job(ew.prompt_of(70, 1), 5, "nan", root_key=b"nan")))
        if chance.random() < 0.3:
            sampling = Sampling(stop=("y",), decoder=Failing())
            others.append(driven.add(Job(ew.prompt_of(9, 2), 8, None, sampling=sampling)))
        for _ in range(chance.randrange(4)):
            driven.requests.step()
        if chance.random() < 0.2:
            cancelled.add(victim := chance.choice(list(running)))
            victim.cancel()
    driven.finish()
    driven.idle_check()
    for generation, job in running.items():
        tokens, logits = expected[job]
        count = generation.produced if generation in cancelled else job.max_tokens
        assert list(generation.tokens()) == tokens[:count]
        assert ew.same_bits(driven.logits[generation], logits[:count])
    assert sum(g.reused_tokens for g in running) >= BLOCK_TOKENS * 3
    for generation in others:
        with pytest.raises(EngineError):
            list(generation.tokens())


def _random_job(chance: random.Random, name: str | None) -> Job:
    # Few beginnings, so that prefixes are shared; any length, so that blocks are cut anywhere.
    prompt = ew.prompt_of(140, chance.randrange(2))[: chance.randrange(1, 140)]
    warm = chance.random() < 0.5
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=chance.randrange(99)) if warm else None
    return Job(prompt, chance.randrange(1, 9), name, sampling=sampling or Sampling())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kind", ["llama", "wide", "gemma2"])
def test_a_longer_neighbour_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    # Long sums are split by their length: a row of each length beside longer ones of each.
    driven = ew.Driven(ew.base_build(kind, dtype), LONG)
    for neighbours in ([450], [700], [1100], [1400, 520]):
        running = [driven.add(Job(ew.prompt_of(n, n), 60)) for n in neighbours]
        while not all(generation.produced for generation in running):
            driven.requests.step()
        lengths = [n for n in (200, 300, 440, 850, 900) if n < max(neighbours)]
        jobs = [Job(ew.prompt_of(n, n), 3) for n in lengths]
        beside = []
        for job in jobs:
            beside.append(driven.add(job))
            while not beside[-1].ended:
                driven.requests.step()
        assert not any(generation.ended for generation in running)
        for generation in running:
            generation.cancel()
        driven.finish()
        for job, generation in zip(jobs, beside, strict=True):
            assert ew.same_bits(driven.logits[generation], driven.answer(job)[1]), job.prompt[:2]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_check_at_start_finds_sums_that_a_neighbour_splits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    summed = batch._attention

    def split(query: Tensor, keys: Tensor, *others: Any) -> Tensor:
        return summed(query, keys, *others) * (1.01 if keys.shape[2] > 1024 else 1)

    monkeypatch.setattr(batch, "_attention", split)
    engine = Engine(ew.base_build("llama", dtype), stop_tokens=frozenset(), workspace=LONG)
    with pytest.raises(EngineError, match="neighbours"):
        engine.start()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("length", [1, 64, 65, 127, 128, 129, 200])
def test_a_warm_prefix_gives_the_bits_of_a_cold_one(length: int, dtype: torch.dtype) -> None:
    driven = ew.Driven(ew.base_build("llama", dtype))
    prompt = ew.prompt_of(length)
    cold = driven.answer(Job(prompt, 5))
    driven.answer(Job(prompt[: length // 2 + 64], 2, root_key=b"one"))
    generation = driven.add(Job(prompt, 5, root_key=b"one"))
    driven.finish()
    common = min(length // 2 + 64, length - 1)
    assert generation.reused_tokens == common // BLOCK_TOKENS * BLOCK_TOKENS
    assert ew.same_bits(driven.logits[generation], cold[1])
    driven.idle_check()


@pytest.mark.usefixtures("one_thread")
def test_a_row_of_the_bank_is_the_same_after_others_had_it() -> None:
    model = ew.base_build("llama")
    one, other = (ew.adapter_from(ew.peft_build(model, seed)) for seed in range(2))
    workspace = Workspace(lanes=2, lane_tokens=128, adapters=1, rank=16, step_tokens=128)
    driven = ew.Driven(ew.base_build("llama"), workspace)
    job = Job(ew.prompt_of(20), 4, "a")
    driven.attach("a", one)
    first = driven.answer(job)
    driven.runner.bank.detach(driven.rows["a"])
    # A smaller rank leaves the rest of the row to what was there before.
    small = ew.adapter_from(ew.peft_build(model, 3, r=1, use_dora=True))
    driven.attach("b", small)
    driven.answer(Job(ew.prompt_of(20), 4, "b"))
    driven.runner.bank.detach(driven.rows["b"])
    driven.attach("a", one)
    assert ew.same_bits(driven.answer(job)[1], first[1])
    driven.runner.bank.detach(driven.rows["a"])
    driven.attach("a", other)
    assert not ew.same_bits(driven.answer(job)[1], first[1])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [(64, 16), (16, 32), (32, 4), (4, 16)])
def test_few_rows_are_multiplied_as_many_are(size: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    least = least_rows(size[0] * size[1], torch.device("cpu"), dtype)
    # They differ in few numbers of many thousands, where they do.
    for _ in range(40):
        left = torch.randn(240, 1, size[0], generator=generator).to(dtype)
        right = torch.randn(240, *size, generator=generator).to(dtype)
        few = [torch.bmm(a, b) for a, b in zip(left.split(least), right.split(least), strict=True)]
        whole = 240 // least * least
        assert torch.equal(torch.cat(few)[:whole], torch.bmm(left, right)[:whole])


class Rounding(nn.Linear):  # type: ignore[misc]  # the checker does not see torch
    """A linear whose kernel changes above 48 rows, as those of matrix libraries do."""

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = super().forward(value)
        return result + 1e-6 if value.shape[-2] > 48 else result


class Placed(nn.Linear):  # type: ignore[misc]  # the checker does not see torch
    """A linear whose rows depend on their place."""

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = super().forward(value)
        return result + torch.arange(value.shape[-2])[:, None]


def test_products_are_cut_where_larger_ones_round_differently() -> None:
    assert rows_at_once(Rounding(8, 8), 256) == 48
    assert rows_at_once(nn.Linear(8, 8), 32) is None
    with pytest.raises(EngineError, match="place"):
        rows_at_once(Placed(8, 8), 32)


def test_a_base_with_such_products_is_cut_and_changes_no_bit() -> None:
    model = ew.base_build("llama")
    mlp = model.model.layers[0].mlp
    changed = Rounding(*mlp.up_proj.weight.T.shape, bias=False)
    changed.load_state_dict(mlp.up_proj.state_dict())
    mlp.up_proj = changed.requires_grad_(requires_grad=False)
    driven = ew.Driven(model)
    assert mlp.up_proj.most_rows == 48
    jobs = [Job(ew.prompt_of(n), 3) for n in (120, 30)]
    alone = [driven.answer(job)[1] for job in jobs]
    together = [driven.add(job) for job in jobs]
    driven.finish()
    assert all(ew.same_bits(driven.logits[g], a) for g, a in zip(together, alone, strict=True))


class Mixing(nn.Module):  # type: ignore[misc]  # the checker does not see torch
    """Mixes the rows of a step a little, as experts with a capacity would."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.inner(value)
        return result + 1e-3 * result.mean(1, keepdim=True)


def test_an_engine_whose_rows_depend_on_each_other_does_not_start() -> None:
    model = ew.base_build("llama")
    model.model.layers[0].mlp = Mixing(model.model.layers[0].mlp)
    engine = Engine(model, stop_tokens=frozenset(), workspace=ew.SMALL)
    with pytest.raises(EngineError, match="neighbours"):
        engine.start()
    assert not engine.alive


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("by", [1e-6, 1.0])
def test_where_mixing_adapters_rounds_each_step_runs_one_and_where_it_mixes_none_runs(
    monkeypatch: pytest.MonkeyPatch, by: float
) -> None:
    by_row, seen = linear._by_row, []

    def inexact(vectors: Tensor, rows: BankRows, matrices: Tensor) -> Tensor:
        seen.append(len(set(rows.rows.tolist())))
        return by_row(vectors, rows, matrices) + by * (seen[-1] > 1)

    monkeypatch.setattr(linear, "_by_row", inexact)
    engine = Engine(ew.base_build("llama"), stop_tokens=frozenset(), workspace=ew.SMALL)
    if by == 1.0:
        with pytest.raises(EngineError, match="neighbours"):
            engine.start()
        return
    engine.start()
    assert engine.workspace.grouped
    seen.clear()
    for seed in (1, 2):
        engine.attach(seed, ew.adapter_from(ew.peft_build(ew.base_build("llama"), seed)))
    running = [engine.submit(Job(ew.prompt_of(30), 20, name)) for name in (1, 2, None)]
    assert all(len(list(generation.tokens())) == 20 for generation in running)
    engine.stop()
    assert set(seen) == {1}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shared", ["lanes", "rows"])
def test_the_check_at_start_finds_a_mix_up(monkeypatch: pytest.MonkeyPatch, shared: str) -> None:
    engine = Engine(ew.base_build("llama"), stop_tokens=frozenset(), workspace=ew.SMALL)
    runner = engine._runner
    forward = runner.forward
    counter = itertools.count()

    def mixed(step: Any) -> Tensor:
        sequences = step.sequences
        if len(sequences) < 2 or next(counter) < 1:
            return forward(step)
        one, other = sequences[:2]
        field = "bank_row" if shared == "rows" else "lane"
        kept = getattr(one, field)
        setattr(one, field, getattr(other, field))
        try:
            return forward(step)
        finally:
            setattr(one, field, kept)

    monkeypatch.setattr(runner, "forward", mixed)
    with pytest.raises(EngineError, match="neighbours"):
        engine.start()


def test_products_of_one_size_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    monkeypatch.setattr(runner_module, "rows_at_once", lambda _, most: measured.append(most))
    ew.Driven(ew.base_build("llama"))
    # Four shapes of the layers, and the head, which sees one row for each request.
    assert sorted(measured) == [8, 256, 256, 256, 256]
