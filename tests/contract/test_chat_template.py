"""Chats are rendered as transformers does it; a bad template costs its own request alone."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from gpu_worker.serving import chat_template as module
from gpu_worker.serving.chat_template import ChatTemplates
from gpu_worker.serving.openai_bodies import BodyError, Message
from gpu_worker.serving.places import Places
from registry_service.domain.errors import TooManyRequestsError, UnavailableError

pytestmark = pytest.mark.torch

TENANT = UUID(int=1042)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DATED = (
    "{{ bos_token }}{%- if strftime_now is defined %}\n"
    "    {%- set date = strftime_now('%d %b %Y') %}\n{%- endif %}\n"
    "Today: {{ date }}\n"
    "{%- for message in messages %}\n  {{ message.role }}: {{ message.content | trim }}\n"
    "{%- endfor %}"
)
STRICT = (
    "{%- for message in messages %}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: ' + message['role']) }}{%- endif %}"
    "[{{ message['content'] }}]{%- endfor %}"
)
RICH = (
    "{%- set found = namespace(count=0) -%}\n"
    "{%- for message in messages -%}\n"
    "  {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}\n"
    "  {%- set found.count = found.count + 1 -%}\n"
    "  {%- generation -%}{{ message | tojson }}{%- endgeneration -%}\n"
    "  {%- if found.count >= 3 -%}{%- break -%}{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{{ found.count }} {{ tools is none }} {{ documents is none }}\n"
    "{{ messages[-1]['content'][:2] }}"
)
CHATS = [
    [("user", "hello")],
    [("user", "größer <b>&amp;</b> 你好\n  x "), ("assistant", "yes"), ("user", "{{ 7*7 }}")],
]
DOUBLES = (
    "{% set s = namespace(t='x') %}{% for i in range(99) %}{% set s.t = s.t + s.t %}{% endfor %}"
)
RECURSES = (
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}"
)
SQUARES = (
    "{% for a in messages[0].content %}{% for b in messages[0].content %}{% endfor %}{% endfor %}"
    "{{ messages[0].content }}"
)
FOR_EVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def now() -> datetime:
    """As transformers reads the clock: where this machine is."""
    return datetime.now().astimezone()


def messages(chat: list[tuple[Any, str]]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in chat]


@pytest.fixture(scope="module")
def templates() -> Iterator[ChatTemplates]:
    made = ChatTemplates({"bos_token": "<s>"}, now=now)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "?": 1}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.mark.parametrize("template", [CHATML, DATED, STRICT, RICH])
@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_is_what_apply_chat_template_makes(
    templates: ChatTemplates, oracle: Any, template: str, chat: list[tuple[str, str]]
) -> None:
    said = messages(chat)
    expected = oracle.apply_chat_template(
        [message.model_dump() for message in said],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert templates.render(template, said, TENANT) == expected


def test_what_a_template_refuses_is_told_escaped(templates: ChatTemplates) -> None:
    with pytest.raises(BodyError, match="roles must alternate: assistant") as caught:
        templates.render(STRICT, messages([("assistant", "x")]), TENANT)
    assert caught.value.param == "messages"
    with pytest.raises(BodyError) as caught:
        templates.render("{{ raise_exception('\u202e' ~ 'x' * 9999) }}", messages(CHATS[0]), TENANT)
    assert "\u202e" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ strftime_now.__self__.now() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% set _ = messages.append({'role': 'system', 'content': 'x'}) %}",
        "{% include '/etc/passwd' %}",
        "{% for",
        "{{ nothing.there }}",
    ],
)
def test_a_template_reaches_nothing_and_changes_nothing(
    templates: ChatTemplates, template: str
) -> None:
    with pytest.raises(BodyError, match="refuses"):
        templates.render(template, messages(CHATS[0]), TENANT)


def test_a_model_without_a_template_says_so(templates: ChatTemplates) -> None:
    with pytest.raises(BodyError, match="/v1/completions"):
        templates.render("", messages(CHATS[0]), TENANT)


@pytest.mark.parametrize(
    "template",
    [
        FOR_EVER,
        DOUBLES,
        "{{ '%999999999999d' | format(1) }}",
        RECURSES,
    ],
    ids=["loops", "doubles", "pads", "recurses"],
)
def test_a_template_without_end_is_ended_and_not_run_again(template: str) -> None:
    templates = ChatTemplates({}, now=now)
    try:
        for _ in range(2):
            with pytest.raises(BodyError, match="beyond its bounds"):
                templates.render(template, messages(CHATS[0]), TENANT)
        assert templates.render(CHATML, messages(CHATS[0]), TENANT).startswith(
            "<|im_start|>user\nhello"
        )
    finally:
        templates.close()


def test_a_chat_that_a_template_cannot_bear_costs_other_tenants_nothing() -> None:
    templates = ChatTemplates({}, now=now)
    other = UUID(int=2001)
    try:
        assert templates.render(SQUARES, messages(CHATS[0]), TENANT) == "hello"
        with pytest.raises(BodyError, match="beyond its bounds"):
            templates.render(SQUARES, messages([("user", "x" * 100_000)]), TENANT)
        assert templates.render(SQUARES, messages(CHATS[0]), other) == "hello"
        with pytest.raises(BodyError, match="not run again on this node for this tenant"):
            templates.render(SQUARES, messages(CHATS[0]), TENANT)
    finally:
        templates.close()


def test_a_process_that_others_filled_is_no_fault_of_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    ask = module._Process.ask

    def filled(process: Any, frame: bytes) -> dict[str, str]:
        asked.append(process)
        if asked.count(process) > 1:
            # As the kernel ends it.
            process._process.send_signal(signal.SIGXCPU)
            process._process.wait()
        return ask(process, frame)

    monkeypatch.setattr(module._Process, "ask", filled)
    templates = ChatTemplates({}, now=now)
    try:
        for _ in range(3):
            assert "hello" in templates.render(CHATML, messages(CHATS[0]), TENANT)
        assert len(asked) == 5
        with pytest.raises(BodyError, match="beyond its bounds"):
            templates.render(RECURSES, messages(CHATS[0]), TENANT)
        assert len(asked) == 7
        with pytest.raises(BodyError, match="not run again"):
            templates.render(RECURSES, messages(CHATS[0]), TENANT)
        assert len(asked) == 7
    finally:
        templates.close()


def test_a_text_without_end_is_cut_off(templates: ChatTemplates) -> None:
    template = "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}"
    with pytest.raises(BodyError, match="characters"):
        templates.render(template, messages(CHATS[0]), TENANT)


def test_tenants_take_turns_and_none_has_too_many_waiting(
    templates: ChatTemplates, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, rendered = UUID(int=2001), []
    monkeypatch.setattr(templates, "_places", Places("chats", tenant_most=3, most=20))
    render = templates._render

    def seen(run: tuple[Any, UUID], frame: bytes) -> str:
        rendered.append(run[1])
        return render(run, frame)

    monkeypatch.setattr(templates, "_render", seen)

    def ask(tenant: UUID) -> None:
        templates.render(CHATML, messages(CHATS[0]), tenant)

    threads = []
    with templates._turns.held(other):
        for tenant in (TENANT, TENANT, TENANT, other):
            threads.append(threading.Thread(target=ask, args=(tenant,)))
            threads[-1].start()
            while len(templates._turns._waiting) < len(threads):
                time.sleep(0.01)
        with pytest.raises(TooManyRequestsError):
            templates.render(CHATML, messages(CHATS[0]), TENANT)
    for thread in threads:
        thread.join(60)
    assert rendered.index(other) < 2
    assert len(rendered) == 4


def test_a_process_that_died_is_no_fault_of_the_template(templates: ChatTemplates) -> None:
    templates.render(CHATML, messages(CHATS[0]), TENANT)
    process = templates._process
    assert process is not None
    process._process.send_signal(signal.SIGKILL)
    process._process.wait()
    with pytest.raises(UnavailableError):
        templates.render(CHATML, messages(CHATS[0]), TENANT)
    assert "hello" in templates.render(CHATML, messages(CHATS[0]), TENANT)


def test_a_process_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(module, "_PROGRAM", silent)
    monkeypatch.setattr(module.limits, "TEMPLATE_WAIT_SECONDS", 0.2)
    templates = ChatTemplates({}, now=now)
    started: list[subprocess.Popen[bytes]] = []
    make = module._Process
    monkeypatch.setattr(
        module, "_Process", lambda: started.append((made := make())._process) or made
    )
    with pytest.raises(UnavailableError):
        templates.render(CHATML, messages(CHATS[0]), TENANT)
    assert started[0].poll() is not None
