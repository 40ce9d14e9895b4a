"""A node over HTTP, asked by OpenAI's own client: answers, streams, limits, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving.running import OpenRequests
from registry_service.domain.digests import Digest, digest_of
from tests.integration import serving_world as sw
from tests.integration.http_world import (
    HttpWorld,
    base_with_template,
    events_of,
    listening,
    own_template,
    tenant,
)
from tests.waiting import until

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

LONG = " ".join(f"w{n % 90}" for n in range(200))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ProvenBase:
    return base_with_template(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def world(base: ProvenBase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpWorld]:
    root = tmp_path_factory.mktemp("node")
    registry = sw.FakeRegistry(root / "registry", base)
    for seed in range(3):
        folder = tmp_path_factory.mktemp("adapter")
        sw.peft_make(base.dir, folder, seed, lora_alpha=64)
        files = sw.adapter_files(base, folder)
        registry.publish(own_template(files) if seed == 2 else files)
    with listening(registry, base, root) as world:
        yield world


def digests(world: HttpWorld) -> list[Digest]:
    return list(world.registry.artifacts)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].text)


def test_a_completion(world: HttpWorld) -> None:
    digest = digests(world)[0]
    answer = world.complete(digest)
    choice = answer.choices[0]
    assert (answer.object, answer.model, answer.system_fingerprint) == (
        "text_completion",
        "tiny",
        digest,
    )
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert len(choice.text.split()) == 8
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)
    assert answer.usage.total_tokens == 11
    assert text_of(world.complete(None)) != choice.text


def test_a_stream_says_the_same_and_ends(world: HttpWorld) -> None:
    digest = digests(world)[0]
    whole = world.complete(digest)
    chunks = list(world.complete(digest, stream=True, stream_options={"include_usage": True}))
    usage = chunks.pop()
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(whole)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 8 + ["length"]
    assert {chunk.id for chunk in chunks} == {usage.id}
    assert usage.choices == []
    assert usage.usage.completion_tokens == 8


def test_a_stream_ends_with_done(world: HttpWorld) -> None:
    body = json.dumps({"prompt": "w1", "max_tokens": 2, "stream": True}).encode()
    headers = {"Routing-Context": world.registry.context(body, None)}
    answer = httpx.post(f"{world.url}/v1/completions", content=body, headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(answer.headers["x-request-id"]) == 32
    assert events_of(answer)[-1] == "[DONE]"


def test_a_chat_is_the_completion_of_its_rendering(world: HttpWorld) -> None:
    chat = world.chat(said="w1 w2")
    choice = chat.choices[0]
    assert (chat.object, chat.model, chat.system_fingerprint) == ("chat.completion", "tiny", "base")
    assert choice.message.role == "assistant"
    assert choice.message.content == text_of(world.complete(prompt="w90 w1 w2 w92"))
    assert chat.usage.prompt_tokens == 4
    streamed = list(world.chat(said="w1 w2", stream=True))
    assert streamed[0].choices[0].delta.role == "assistant"
    said = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(said) == choice.message.content


def test_an_adapters_own_template_is_the_one_that_counts(world: HttpWorld) -> None:
    plain, own = digests(world)[1:]
    with_own = world.chat(own, said="w1 w2").choices[0].message.content
    assert with_own == text_of(world.complete(own, prompt="w80 w1 w2 w81"))
    with_base = world.chat(plain, said="w1 w2").choices[0].message.content
    assert with_base == text_of(world.complete(plain, prompt="w90 w1 w2 w92"))


def test_a_chat_without_a_limit_may_fill_what_is_left(world: HttpWorld) -> None:
    asked = {"max_tokens": openai.omit}
    answer = world.chat(said=" ".join(["w1"] * 980), **asked)
    assert answer.usage.prompt_tokens == 982
    assert answer.usage.total_tokens == world.node.engine.workspace.lane_tokens


def test_a_stop_text_ends_an_answer_and_is_not_told(world: HttpWorld) -> None:
    words = text_of(world.complete(max_tokens=12)).split()
    at = next(n for n in range(3, 12) if words[n] not in words[:n])
    whole = " ".join(words)
    cut = whole[: whole.index(f" {words[at]}")]
    for stop in (f" {words[at]}", ["never", f" {words[at]}"]):
        answer = world.complete(max_tokens=12, stop=stop)
        assert (text_of(answer), answer.choices[0].finish_reason) == (cut, "stop")
        streamed = list(world.complete(max_tokens=12, stop=stop, stream=True))
        assert "".join(text_of(chunk) for chunk in streamed) == cut
        assert streamed[-1].choices[0].finish_reason == "stop"


def test_probabilities_in_both_forms(world: HttpWorld) -> None:
    answer = world.complete(logprobs=2)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 8
    # The likeliest token was taken.
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2
    text = text_of(answer)
    assert [text[at:].split()[0] for at in told.text_offset] == told.tokens
    chat = world.chat(said="w1", logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert len(content) == 8
    assert all(len(each.top_logprobs) == 3 for each in content)
    assert bytes(content[0].bytes).decode() == content[0].token


def test_a_seed_repeats_an_answer_and_each_choice_has_its_own(world: HttpWorld) -> None:
    first = world.complete(temperature=1, seed=7, n=3, max_tokens=16)
    again = world.complete(temperature=1, seed=7, n=3, max_tokens=16)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 48)
    streamed: dict[int, str] = {}
    for chunk in world.complete(temperature=1, seed=7, n=3, max_tokens=16, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[index] for index in range(3)] == texts


def test_what_is_known_of_a_prompt_is_told_as_cached(world: HttpWorld) -> None:
    cold = world.complete(prompt=LONG)
    warm = world.complete(prompt=LONG)
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens > 0
    assert text_of(warm) == text_of(cold)


@pytest.mark.usefixtures("lasting")
def test_who_leaves_a_stream_leaves_nothing_behind(world: HttpWorld) -> None:
    stream = world.complete(digests(world)[0], max_tokens=900, stream=True)
    next(iter(stream))
    stream.response.close()
    until(world.idle)


@pytest.mark.usefixtures("lasting")
def test_who_leaves_before_the_answer_leaves_nothing_behind(world: HttpWorld) -> None:
    with world.caller(digests(world)[0], max_tokens=1000):
        until(lambda: not world.idle())
    until(world.idle)


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"extra_body": {"adapter": "../x"}}, "malformed", "adapter"),
        ({"extra_body": {"lora_path": "/tmp/x"}}, "malformed", "lora_path"),
        ({"n": 9}, "malformed", "n"),
        ({"prompt": " ".join(["w1"] * 1020)}, "context_length_exceeded", "prompt"),
        ({"prompt": " " * 200_000}, "context_length_exceeded", "prompt"),
        ({"prompt": " "}, "malformed", "prompt"),
    ],
)
def test_a_body_that_cannot_be_is_400(
    world: HttpWorld, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        world.complete(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.type == "invalid_request_error"


def test_more_choices_than_an_adapter_ever_runs_are_400_and_none_on_the_base(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = world.node.residents._loading
    monkeypatch.setattr(loading, "limits", replace(loading.limits, sequences=2))
    with pytest.raises(openai.BadRequestError, match="expected at most 2 on an adapter") as caught:
        world.complete(next(iter(world.registry.artifacts)), n=3)
    assert caught.value.param == "n"
    assert len(world.complete(n=3).choices) == 3


def test_whoever_may_not_is_403_and_learns_nothing(world: HttpWorld) -> None:
    known = digests(world)[0]
    refused = []
    for digest, changes in (
        (digest_of(b"unknown"), {"chat_template_digest": world.registry.base.chat_template_digest}),
        (known, tenant(2001)),
        (known, {"adapter": "another"}),
        (known, {"chat_template_digest": digest_of(b"x")}),
        (known, {"node": "node-2"}),
    ):
        with pytest.raises(openai.PermissionDeniedError) as caught:
            world.client(digest, **changes).completions.create(model="any", prompt="w1")
        refused.append(caught.value.response)
    assert len({answer.content for answer in refused}) == 1
    assert len({frozenset(answer.headers) for answer in refused}) == 1


@pytest.mark.usefixtures("lasting")
def test_a_tenant_with_its_share_is_429_and_others_are_served(
    world: HttpWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.node.completions, "requests", OpenRequests(tenant_most=2))
    running = world.complete(max_tokens=900, n=2, stream=True)
    next(iter(running))
    with pytest.raises(openai.RateLimitError) as caught:
        world.complete()
    assert caught.value.code == "too_many_requests"
    assert int(caught.value.response.headers["retry-after"]) > 0
    other = world.client(**tenant(2001))
    other.completions.create(model="any", prompt="w1", max_tokens=1)
    running.response.close()
    until(world.idle)


def test_a_header_that_may_choose_an_adapter_is_400_and_others_are_not_read(
    world: HttpWorld,
) -> None:
    for name in ("X-Adapter-Id", "LoRA", "x-lora-adapters", "Adapter.Name"):
        answer = world.send(header=name)
        assert answer.status_code == 400
        assert "expected no header" in answer.json()["error"]["message"]
    for name in ("X-Exploration", "X-Colorado-Id", "X-Adaptive"):
        assert world.send(header=name).status_code == 200


def test_other_paths_and_methods_are_refused_in_the_same_form(world: HttpWorld) -> None:
    for answer, status, code in (
        (world.get("/v1/models/../../etc"), 404, "not_found"),
        (world.get("/v1/completions"), 405, "malformed"),
    ):
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code


@pytest.mark.usefixtures("lasting")
def test_revoked_in_the_middle_every_choice_ends_and_the_adapter_goes(world: HttpWorld) -> None:
    digest = digests(world)[1]
    stream = world.complete(digest, max_tokens=900, n=3, temperature=1, stream=True)
    chunks = iter(stream)
    next(chunks)
    world.registry.revoke(digest, deadline=0)
    with pytest.raises(openai.APIError) as caught:
        list(chunks)
    assert caught.value.code == "cancelled"
    until(lambda: any(gone == digest for _, gone, _ in world.registry.acknowledged))
    assert world.idle()
    assert digest not in {item.key.digest for item in world.node.residents.residents()}
