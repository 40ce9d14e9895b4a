"""Pickles, archives, programs and models as bytes: what no adapter may bring. Never opened here.

A pickle that ran would make a folder.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import marshal
import os
import pickle
import tarfile
import zipfile
import zlib
from typing import Any

import numpy as np


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: str = "/nowhere/never") -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.trace,)


def zipped(name: str = "archive/data.pkl", content: bytes | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, pickle.dumps(Bomb()) if content is None else content)
    return buffer.getvalue()


def patched(content: bytes, signature: bytes, offset: int, value: bytes) -> bytes:
    """``content`` with bytes changed at ``offset`` behind the last ``signature``."""
    at = content.rindex(signature) + offset
    return content[:at] + value + content[at + len(value) :]


def tarred(form: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        info = tarfile.TarInfo("data.pkl")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"data"))
    return buffer.getvalue()


def tar_v7() -> bytes:
    """A tar without a magic: only its checksum says what it is."""
    block = bytearray(tarred(tarfile.USTAR_FORMAT))
    block[257:265] = bytes(8)
    total = sum(block[:148]) + 8 * 0x20 + sum(block[156:512])
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


def array(value: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


def arrays() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([Bomb()], dtype=object))
    return buffer.getvalue()


TORCH_LEGACY = b"".join(
    pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
)
GLOBAL = b"cos\nsystem\n(S'true'\ntR."

PICKLES = {
    **{f"protocol {p}": pickle.dumps(Bomb(), p) for p in range(6)},
    "protocol 0 by hand": GLOBAL,
    "protocol 1 without its number": b"(" + GLOBAL,
    "protocol 4 without its number": pickle.dumps(Bomb(), 4)[2:],
    "words behind the end": GLOBAL + b"\n# A title\n\nSome text.\n",
    "garbage behind the call": GLOBAL[:-1] + b"\xff" * 100,
    "an instance": b"(S'true'\nios\nsystem\n.",
    "an object": b"(cos\nsystem\nS'true'\no.",
    "a name from the stack": b"\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "built in two steps": b"N0N0(S'true'\n1cos\nsystem\nS'true'\n\x85R.",
    "a long text first": b"V" + b"x" * 10_000 + b"\n0" + GLOBAL,
    "torch before 1.6": TORCH_LEGACY + pickle.dumps(Bomb(), 2),
    "joblib": pickle.dumps([b"array"], 3) + bytes(64) + b"\x93NUMPY",
    "a list of numbers": pickle.dumps([1, 2, 3], 1),
    "text only": pickle.dumps({"a": "b"}, 0),
    "cut off": pickle.dumps(Bomb(), 4)[:-1],
}
ARCHIVES = {
    "zip": zipped(),
    "zip of a zip": zipped("a.zip", zipped()),
    "zip with a flag bit": patched(zipped(), b"PK\x01\x02", 8, b"\x01\x00"),
    "zip with a bad checksum": patched(zipped(), b"PK\x01\x02", 16, b"\0\0\0\0"),
    "zip with a password": patched(zipped(), b"PK\x03\x04", 6, b"\x01\x00"),
    "npz of objects": arrays(),
    "pickle in zip in gzip": gzip.compress(zipped()),
    "gzip": gzip.compress(b"{}"),
    "bzip2": bz2.compress(b"{}"),
    "xz": lzma.compress(b"{}"),
    "lzma": lzma.compress(b"{}", lzma.FORMAT_ALONE),
    "zlib, as joblib writes it": zlib.compress(pickle.dumps(Bomb())),
    "zlib, fast": zlib.compress(b"{}", 1),
    "zstd": b"\x28\xb5\x2f\xfd\x24\x02\x11\0\0{}" + bytes(4),
    "zstd behind a frame that is skipped": b"\x53\x2a\x4d\x18\x04\0\0\0abcd\x28\xb5\x2f\xfd",
    "lz4": b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(20),
    "7z": b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(32),
    "rar": b"Rar!\x1a\x07\x01\x00" + bytes(32),
    "tar (ustar)": tarred(tarfile.USTAR_FORMAT),
    "tar (GNU)": tarred(tarfile.GNU_FORMAT),
    "tar (pax)": tarred(tarfile.PAX_FORMAT),
    "tar (v7)": tar_v7(),
    "torch's old tar": tarred(tarfile.GNU_FORMAT),
    "cpio": b"070701" + b"0" * 104 + b"TRAILER!!!",
    "ar": b"!<arch>\n" + b"debian-binary   ",
    "cabinet": b"MSCF" + bytes(32),
}
PROGRAMS = {
    "shell": b"#!/bin/sh\ntrue\n",
    "python": b"#!/usr/bin/env python3\nimport os\n",
    "PHP": b"<?php system('true');",
    "ELF": b"\x7fELF\x02\x01\x01" + bytes(64),
    "PE": b"MZ\x90\x00" + bytes(64),
    "Mach-O": b"\xcf\xfa\xed\xfe" + bytes(64),
    "Mach-O, 32 bits": b"\xce\xfa\xed\xfe" + bytes(64),
    "Mach-O, two in one": b"\xca\xfe\xba\xbe" + bytes(64),
    "WebAssembly": b"\x00asm\x01\x00\x00\x00",
    "an error page": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "an error page behind a mark": b"\xef\xbb\xbf\r\n <HTML><body>403</body></HTML>",
}
MODELS = {
    "GGUF": b"GGUF\x03\0\0\0" + bytes(64),
    "NumPy numbers": array(np.zeros(4)),
    "NumPy objects": array(np.array([Bomb()], dtype=object)),
    "HDF5 (Keras)": b"\x89HDF\r\n\x1a\n" + bytes(64),
    "HDF5 behind a block": bytes(512) + b"\x89HDF\r\n\x1a\n" + bytes(64),
}
# Nothing begins like these in every file, so it is the allow-list that refuses them.
UNKNOWN = {
    "ONNX": b"\x08\x08\x12\x07pytorch\x1a\x052.0.0:\x10\x0a\x04x",
    "a TensorFlow graph": b"\n\x1c\n\x05input\x12\x0bPlaceholder*\x06\n\x04type",
    "a compiled Python file": b"\xa7\x0d\x0d\x0a"
    + bytes(12)
    + marshal.dumps(compile("1", "x", "eval")),
    "random bytes": bytes(range(256)),
    "UTF-16": "{}".encode("utf-16"),
    "UTF-32": "{}".encode("utf-32"),
    "Latin-1": '{"a": "ü"}'.encode("latin-1"),
    "text with NUL": b'{"a": 1}\0',
    "JSON with a program behind it": b'{"a": "' + b"x" * 5000 + b'"}' + b"\x7fELF\x02" + bytes(64),
    "a Python script": b"import os\nos.system('true')\n",
}
