"""The command line of a serving node."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

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


def options_parse(arguments: list[str]) -> Options:
    """Parse the command line; argparse ends the process with 2 on a usage error.

    Raises:
        MalformedError: a name or digest out of its grammar.
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
    parser.add_argument("--public-url", help="how others reach this node; default host and port")
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
    given = parser.parse_args(arguments)
    return Options(
        url=given.url,
        token_file=given.token_file,
        name=node_name(given.name),
        base=given.base,
        host=given.host,
        port=given.port,
        public_url=given.public_url or f"http://{_bracketed(given.host)}:{given.port}",
        trust=given.trust,
        store=given.store,
        preload=tuple(wanted_parse(text) for text in given.preload),
        device=given.device,
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


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
