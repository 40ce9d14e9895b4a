"""How the next token is chosen."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from gpu_worker.serving.pieces import Pieces
from gpu_worker.serving.sampler import Sampler
from gpu_worker.serving.sequence import EngineError, Job, Sampling
from tests.integration import engine_world as ew

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


def _draws(sampling: Sampling, count: int = 2000) -> list[int]:
    sampler = Sampler(sampling)
    return [sampler.choose(LOGITS).token for _ in range(count)]


def test_greedy_takes_the_likeliest() -> None:
    assert set(_draws(Sampling(), 5)) == {1}
    assert set(_draws(Sampling(temperature=1e-30, seed=1), 50)) == {1}


def test_draws_follow_the_probabilities() -> None:
    counts = Counter(_draws(Sampling(temperature=1.0, seed=5), 4000))
    shares = [counts[token] / 4000 for token in range(4)]
    assert shares == pytest.approx([0.05, 0.5, 0.15, 0.3], abs=0.03)
    # A temperature of 2 takes the square roots.
    counts = Counter(_draws(Sampling(temperature=2.0, seed=5), 4000))
    roots = torch.tensor([0.05, 0.5, 0.15, 0.3]).sqrt()
    assert [counts[t] / 4000 for t in range(4)] == pytest.approx(
        (roots / roots.sum()).tolist(), abs=0.03
    )


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, {1}), (0.5, {1}), (0.51, {1, 3}), (0.9, {1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_likeliest_that_reach_it(top_p: float, kept: set[int]) -> None:
    assert set(_draws(Sampling(temperature=1.0, top_p=top_p, seed=3))) == kept


def test_a_seed_decides_and_requests_have_generators_of_their_own() -> None:
    one = _draws(Sampling(temperature=1.0, seed=1), 50)
    assert one == _draws(Sampling(temperature=1.0, seed=1), 50)
    assert one != _draws(Sampling(temperature=1.0, seed=2), 50)
    assert _draws(Sampling(temperature=1.0), 50) != _draws(Sampling(temperature=1.0), 50)
    first, second = (Sampler(Sampling(temperature=1.0, seed=1)) for _ in range(2))
    pairs = [(first.choose(LOGITS).token, second.choose(LOGITS).token) for _ in range(50)]
    assert [a for a, _ in pairs] == [b for _, b in pairs] == one


def test_logprobs_are_the_models_whatever_the_temperature() -> None:
    expected = LOGITS.tolist()
    for sampling in (Sampling(logprobs=2), Sampling(temperature=0.3, seed=1, logprobs=2)):
        choice = Sampler(sampling).choose(LOGITS)
        assert choice.logprob == pytest.approx(expected[choice.token], abs=1e-6)
        assert [token for token, _ in choice.top] == [1, 3]
        assert [p for _, p in choice.top] == pytest.approx([expected[1], expected[3]], abs=1e-6)
    assert Sampler(Sampling(logprobs=0)).choose(LOGITS).top == ()
    assert Sampler(Sampling(logprobs=9)).choose(LOGITS).top[-1][0] == 0
    assert Sampler(Sampling()).choose(LOGITS).logprob is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"logprobs": -1},
        {"stop": ("x",)},
    ],
)
def test_values_out_of_bounds_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(EngineError):
        Sampling(**wrong)  # type: ignore[arg-type]  # wrong on purpose


class Letters:
    """Each token is a letter."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_the_engine_streams_text_and_logprobs_and_stops_at_a_text() -> None:
    driven = ew.Driven(ew.base_build("llama"))
    job = Job(ew.prompt_of(12), 12, sampling=Sampling(temperature=2.0, seed=4))
    tokens, logits = driven.answer(job)
    text = Letters().decode(tokens)
    stop = text[4:7]
    assert text.index(stop) == 4
    sampling = Sampling(
        temperature=2.0,
        seed=4,
        logprobs=1,
        stop=("never", stop),
        decoder=Pieces(Letters()),
    )
    generation = driven.add(Job(job.prompt, 12, sampling=sampling))
    driven.finish()
    outputs = list(generation.outputs())
    assert generation.finish_reason == "stop"
    assert [o.token for o in outputs] == tokens[:7]
    assert "".join(o.text for o in outputs) + generation.rest == text[:4]
    for output, row in zip(outputs, logits[:7], strict=True):
        logprobs = torch.log_softmax(row, -1)
        assert output.logprob == pytest.approx(float(logprobs[output.token]), abs=1e-6)
        assert output.top[0][0] == int(row.argmax())


def test_text_that_might_have_become_a_stop_comes_at_the_end() -> None:
    driven = ew.Driven(ew.base_build("llama"))
    tokens, _ = driven.answer(Job(ew.prompt_of(12), 6))
    text = Letters().decode(tokens)
    sampling = Sampling(stop=(text[-2:] + "!",), decoder=Pieces(Letters()))
    generation = driven.add(Job(ew.prompt_of(12), 6, sampling=sampling))
    driven.finish()
    released = "".join(output.text for output in generation.outputs())
    assert (generation.finish_reason, generation.rest) == ("length", text[-2:])
    assert released + generation.rest == text


def test_a_stop_token_ends_an_answer_and_is_not_part_of_it() -> None:
    tokens, _ = ew.Driven(ew.base_build("llama")).answer(Job(ew.prompt_of(12), 6))
    stop = next(token for token in tokens if token != tokens[0])
    driven = ew.Driven(ew.base_build("llama"), stop_tokens=frozenset({stop}))
    generation = driven.add(Job(ew.prompt_of(12), 6))
    driven.finish()
    assert list(generation.tokens()) == tokens[: tokens.index(stop)]
    assert generation.finish_reason == "stop"
