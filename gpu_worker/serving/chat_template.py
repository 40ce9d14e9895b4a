"""From a chat's messages to the text of its prompt, by the chat template that was admitted.

The base's template is proven by its digest, an adapter's was approved with it. Either is a program,
and runs in a process of its own with bounds (``template_process``): one that loops for ever, or
writes without end, costs its own request and never the node. Tenants share the process: one that
ends in it is run again in a new one. A template that went beyond its bounds in a process that had
rendered nothing else is not run again for that tenant; it may have been what the tenant's messages
made of it, and others go on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from gpu_worker.serving.openai_bodies import BodyError, Message
from gpu_worker.serving.places import Places, TurnLock
from gpu_worker.serving.template_process import MEMORY_EXIT
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_of
from registry_service.domain.errors import UnavailableError
from registry_service.domain.text import shown

_PROGRAM: Final = Path(__file__).with_name("template_process.py")
_REFUSED: Final = 1024
# How the process ends that went beyond its bounds: by the kernel, or for want of memory.
_BEYOND: Final = (-signal.SIGXCPU, MEMORY_EXIT)
# Bytes of JSON for each character of a text, escapes and all, and the frame around it.
_ANSWER_BYTES: Final = 12 * limits.TEMPLATE_CHARS + limits.KIB


class ChatTemplates:
    """Renders chats, one at a time; tenants take turns. Thread-safe."""

    def __init__(self, special_tokens: Mapping[str, str], *, now: Callable[[], datetime]) -> None:
        """``special_tokens`` are the tokenizer's by name (``bos_token`` …), as templates use."""
        self._special_tokens = dict(special_tokens)
        self._now = now
        self._places = Places(
            "chats to be rendered", tenant_most=limits.TENANT_RENDERINGS, most=limits.RENDERINGS
        )
        self._turns = TurnLock()
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._refused: dict[tuple[Digest, UUID], None] = {}

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def render(self, template: str, messages: Sequence[Message], tenant_id: UUID) -> str:
        """The prompt of a tenant's chat, up to where the assistant speaks next.

        Raises:
            BodyError: there is no template, it refuses these messages, or goes beyond its bounds.
            UnavailableError: too many wait, it was not rendered in time, or the process died
                otherwise; of these TooManyRequestsError: too many of this tenant's wait.
        """
        if not template:
            raise BodyError(
                "messages: expected a model with a chat template, got one without; "
                "use /v1/completions",
                "messages",
            )
        run = (digest_of(template.encode()), tenant_id)
        frame = {
            "template": template,
            "now": self._now().isoformat(),
            "variables": {
                **self._special_tokens,
                "messages": [message.model_dump() for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            },
        }
        content = json.dumps(frame).encode()
        with self._places.held(tenant_id), self._turns.held(tenant_id), self._lock:
            return self._render(run, content)

    def _render(self, run: tuple[Digest, UUID], frame: bytes) -> str:
        if run in self._refused:
            raise _beyond()
        fresh = self._process is None
        try:
            if self._process is None:
                self._process = _Process()
            answer = self._process.ask(frame)
        except OSError as error:
            if self._end() not in _BEYOND:
                raise UnavailableError("the chat template was not rendered") from error
            if not fresh:
                # Others' templates and chats may have left it too little memory.
                return self._render(run, frame)
            self._refused[run] = None
            if len(self._refused) > _REFUSED:
                del self._refused[next(iter(self._refused))]
            raise _beyond() from error
        if "error" in answer:
            raise BodyError(
                f"messages: the chat template refuses them: {shown(answer['error'])}", "messages"
            )
        return answer["text"]

    def _end(self) -> int:
        """End the process; how it ended by itself before, or SIGKILL, negative."""
        process, self._process = self._process, None
        return 0 if process is None else process.end()


class _Process:
    """The process that renders."""

    def __init__(self) -> None:
        bounds = (
            limits.TEMPLATE_MEMORY_BYTES,
            limits.TEMPLATE_CPU_SECONDS,
            limits.TEMPLATE_CHARS,
        )
        self._process = subprocess.Popen(
            # Isolated: neither the environment nor the folder says what it imports.
            [sys.executable, "-I", str(_PROGRAM), *map(str, bounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: S101 - asked for
        self._ended = False
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)

    def ask(self, frame: bytes) -> dict[str, str]:
        """Its answer to a frame.

        Raises:
            OSError: it ended, or gave no answer in time (TimeoutError).
        """
        until = time.monotonic() + limits.TEMPLATE_WAIT_SECONDS
        self._write(struct.pack(">I", len(frame)) + frame, until)
        size = struct.unpack(">I", self._read(4, until))[0]
        if size > _ANSWER_BYTES:
            raise OSError(f"expected an answer of at most {_ANSWER_BYTES} bytes, got {size}")
        answer: Any = json.loads(self._read(size, until))
        return {str(key): str(value) for key, value in answer.items()}

    def end(self) -> int:
        """End it, whatever it does; its exit status, negative for a signal."""
        if self._ended:
            status = self._process.wait()
        else:
            self._process.kill()
            status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status

    def _write(self, content: bytes, until: float) -> None:
        view = memoryview(content)
        while view:
            self._wait(self._stdin, select.POLLOUT, until)
            try:
                view = view[os.write(self._stdin, view) :]
            except BrokenPipeError:
                self._ended = True
                raise

    def _read(self, size: int, until: float) -> bytes:
        content = b""
        while len(content) < size:
            self._wait(self._stdout, select.POLLIN, until)
            part = os.read(self._stdout, size - len(content))
            if not part:
                self._ended = True
                raise OSError("the process ended")
            content += part
        return content

    def _wait(self, pipe: int, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(pipe, event)
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError


def _beyond() -> BodyError:
    return BodyError(
        "messages: the chat template goes beyond its bounds of time, memory or length; "
        "it is not run again on this node for this tenant",
        "messages",
    )
