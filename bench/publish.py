"""Publishing 200 MB against streaming the same bytes through SHA-256 into a file."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from registry_service.client_transfer import PublishFile
from registry_service.domain.limits import MIB
from tests.integration.conftest import World, safetensors_bytes

SIZE, CHUNK, ROUNDS = 200 * MIB, MIB, 3


def publish(world: World, pid: int) -> list[dict[str, Any]]:
    """The best of some rounds of both, their ratio, and the service's growth in MiB."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times, plain = [], []
        growth = 0
        for number in range(ROUNDS):
            weights = safetensors_bytes({"x": (SIZE // 4,)}, fill=number)
            files = [
                PublishFile(path, folder / path)
                for path in world.folder(folder, fill=number, weights=weights)
            ]
            plain.append(_plain(folder / "adapter_model.safetensors", folder / "copy"))
            with world.client("publisher:t-1042") as client, _Memory(pid) as memory:
                start = time.perf_counter()
                client.push("t-1042", "support-zh", files)
                times.append(time.perf_counter() - start)
            growth = max(growth, memory.growth)
    return [
        {
            "what": "publish 200 MB",
            "seconds": round(min(times), 2),
            "ratio": round(min(times) / min(plain), 2),
            "service grew MiB": growth // MIB,
        },
        {"what": "SHA-256 into a file", "seconds": round(min(plain), 2)},
    ]


def _plain(source: Path, target: Path) -> float:
    hasher = hashlib.sha256()
    start = time.perf_counter()
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(CHUNK):
            hasher.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return time.perf_counter() - start


class _Memory:
    """The most that a process and its children grew, in bytes, while this is open."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.growth = 0

    def __enter__(self) -> _Memory:
        self._before = _resident(self._pid)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.growth = max(self.growth, _resident(self._pid) - self._before)


def _resident(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            total += _resident(int(child))
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total + pages * os.sysconf("SC_PAGE_SIZE")
