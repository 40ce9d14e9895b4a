"""What a request may say: OpenAI's fields, and nothing beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.openai_bodies import BodyError, chat_parse, completion_parse

SAID = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Any:
    return completion_parse(json.dumps({"prompt": "hello", **fields}).encode())


def chat(**fields: Any) -> Any:
    return chat_parse(json.dumps({"messages": SAID, **fields}).encode())


def test_defaults_are_openais() -> None:
    body = completion()
    assert (body.n, body.temperature, body.top_p, body.seed) == (1, 1.0, 1.0, None)
    assert (body.new_tokens, body.stops, body.stream, body.alternatives) == (16, (), False, None)
    assert chat().new_tokens is None


def test_stop_is_one_text_or_several() -> None:
    assert completion(stop="a").stops == ("a",)
    assert completion(stop=["a", "b"]).stops == ("a", "b")


def test_a_chats_limit_has_two_names() -> None:
    assert chat(max_tokens=5).new_tokens == 5
    assert chat(max_completion_tokens=6).new_tokens == 6
    with pytest.raises(BodyError, match="got both"):
        chat(max_tokens=5, max_completion_tokens=5)


def test_each_form_of_probabilities() -> None:
    assert completion(logprobs=0).alternatives == 0
    assert completion(logprobs=5).alternatives == 5
    assert chat(logprobs=True).alternatives == 0
    assert chat(logprobs=True, top_logprobs=20).alternatives == 20
    with pytest.raises(BodyError, match="only with logprobs"):
        chat(top_logprobs=2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"adapter": "x"}, "adapter"),
        ({"lora_path": "../x"}, "lora_path"),
        ({"echo": False}, "echo"),
        ({"user": "u"}, "user"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": []}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4097}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": "x" * 257}, "model"),
        ({"logprobs": 6}, "logprobs"),
        ({"prompt": ["hello"]}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_anything_else_is_refused_by_its_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(BodyError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "tool", "content": "x"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/passwd"}]}],
        [{"role": "user", "content": "x", "tool_calls": []}],
        [{"role": "user"}],
        [{"role": "user", "content": "x"}] * 257,
        "hello",
    ],
)
def test_messages_are_text_of_three_roles(messages: Any) -> None:
    with pytest.raises(BodyError) as caught:
        chat(messages=messages)
    assert caught.value.param == "messages"


def test_a_fields_name_is_escaped_and_cut() -> None:
    with pytest.raises(BodyError) as caught:
        completion(**{"\u202e" + "x" * 1000: 1})
    assert caught.value.param is not None
    assert "\u202e" not in caught.value.param
    assert len(caught.value.message) < 400


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_parse_or_refuse(content: bytes) -> None:
    for parse in (completion_parse, chat_parse):
        try:
            parse(content)
        except BodyError:
            continue
