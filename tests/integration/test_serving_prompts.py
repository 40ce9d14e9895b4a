"""From text to tokens and back: who waits for whom, and what is too long to be looked at."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving.base_load import Text
from gpu_worker.serving.openai_bodies import (
    Body,
    PromptTooLongError,
    chat_parse,
    completion_parse,
)
from gpu_worker.serving.prompts import Prompts
from tests.waiting import until

pytestmark = pytest.mark.torch

TENANT, OTHER = UUID(int=1042), UUID(int=2001)


class Words:
    """A tokenizer of words; encoding waits at a gate, like that of a very long prompt."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.encoding = threading.Event()
        self.texts: list[str] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Words:
        return Words(self.gate)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.encoding.set()
        self.texts.append(text)
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


class Content:
    """Chats as they are, without a template."""

    def render(self, _template: str, messages: Any, _tenant_id: UUID) -> str:
        return str(messages[0].content)


def prompts_of(tokenizer: Any) -> Prompts:
    templates: Any = Content()
    return Prompts(Text(tokenizer), templates, "", lane_tokens=64)


def chat(prompt: str) -> Body:
    return chat_parse(json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode())


class Callers:
    """Callers who ask for tokens one after the other; the first is encoded until the end."""

    def __init__(self, prompts: Prompts, pool: ThreadPoolExecutor) -> None:
        self._prompts, self._pool = prompts, pool
        self.asked: list[Future[Any]] = []

    def ask(self, asked: Body, tenant_id: UUID) -> None:
        """Ask as a caller, who is waiting when this returns."""
        self.asked.append(self._pool.submit(self._prompts.tokens, asked, None, tenant_id))
        waiting = self._prompts._turns._waiting
        until(lambda: len(waiting) == len(self.asked) - 1)


@contextmanager
def callers_of(prompts: Prompts, tokenizer: Words) -> Iterator[Callers]:
    """Callers; at the end all are answered."""
    with ThreadPoolExecutor(8) as pool:
        callers = Callers(prompts, pool)
        try:
            callers.ask(body("first"), TENANT)
            assert tokenizer.encoding.wait(60)
            yield callers
        finally:
            tokenizer.gate.set()
        for each in callers.asked:
            assert each.result(60)


def test_another_tenants_prompt_is_next_however_many_of_one_wait() -> None:
    tokenizer = Words(threading.Event())
    with callers_of(prompts_of(tokenizer), tokenizer) as callers:
        for number in range(2):
            callers.ask(body(f"prompt {number}"), TENANT)
            callers.ask(chat(f"chat {number}"), TENANT)
        callers.ask(body("other"), OTHER)
    assert tokenizer.texts == ["first", "other", "prompt 0", "chat 0", "prompt 1", "chat 1"]


def test_what_cannot_fit_whatever_its_tokens_are_is_not_encoded() -> None:
    gate = threading.Event()
    gate.set()
    tokenizer = Words(gate)
    prompts = prompts_of(tokenizer)
    # 60 tokens beside 4 new ones, of at most 4 characters and what parts them.
    tokens, new = prompts.tokens(body("word " * 60, max_tokens=4), None, TENANT)
    assert (len(tokens), new) == (60, 4)
    assert len(tokenizer.texts) == 1
    for asked, reason in (
        (body("word " * 60 + "w", max_tokens=4), "at most 300 characters, got 301"),
        (body("word " * 60, max_tokens=5), "at most 295 characters, got 300"),
        (body("w", max_tokens=64), "at most 0 characters, got 1"),
    ):
        with pytest.raises(PromptTooLongError, match=reason):
            prompts.tokens(asked, None, TENANT)
    assert len(tokenizer.texts) == 1
    with pytest.raises(PromptTooLongError, match="at most 60 tokens beside 4 new ones, got 61"):
        prompts.tokens(body("w " * 61, max_tokens=4), None, TENANT)
