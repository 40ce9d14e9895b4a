"""The command line of a serving node."""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpu_worker.serving.loader import QueueLimits
from registry_service.domain import limits
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.names import adapter_name, node_name, tenant_name
from registry_service.domain.text import shown


@dataclass(frozen=True, slots=True)
class Wanted:
    """One adapter to load before listening."""

    tenant: str
    adapter: str
    digest: Digest


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """What adapters and requests may take on a node. Sizes in bytes; 0 is as much as the node has.

    ``running`` requests run at once, ``tenant_running`` of one tenant, each of at most ``tokens``
    tokens of prompt and answer.
    ``adapters`` and ``rank`` are those of the bank, ``sequences`` run at once on one adapter.
    """

    memory: int = 0
    running: int = limits.NODE_RUNNING
    tenant_running: int = limits.TENANT_RUNNING
    tokens: int = limits.NODE_TOKENS
    adapters: int = limits.NODE_ADAPTERS
    rank: int = limits.NODE_RANK
    adapter_bytes: int = limits.WEIGHT_BYTES
    sequences: int = limits.ADAPTER_SEQUENCES
    tenant_adapters: int = limits.TENANT_ADAPTERS
    tenant_bytes: int = 0
    queue: QueueLimits = field(default_factory=QueueLimits)


@dataclass(frozen=True, slots=True)
class Options:
    """What a node is started with. The token is read from its file, never from the environment."""

    url: str
    token_file: Path
    name: str
    base: Path
    host: str
    port: int
    public_url: str
    trust: Path
    store: Path
    preload: tuple[Wanted, ...]
    device: str
    traces: str | None = None
    drain_seconds: int = limits.DRAIN_SECONDS
    limits: LoadLimits = field(default_factory=LoadLimits)


# Flag, the most it may be, its default (0: as much as there is), and what it says.
_LIMITS: Final = (
    ("--memory-mib", 64 * limits.MIB, 0, "memory of the node; default: a part of the device's"),
    ("--max-running", 256, limits.NODE_RUNNING, "requests that run at once; the others wait"),
    ("--max-tokens", 2**20, limits.NODE_TOKENS, "prompt and answer of one that runs, as memory"),
    ("--max-adapters", 4096, limits.NODE_ADAPTERS, "adapters that are resident at once"),
    ("--max-rank", limits.RANK, limits.NODE_RANK, "largest rank; every adapter pays for it"),
    ("--max-adapter-mib", limits.WEIGHT_BYTES // limits.MIB, 4096, "largest adapter's files"),
    ("--max-sequences", 4096, limits.ADAPTER_SEQUENCES, "requests at once on one adapter"),
    (
        "--max-tenant-running",
        limits.TENANT_SEQUENCES,
        0,
        f"a tenant's that run at once; default: half of the node's, at most "
        f"{limits.TENANT_SEQUENCES}",
    ),
    ("--max-tenant-adapters", 4096, 0, "a tenant's resident adapters; default: half of the node's"),
    ("--max-tenant-mib", 64 * limits.MIB, 0, "a tenant's resident bytes; default: all there are"),
    ("--max-tenant-loads", 6000, limits.TENANT_LOADS_PER_MINUTE, "a tenant's loads a minute"),
)


def options_parse(arguments: list[str]) -> Options:
    """Parse the command line; argparse ends the process with 2 on a usage error.

    Raises:
        MalformedError: a name or digest out of its grammar, or no address that others can reach.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker.serving",
        description="Serve one base model and the adapters that were admitted on it.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", required=True, help="the registry")
    parser.add_argument("--token-file", required=True, type=Path, help="file with a node's token")
    parser.add_argument("--name", required=True, help="this node's name, the contexts' audience")
    parser.add_argument("--base", required=True, type=Path, help="directory of the base model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument(
        "--public-url",
        help="how others reach this node; default host and port, needed with --host 0.0.0.0 or ::",
    )
    parser.add_argument("--trust", required=True, type=Path, help="trust.json with pinned keys")
    parser.add_argument("--store", required=True, type=Path, help="folder of this node alone")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="TENANT/ADAPTER@sha256:…",
        help="load before listening, or exit; may be repeated",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--traces", metavar="URL", help="OTLP/HTTP collector, else no traces")
    parser.add_argument(
        "--drain-seconds",
        type=_number(3600),
        default=limits.DRAIN_SECONDS,
        metavar="N",
        help="how long requests may finish after SIGTERM",
    )
    for flag, most, default, text in _LIMITS:
        parser.add_argument(flag, type=_number(most), default=default, metavar="N", help=text)
    given = parser.parse_args(arguments)
    return Options(
        url=given.url,
        token_file=given.token_file,
        name=node_name(given.name),
        base=given.base,
        host=given.host,
        port=given.port,
        public_url=given.public_url or _own_url(given.host, given.port),
        trust=given.trust,
        store=given.store,
        preload=tuple(wanted_parse(text) for text in given.preload),
        device=given.device,
        limits=_limits(given),
        traces=given.traces,
        drain_seconds=given.drain_seconds,
    )


def _number(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"expected 1 to {most}, got {shown(text)}")
        return int(text)

    return parse


def _limits(given: argparse.Namespace) -> LoadLimits:
    return LoadLimits(
        memory=given.memory_mib * limits.MIB,
        running=given.max_running,
        # Of a tenant no more wait or run in all.
        tenant_running=given.max_tenant_running
        or min(limits.TENANT_SEQUENCES, max(1, given.max_running // 2)),
        tokens=given.max_tokens,
        adapters=given.max_adapters,
        rank=given.max_rank,
        adapter_bytes=given.max_adapter_mib * limits.MIB,
        sequences=given.max_sequences,
        tenant_adapters=given.max_tenant_adapters or max(1, given.max_adapters // 2),
        tenant_bytes=given.max_tenant_mib * limits.MIB,
        queue=QueueLimits(waiting_each=given.max_sequences, per_minute=given.max_tenant_loads),
    )


def wanted_parse(text: str) -> Wanted:
    """``tenant/adapter@sha256:…``; a label or alias is refused, since it may move.

    Raises:
        MalformedError: another form.
    """
    names, at, digest = text.partition("@")
    tenant, slash, adapter = names.partition("/")
    if not at or not slash:
        raise MalformedError(f"--preload: expected tenant/adapter@sha256:…, got {shown(text)}")
    return Wanted(tenant_name(tenant), adapter_name(adapter), digest_parse(digest, "--preload"))


def _own_url(host: str, port: int) -> str:
    """Where others reach a node that listens there.

    Raises:
        MalformedError: it listens on all addresses, of which none is known to be its own.
    """
    try:
        everywhere = not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        everywhere = False
    if everywhere:
        raise MalformedError(
            f"--public-url: expected the address that others reach this node at, since --host "
            f"{shown(host)} is every address, got none; give for instance "
            f"--public-url http://node-1.example:{port}"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
