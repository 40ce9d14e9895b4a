"""Would an unpickler get anywhere with these bytes? Opcodes are followed, and never run.

A pickle has no magic number: protocols 0 and 1 are text, and a safetensors file can be one too.
The first bytes of its header's length may read as opcodes that take all of the header as text, so
that the code begins in tensor data. So the opcodes are walked as an unpickler walks them, with the
depth of its stack, on the table of the standard library's ``pickletools``.
"""

from __future__ import annotations

import pickletools
import re
from enum import Enum
from typing import Final


class Stream(Enum):
    """What an unpickler makes of a file.

    ``NONE`` it fails on an opcode; ``DATA`` a value that names no code and ends with the file;
    ``CODE`` it imports a name; ``OPEN`` it reads on past the bytes that were given.
    """

    NONE = "none"
    DATA = "data"
    CODE = "code"
    OPEN = "open"


_OPCODES: Final = {opcode.code: opcode for opcode in pickletools.opcodes}
_IMPORTS: Final = frozenset({"GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"})
# A plain unpickler fails on them: they need a loader that resolves persistent ids.
_PERSISTENT: Final = frozenset({"PERSID", "BINPERSID"})
_GET: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUT: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
# Sizes in front of the argument: their width in bytes (pickletools, "TAKEN_FROM_ARGUMENT").
_COUNTED: Final = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
# Module and name, as far as an import can find them.
_PAIR: Final = re.compile(rb"[\w.\x80-\xff-]+\n[\w.\x80-\xff]+\n")
_PAIR_BEGUN: Final = re.compile(rb"[\w.\x80-\xff-]*(?:\n[\w.\x80-\xff]*)?")
_ANY: Final = re.compile(rb".*", re.DOTALL)
_NUMBER: Final = re.compile(rb"\s*[+-]?(?:[\d.][\w.+-]*|inf|nan|infinity)?\s*", re.IGNORECASE)
_QUOTED: Final = re.compile(rb"\s*(?:'.*'|\".*\")\s*", re.DOTALL)
_QUOTE_BEGUN: Final = re.compile(rb"\s*(?:['\"].*)?", re.DOTALL)


class _EndError(Exception):
    """The walk is over; the stream says how."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream.value)
        self.stream = stream


class _Walk:
    """An unpickler's position and the depth of its stack, its marks, and whether it has a memo."""

    def __init__(self, head: bytes, size: int) -> None:
        self.head = head
        self.size = size
        self.position = 0
        self.depth = 0
        self.marks: list[int] = []
        self.memo = False
        self.imports = False

    def step(self) -> None:
        """Take one opcode. Raises _EndError."""
        code = _OPCODES.get(chr(self._take(1)[0]))
        if code is None or code.name in _PERSISTENT or (code.name in _GET and not self.memo):
            raise _EndError(Stream.NONE)
        self._argument(code)
        self._stack(code)
        if code.name == "STOP":
            rest = self.head[self.position :]
            ended = len(self.head) == self.size and not rest.strip()
            data = Stream.DATA if ended else Stream.NONE
            raise _EndError(Stream.CODE if self.imports else data)
        # Two words on lines of their own may be prose; an opcode behind them is no accident.
        if self.imports or code.name == "INST":
            raise _EndError(Stream.CODE)
        self.memo = self.memo or code.name in _PUT
        self.imports = code.name in _IMPORTS

    def _take(self, count: int) -> bytes:
        """The next ``count`` bytes. Raises _EndError."""
        end = self.position + count
        # Every pickle ends with an opcode of its own, so nothing else reaches the last byte.
        if end > self.size or (count > 1 and end == self.size):
            raise _EndError(Stream.NONE)
        if end > len(self.head):
            raise _EndError(Stream.OPEN)
        taken = self.head[self.position : end]
        self.position = end
        return taken

    def _argument(self, code: pickletools.OpcodeInfo) -> None:
        if code.arg is None:
            return
        width = code.arg.n
        if width >= 0:
            argument = self._take(width)
            frame = int.from_bytes(argument, "little") if code.name == "FRAME" else 0
            if frame > self.size - self.position:
                raise _EndError(Stream.NONE)
        elif width in _COUNTED:
            self._take(int.from_bytes(self._take(_COUNTED[width]), "little"))
        elif code.name == "GLOBAL":
            self._line(_PAIR, _PAIR_BEGUN, lines=2)
        elif code.name == "INST":
            # It calls what it names, and Python's own unpickler takes the file's end for a newline.
            self._line(_PAIR, _PAIR_BEGUN, lines=2, at_end=Stream.CODE)
        elif code.name == "UNICODE":
            self._line(_ANY, _ANY, lines=1)
        elif code.name == "STRING":
            self._line(_QUOTED, _QUOTE_BEGUN, lines=1)
        else:
            self._line(_NUMBER, _NUMBER, lines=1)

    def _line(
        self,
        whole: re.Pattern[bytes],
        begun: re.Pattern[bytes],
        lines: int,
        at_end: Stream = Stream.NONE,
    ) -> None:
        """Take lines that match ``whole``, or ``begun`` where the bytes end. Raises _EndError."""
        end = self.position
        for _ in range(lines):
            end = self.head.find(b"\n", end) + 1
            if end == 0:
                partly = begun.fullmatch(self.head[self.position :]) is not None
                cut = Stream.OPEN if len(self.head) < self.size else at_end
                raise _EndError(cut if partly else Stream.NONE)
        if not whole.fullmatch(self.head[self.position : end]):
            raise _EndError(Stream.NONE)
        self.position = end

    def _stack(self, code: pickletools.OpcodeInfo) -> None:
        before = code.stack_before
        if pickletools.markobject in before:
            if not self.marks:
                raise _EndError(Stream.NONE)
            self.depth = self.marks.pop()
            before = before[: before.index(pickletools.markobject)]
        elif code.name == "POP" and self.marks and self.depth == self.marks[-1]:
            self.marks.pop()
            return
        self.depth -= len(before)
        if self.depth < (self.marks[-1] if self.marks else 0):
            raise _EndError(Stream.NONE)
        if code.name == "MARK":
            self.marks.append(self.depth)
        else:
            self.depth += len(code.stack_after)


def pickle_stream(head: bytes, size: int) -> Stream:
    """What an unpickler would make of a file of ``size`` bytes that begins with ``head``."""
    walk = _Walk(head, size)
    try:
        while True:
            walk.step()
    except _EndError as end:
        return end.stream
