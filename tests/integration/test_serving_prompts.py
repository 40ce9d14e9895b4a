"""From text to tokens and back: who waits for whom, and what is too long to be looked at."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving.base_load import Text
from gpu_worker.serving.openai_bodies import Body, PromptTooLongError, completion_parse
from gpu_worker.serving.prompts import Prompts

pytestmark = pytest.mark.torch

TENANT = UUID(int=1042)


class Words:
    """A tokenizer of words; encoding waits at a gate, like that of a very long prompt."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.encoding = threading.Event()
        self.encoded = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Words:
        return Words(self.gate)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.encoding.set()
        self.encoded += 1
        assert self.gate.wait(60)
        return {"input_ids": [0 for _ in text.split()]}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return " ".join("word" for _ in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {"word": 0, "w": 1}


def test_decoding_does_not_wait_for_a_prompt_that_is_encoded() -> None:
    gate = threading.Event()
    tokenizer = Words(gate)
    text = Text(tokenizer)
    with ThreadPoolExecutor(2) as pool:
        prompt = pool.submit(text.encode, "a very long prompt")
        try:
            assert tokenizer.encoding.wait(60)
            answers = pool.submit(lambda: (text.decode([0]), text.token_text(0)))
            assert answers.result(30) == ("word", "word")
            assert not prompt.done()
        finally:
            gate.set()
        assert prompt.result(60) == (0, 0, 0, 0)


def body(prompt: str, **fields: Any) -> Body:
    return completion_parse(json.dumps({"prompt": prompt, **fields}).encode())


def test_what_cannot_fit_whatever_its_tokens_are_is_not_encoded() -> None:
    gate = threading.Event()
    gate.set()
    tokenizer: Any = Words(gate)
    templates: Any = None
    prompts = Prompts(Text(tokenizer), templates, "", lane_tokens=64)
    # 60 tokens beside 4 new ones, of at most 4 characters and what parts them.
    tokens, new = prompts.tokens(body("word " * 60, max_tokens=4), None, TENANT)
    assert (len(tokens), new) == (60, 4)
    assert tokenizer.encoded == 1
    for asked, reason in (
        (body("word " * 60 + "w", max_tokens=4), "at most 300 characters, got 301"),
        (body("word " * 60, max_tokens=5), "at most 295 characters, got 300"),
        (body("w", max_tokens=64), "at most 0 characters, got 1"),
    ):
        with pytest.raises(PromptTooLongError, match=reason):
            prompts.tokens(asked, None, TENANT)
    assert tokenizer.encoded == 1
    with pytest.raises(PromptTooLongError, match="at most 60 tokens beside 4 new ones, got 61"):
        prompts.tokens(body("w " * 61, max_tokens=4), None, TENANT)
