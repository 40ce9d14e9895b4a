"""The composition root of a serving node: prove, load, preload, register, listen.

Whatever does not hold ends the process with a clear line before it listens.
"""

from __future__ import annotations

import logging
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn

from gpu_worker.base_files import ProvenBase, base_prove
from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.admission import Admission
from gpu_worker.serving.base_load import LoadedBase, base_load, device_choose
from gpu_worker.serving.completions import Completions, Gate
from gpu_worker.serving.engine import Engine
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.options import Options, options_parse
from gpu_worker.serving.parameters import parameters_digest
from gpu_worker.serving.residents import Residents
from gpu_worker.serving.sequence import EngineError
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.trust import Trust, trust_parse
from gpu_worker.serving.web import app_build
from gpu_worker.validation.catalog_builder import catalog_build
from registry_service.client import RegistryClient
from registry_service.domain.errors import (
    MalformedError,
    NotFoundError,
    RefusedError,
    RegistryError,
)
from registry_service.trust.verdict import base_verify

_LOG = logging.getLogger(__name__)
_DRAIN_SECONDS: Final = 30


class Node:
    """A node's parts, and the order in which they come up and go down."""

    def __init__(
        self,
        client: RegistryClient,
        trust: Trust,
        store: NodeStore,
        base: BaseIdentity,
        loaded: LoadedBase,
        *,
        name: str,
        started_at: datetime,
    ) -> None:
        self.client, self.store, self.base, self.name = client, store, base, name
        self.engine = Engine(loaded.model, stop_tokens=loaded.stop_tokens)
        self.follower = Follower(client, store, name)
        admission = Admission(
            client,
            trust,
            base,
            self.engine,
            store,
            now=now,
            base_unchanged=lambda: parameters_digest(loaded.parameters) == loaded.parameters_digest,
        )
        self.residents = Residents(
            admission, self.engine, store, now=now, acknowledge=self.follower.acknowledge
        )
        self.completions = Completions(
            Gate(trust, name, started_at, now),
            base,
            loaded.text,
            self.engine,
            self.residents,
            self.follower,
            max_tokens=loaded.max_tokens,
        )

    def start(self, options: Options) -> None:
        """Preload, register, reconcile with what was revoked meanwhile, follow.

        Raises:
            RegistryError: a preloaded digest is not valid, or the registry refuses this node.
        """
        self.engine.start()
        keys = []
        for wanted in options.preload:
            keys.append(self.residents.preload(wanted.tenant, wanted.adapter, wanted.digest))
            _LOG.info("preloaded %s/%s %s", wanted.tenant, wanted.adapter, wanted.digest)
        self.client.node_register(
            self.name, self.base.digest, options.public_url, self.base.catalog_digest
        )
        self.follower.heartbeat(self.residents)
        gone = [key.digest for key in keys if not self.residents.serving(key)]
        if gone:
            raise RefusedError(f"preload: revoked meanwhile: {', '.join(gone)}")
        self.follower.start(self.residents)

    def stop(self) -> None:
        """Let go of everything."""
        self.follower.stop()
        self.engine.stop()
        self.store.close()


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


def base_admit(client: RegistryClient, trust: Trust, proven: ProvenBase) -> BaseIdentity:
    """Compare a proven base with the registry's, and hand in this node's own catalog of it.

    A base that still waits for its second catalog is served: this one may be the second.

    Raises:
        RefusedError: unknown, another tokenizer or template, or another catalog than this one.
    """
    try:
        known = client.base_show(proven.digest)
    except NotFoundError as error:
        raise RefusedError(
            f"base {proven.dir}: the registry has no base {proven.digest}; "
            "add it with 'adapterctl base add', or start with the directory that was added"
        ) from error
    for field, own in (
        ("baseModelDigest", proven.digest),
        ("tokenizerDigest", proven.tokenizer_digest),
        ("chatTemplateDigest", proven.chat_template_digest),
    ):
        if known[field] != own:
            raise RefusedError(f"base {proven.dir}: {field}: expected {known[field]}, got {own}")
    catalog = catalog_build(proven.dir, proven.digest)
    base = BaseIdentity(
        proven.digest, proven.tokenizer_digest, proven.chat_template_digest, catalog
    )
    client.catalog_submit(proven.digest, catalog.to_bytes())
    _statement_check(client, trust, base)
    return base


def _statement_check(client: RegistryClient, trust: Trust, base: BaseIdentity) -> None:
    state = client.base_show(base.digest)["state"]
    if state == "PENDING":
        _LOG.warning("base %s: waits for a second catalog; no adapter runs yet", base.digest)
        return
    if state != "USABLE":
        raise RefusedError(f"base {base.digest}: {state}: its catalogs differ; ask an operator")
    claims = base_verify(
        client.base_statement(base.digest),
        trusted=trust.verifiers,
        base_digest=base.digest,
        now=now(),
    )
    if base.catalog_digest not in claims.catalog_digests:
        raise RefusedError(
            f"base {base.digest}: expected catalog {claims.catalog_digest}, "
            f"got {base.catalog_digest}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run a node until it is told to stop; the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    started_at = now()
    try:
        options = options_parse(sys.argv[1:] if arguments is None else arguments)
        return _run(options, started_at)
    except RegistryError as error:
        _LOG.error("%s", error.message)
        return error.exit_code
    except EngineError as error:
        _LOG.error("%s", error)
        return RefusedError.exit_code


def _run(options: Options, started_at: datetime) -> int:
    trust = trust_parse(_read(options.trust))
    token = _read(options.token_file).decode("ascii", "replace").strip()
    device = device_choose(options.device)
    with RegistryClient(options.url, token) as client:
        store = NodeStore(options.store, url=client.url, node=options.name)
        proven = base_prove(options.base)
        base = base_admit(client, trust, proven)
        loaded = base_load(proven, device)
        if type(loaded.model).__name__ != base.catalog.model_class:
            raise RefusedError(f"base: expected {base.catalog.model_class}, got another class")
        _LOG.info("base %s on %s: proven and loaded", base.digest, device)
        node = Node(client, trust, store, base, loaded, name=options.name, started_at=started_at)
        try:
            node.start(options)
            return _serve(node, options)
        finally:
            node.stop()


def _serve(node: Node, options: Options) -> int:
    config: dict[str, Any] = {
        "host": options.host,
        "port": options.port,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": _DRAIN_SECONDS,
    }
    server = uvicorn.Server(uvicorn.Config(app_build(node.completions), **config))
    # uvicorn raises the signal again once it has stopped; what is left to do comes after that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)
    _LOG.info("node %s listens on %s:%d", node.name, options.host, options.port)
    server.run()
    _LOG.info("node %s stopped", node.name)
    return 0 if server.started else 1


def _ignore(_number: int, _frame: FrameType | None) -> None:
    return None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MalformedError(f"{path}: cannot be read: {error.strerror}") from error
