"""Checks of the engine that hold on any device, within the device's bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_worker.serving.engine import Engine
from gpu_worker.serving.parameters import parameters_digest, parameters_named
from gpu_worker.serving.sequence import EngineError, Job
from gpu_worker.serving.workspace import Workspace
from tests.integration.engine_world import (
    SMALL,
    Driven,
    adapter_from,
    base_build,
    difference,
    peft_build,
    poisoned,
    prompt_of,
    share,
)

ANSWER = 4
PROMPT = 70
"""Past the border of a block and past the window of bases that have one."""


def adapters_of(kind: str) -> dict[str, dict[str, Any]]:
    """Options of adapters that differ in targets, ranks, factors and method."""
    conv = {"fan_in_fan_out": True} if kind == "gpt2" else {}
    attention, mlp, embedding = {
        "gpt2": ("c_attn", "c_fc", "wte"),
        "gpt_neox": ("query_key_value", "dense_h_to_4h", "embed_in"),
        "phi3": ("qkv_proj", "down_proj", "embed_tokens"),
    }.get(kind, ("q_proj", "down_proj", "embed_tokens"))
    return {
        "attention": {"target_modules": [attention], **conv},
        "patterns": {
            "use_rslora": True,
            "rank_pattern": {attention: 7, mlp: 2},
            "alpha_pattern": {mlp: 3},
            "target_modules": [attention, mlp],
            **conv,
        },
        "dora": {"use_dora": True, "target_modules": [attention, mlp], "lora_alpha": 6, **conv},
        "all-linear": {"r": 16, **conv},
        "embedding": {"target_modules": [embedding, mlp], **conv},
        "embedding dora": {"target_modules": [embedding], "use_dora": True, **conv},
    }


def oracle_check(kind: str, device: str, bound: float) -> None:
    """Six adapters and the base in one crowd, each against PEFT on the whole text so far."""
    model = base_build(kind, device=device)
    pefts = {n: peft_build(model, i, **o) for i, (n, o) in enumerate(adapters_of(kind).items())}
    plain = base_build(kind, device=device)
    plain.set_attn_implementation("eager")
    driven = Driven(model)
    for name, peft in pefts.items():
        row = driven.attach(name, adapter_from(peft))
        assert driven.runner.bank.applied(row) == sum(
            "lora_A" in n or "embedding_A" in n for n, _ in peft.named_parameters()
        )
    prompt = prompt_of(PROMPT)
    running = {name: driven.add(Job(prompt, ANSWER, name)) for name in (None, *pefts)}
    driven.finish()
    driven.idle_check()
    answers = {}
    for name, generation in running.items():
        tokens = list(generation.tokens())
        text = torch.tensor([prompt + tuple(tokens[:-1])], device=device)
        oracle = plain if name is None else pefts[name]
        with torch.inference_mode():
            expected = oracle(input_ids=text, use_cache=False).logits[0, PROMPT - 1 :]
        answers[name] = driven.logits[generation]
        assert difference(answers[name], list(expected)) < bound, name
    for name in pefts:
        assert difference(answers[name][:1], answers[None][:1]) > 100 * bound, name


def neighbours_check(kind: str, dtype: torch.dtype, device: str) -> float:
    """A crowd of prompts and adapters against each alone: the largest share of a logit."""
    model = base_build(kind, dtype, device)
    options = adapters_of(kind)
    driven = Driven(base_build(kind, dtype, device))
    for seed, name in enumerate(options):
        driven.attach(name, adapter_from(peft_build(model, seed, **options[name])))
    names = [None, *options, None]
    jobs = [
        Job(prompt_of(length, length), 6, name)
        for length, name in zip((1, 130, 5, 64, 65, 63, 17, 150), names, strict=True)
    ]
    alone = [driven.answer(job)[1] for job in jobs]
    running = [driven.add(job) for job in jobs[:5]]
    for job in jobs[5:]:
        driven.requests.step()
        running.append(driven.add(job))
    driven.finish()
    driven.idle_check()
    pairs = [(a, driven.logits[g]) for a, g in zip(alone, running, strict=True)]
    # Where a bound takes the place of bits, tokens may part; what follows is another text then.
    together = [_while_equal(a, b) for a, b in pairs]
    return max(share(a, b) for a, b in together)


def _while_equal(ours: Any, theirs: Any) -> tuple[Any, Any]:
    count = 1
    for a, b in zip(ours, theirs, strict=True):
        if int(a.argmax()) != int(b.argmax()):
            break
        count += 1
    return ours[:count], theirs[:count]


def prefix_check(dtype: torch.dtype, device: str) -> float:
    """A warm prefix against a cold one: the largest share of a logit."""
    driven = Driven(base_build("llama", dtype, device))
    prompt = prompt_of(150)
    _, cold = driven.answer(Job(prompt, 5))
    driven.answer(Job(prompt, 1, root_key=b"root"))
    warm = driven.add(Job(prompt, 5, root_key=b"root"))
    driven.finish()
    driven.idle_check()
    assert warm.reused_tokens == 128
    return share(*_while_equal(driven.logits[warm], cold))


def poison_check(device: str) -> float:
    """NaN beside a request, and in its lane before it: the largest share of a logit."""
    workspace = Workspace(lanes=2, lane_tokens=256, adapters=2, rank=16, step_tokens=256)
    driven = Driven(base_build("llama", device=device), workspace)
    driven.attach("nan", poisoned(adapter_from(peft_build(base_build("llama"), 1))))
    job = Job(prompt_of(80), 8)
    _, clean = driven.answer(job)
    found = []
    for _ in range(3):
        running, bad = driven.add(job), driven.add(Job(prompt_of(90), 8, "nan"))
        driven.finish()
        driven.idle_check()
        try:
            list(bad.tokens())
        except EngineError:
            found.append(share(*_while_equal(driven.logits[running], clean)))
    assert len(found) == 3, "the poisoned requests ended well"
    return max(found)


def unload_check(device: str, allocated: Callable[[], int]) -> None:
    """300 loads and unloads: rows are zero, the base and the bytes in use are as before."""
    model = base_build("llama", device=device)
    named = parameters_named(model)
    digest = parameters_digest(named)
    engine = Engine(model, stop_tokens=frozenset(), workspace=SMALL)
    engine.start()
    try:
        pefts = [peft_build(base_build("llama"), seed, use_dora=True) for seed in range(2)]
        adapters = [adapter_from(peft) for peft in pefts]
        before = 0
        for number in range(300):
            name = f"a{number}"
            engine.attach(name, adapters[number % 2])
            if number % 50 == 0:
                list(engine.submit(Job(prompt_of(70), 2, name, root_key=b"root")).tokens())
            engine.detach(name)
            # The first ones leave what libraries keep for themselves.
            before = allocated() if number == 20 else before
        assert allocated() <= before * 1.02
        assert engine.references == 0
        assert engine.memory().blocks == 0
        stacks = engine._runner.bank.stacks.values()
        assert not any(bool(s.a.any()) or bool(s.b.any()) or bool((s.m != 1).any()) for s in stacks)
        assert parameters_digest(named) == digest
    finally:
        engine.stop()
