"""Renders chat templates, as a process of its own that is started by its path.

A template is a program. Jinja's sandbox keeps it from reaching anything; what it may use up is
bounded here by the kernel: processor time for each rendering, and memory. Whatever goes beyond them
ends this process, and the node starts another.

Frames of four bytes (length, big-endian) and JSON come on stdin and are answered on stdout.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

MEMORY_EXIT: Final = 3
"""Its exit status for want of memory."""

# What is compiled takes some ten bytes for each character of its template.
_COMPILED: Final = 64
_COMPILED_CHARS: Final = 4 * 2**20
_ERROR_CHARS: Final = 512


def environment_make() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that templates are written for: that of ``apply_chat_template``."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own type is mutable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: jinja2.Template, variables: dict[str, Any], most_chars: int) -> str:
    """A template's text.

    Raises:
        jinja2.TemplateError: the template refuses, is wrong, or writes more than it may.
    """
    parts, length = [], 0
    for part in template.generate(variables):
        length += len(part)
        if length > most_chars:
            raise jinja2.TemplateError(f"expected at most {most_chars} characters")
        parts.append(part)
    return "".join(parts)


class Compiled:
    """Compiled templates: those that were used last, bounded in number and in characters."""

    def __init__(self, compile_template: Callable[[str], jinja2.Template]) -> None:
        self._compile = compile_template
        self._kept: dict[str, jinja2.Template] = {}

    def template(self, text: str) -> jinja2.Template:
        """The template of a text.

        Raises:
            jinja2.TemplateError: it is none.
        """
        found = self._kept.pop(text, None)
        if found is None:
            self._room_make(len(text))
            found = self._compile(text)
        self._kept[text] = found
        return found

    def _room_make(self, chars: int) -> None:
        full = False
        while self._kept and (
            len(self._kept) >= _COMPILED or chars + sum(map(len, self._kept)) > _COMPILED_CHARS
        ):
            del self._kept[next(iter(self._kept))]
            full = True
        if full:
            # A template's parts know each other, and would stay until Python looks for such.
            gc.collect()


def main() -> None:
    """Answer until stdin ends."""
    most_bytes, cpu_seconds, most_chars = (int(text) for text in sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled = Compiled(environment_make().from_string)
    try:
        while (frame := _read(sys.stdin.buffer)) is not None:
            _cpu_limit(cpu_seconds)
            _write(sys.stdout.buffer, _answer(frame, compiled, most_chars))
    except MemoryError:
        # Nothing here is sure any more: the node starts another process.
        os._exit(MEMORY_EXIT)


def _answer(frame: dict[str, Any], compiled: Compiled, most_chars: int) -> dict[str, str]:
    now = datetime.fromisoformat(frame["now"])
    # The clock is handed in: a rendering depends on nothing else.
    clock = {"strftime_now": now.strftime}
    try:
        template = compiled.template(frame["template"])
        return {"text": render(template, frame["variables"] | clock, most_chars)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a template may raise whatever Python can
        return {"error": (str(error) or type(error).__name__)[:_ERROR_CHARS]}


def _cpu_limit(seconds: int) -> None:
    """This much processor time from now on; then the kernel ends the process."""
    soft = math.ceil(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    found: dict[str, Any] = json.loads(stream.read(struct.unpack(">I", head)[0]))
    return found


def _write(stream: BinaryIO, document: dict[str, str]) -> None:
    content = json.dumps(document).encode()
    stream.write(struct.pack(">I", len(content)) + content)
    stream.flush()


if __name__ == "__main__":
    main()
