"""The process that renders chats is shared: what one tenant leaves in it is no other's fault."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from uuid import UUID

import jinja2
import pytest

from gpu_worker.serving import template_process
from gpu_worker.serving.chat_template import ChatTemplates
from gpu_worker.serving.openai_bodies import Message
from gpu_worker.serving.template_process import MEMORY_EXIT, Compiled, environment_make
from registry_service.domain import limits

pytestmark = pytest.mark.torch

CROWD, TENANT = UUID(int=2001), UUID(int=1042)
HARMLESS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
SHORT = [Message(role="user", content="hello")]
LARGE_CHARS = limits.TEMPLATE_BYTES - 100


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda mib: monkeypatch.setattr(limits, "TEMPLATE_MEMORY_BYTES", mib * limits.MIB)


def make() -> closing[ChatTemplates]:
    return closing(ChatTemplates({}, now=lambda: datetime.now(UTC)))


def large(number: int, chars: int = LARGE_CHARS) -> str:
    """A template that says little and is large when it is compiled."""
    return f"{{# {number} #}}{{% if false %}}{'x' * chars}\U0001f600{{% endif %}}x"


def test_large_templates_of_one_tenant_do_not_fill_the_process(
    bound: Callable[[int], None],
) -> None:
    # Half of what all of them take when they are compiled, and twice what some of them do.
    bound(160)
    with make() as templates:
        templates.render(HARMLESS, SHORT, TENANT)
        process = templates._process
        for number in range(40):
            assert templates.render(large(number), SHORT, CROWD) == "x"
        assert templates._process is process


def test_a_process_without_memory_says_so_also_before_it_renders() -> None:
    size = 64 * limits.MIB
    ended = subprocess.run(
        [sys.executable, "-I", template_process.__file__, str(size), "1", "100"],
        input=struct.pack(">I", size) + b"x",
        capture_output=True,
        check=False,
    )
    assert ended.returncode == MEMORY_EXIT


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Compiled, list[str]]]:
    """Compiled templates, three of them or ten characters, and each text that was compiled."""
    monkeypatch.setattr(template_process, "_COMPILED", 3)
    monkeypatch.setattr(template_process, "_COMPILED_CHARS", 10)
    asked: list[str] = []
    environment = environment_make()

    def compile_template(text: str) -> jinja2.Template:
        asked.append(text)
        return environment.from_string(text)

    yield Compiled(compile_template), asked


@pytest.mark.parametrize(
    ("texts", "compiled"),
    [
        (["a", "b", "c", "a", "b"], ["a", "b", "c"]),
        # The one that was used last longest ago goes.
        (["a", "b", "c", "a", "d", "a", "b"], ["a", "b", "c", "d", "b"]),
        (["aaaa", "bbbb", "cccc", "bbbb", "aaaa"], ["aaaa", "bbbb", "cccc", "aaaa"]),
        # One that is larger than all may be has the room for itself.
        (["a", "b" * 12, "b" * 12, "a"], ["a", "b" * 12, "a"]),
        # One that is none takes no place.
        (["a", "{%", "b", "c", "{%", "a"], ["a", "{%", "b", "c", "{%", "a"]),
    ],
)
def test_compiled_templates_are_bounded_in_number_and_characters(
    compiling: tuple[Compiled, list[str]], texts: list[str], compiled: list[str]
) -> None:
    kept, asked = compiling
    for text in texts:
        if text == "{%":
            with pytest.raises(jinja2.TemplateError):
                kept.template(text)
        else:
            assert kept.template(text).render() == text
    assert asked == compiled
