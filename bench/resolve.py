"""Authenticated resolve against docker-registry's HEAD by tag: 8 connections, keep-alive."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench.stand import answering, process_start
from cli.stack import port_free
from tests.integration.conftest import World

SECONDS, CONNECTIONS, ROUNDS = 4, 8, 7
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def resolve(world: World) -> list[dict[str, Any]]:
    """Requests a second and p99 of both, and their ratio."""
    if shutil.which("hey") is None:
        return [{"what": "resolve", "left out": "hey is not installed"}]
    with tempfile.TemporaryDirectory() as folder:
        digest = world.admit(Path(folder) / "a")
    with world.client("operator") as operator:
        operator.alias_set("t-1042", "support-zh", "prod", digest, 0, "bench")
    url = f"{world.url}/v1/tenants/t-1042/adapters/support-zh/resolve/prod"
    header = f"Authorization: Bearer {world.tokens['node']}"
    if shutil.which("docker-registry") is None:
        ours = [_load(url, "GET", header) for _ in range(ROUNDS)]
        return [{**_row("resolve", ours), "peer": "docker-registry is not installed"}]
    with ExitStack() as stack:
        peer = _peer(stack)
        # In turns: what else the machine does falls on both. Which of the service's processes takes
        # how many of the connections is the kernel's choice anew in each round.
        rounds = [
            (_load(url, "GET", header), _load(peer, "HEAD", "Accept: " + _MANIFEST))
            for _ in range(ROUNDS)
        ]
    ours, theirs = [first for first, _ in rounds], [second for _, second in rounds]
    ratio = statistics.median(rate for rate, _ in ours) / statistics.median(r for r, _ in theirs)
    return [
        {**_row("resolve", ours), "ratio": round(ratio, 2)},
        _row("docker-registry HEAD", theirs),
    ]


def _row(what: str, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    rates = sorted(rate for rate, _ in rounds)
    return {
        "what": what,
        "requests/s": statistics.median(rates),
        "from": rates[0],
        "to": rates[-1],
        "p99 ms": statistics.median(slow for _, slow in rounds),
    }


def _load(url: str, method: str, header: str) -> tuple[float, float]:
    command = ["hey", "-m", method, "-c", str(CONNECTIONS), "-H", header]
    subprocess.run([*command, "-z", "1s", url], check=True, capture_output=True)
    output = subprocess.run(
        [*command, "-z", f"{SECONDS}s", url], check=True, capture_output=True, text=True
    ).stdout
    codes = set(re.findall(r"\[(\d+)\]\s+\d+ responses", output))
    if codes != {"200"}:
        raise RuntimeError(f"expected 200 from {url}, got {codes}")
    rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
    slow = re.search(r"99%+ in ([\d.]+) secs", output)
    if rate is None or slow is None:
        raise RuntimeError("hey answered in another form")
    return round(float(rate[1])), round(float(slow[1]) * 1000, 1)


def _peer(stack: ExitStack) -> str:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    port = port_free()
    (folder / "config.yml").write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    process_start(["docker-registry", "serve", str(folder / "config.yml")], {}, stack)
    url = f"http://127.0.0.1:{port}"
    answering(f"{url}/v2/")
    blob = b"{}"
    digest = "sha256:" + hashlib.sha256(blob).hexdigest()
    begun = httpx.post(f"{url}/v2/a/b/blobs/uploads/")
    # The location brings a query of its own.
    put = httpx.put(f"{begun.headers['location']}&digest={digest}", content=blob)
    put.raise_for_status()
    entry = {"mediaType": "application/octet-stream", "digest": digest, "size": len(blob)}
    manifest = {
        "schemaVersion": 2,
        "mediaType": _MANIFEST,
        "config": {**entry, "mediaType": "application/vnd.oci.image.config.v1+json"},
        "layers": [entry],
    }
    httpx.put(
        f"{url}/v2/a/b/manifests/prod",
        content=json.dumps(manifest),
        headers={"Content-Type": _MANIFEST},
    ).raise_for_status()
    return f"{url}/v2/a/b/manifests/prod"
