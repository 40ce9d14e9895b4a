"""The composition root of a serving node: prove, load, preload, register, listen.

Whatever does not hold ends the process with a clear line before it listens.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from gpu_worker.base_files import ProvenBase, base_prove
from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.base_load import base_load, device_choose
from gpu_worker.serving.brief import compute_briefly
from gpu_worker.serving.gate import Gate
from gpu_worker.serving.json_log import log_configure
from gpu_worker.serving.listening import Listener
from gpu_worker.serving.node import Node, now
from gpu_worker.serving.options import Options, options_parse
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
_STOP_SECONDS: Final = 30
_INTERRUPTED: Final = 130


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
        proven.digest,
        proven.tokenizer_digest,
        proven.chat_template_digest,
        catalog,
        str(known["name"]),
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
    log_configure()
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
    except KeyboardInterrupt:
        _LOG.error("interrupted before it listened")
        return _INTERRUPTED


def process_end(code: int) -> NoReturn:
    """End this process now, whatever its threads do.

    An interpreter that ends by itself takes its threads down wherever they come back to it: inside
    torch that is an abort, in place of ``code``.
    """
    logging.shutdown()
    os._exit(code)


def _run(options: Options, started_at: datetime) -> int:
    trust = trust_parse(_read(options.trust))
    token = _read(options.token_file).decode("ascii", "replace").strip()
    device = device_choose(options.device)
    with RegistryClient(options.url, token) as client:
        store = NodeStore(options.store, url=client.url, node=options.name)
        proven = base_prove(options.base)
        base = base_admit(client, trust, proven)
        loaded = compute_briefly(partial(base_load, proven, device))
        if type(loaded.model).__name__ != base.catalog.model_class:
            raise RefusedError(f"base: expected {base.catalog.model_class}, got another class")
        _LOG.info("base %s on %s: proven and loaded", base.digest, device)
        node = compute_briefly(
            partial(
                Node,
                client,
                trust,
                store,
                base,
                loaded,
                gate=Gate(trust, base, node=options.name, started_at=started_at, now=now),
                load_limits=options.limits,
                traces=options.traces,
            )
        )
        try:
            compute_briefly(partial(node.start, options))
            return _serve(node, options)
        finally:
            _stop(node)


def _serve(node: Node, options: Options) -> int:
    app = app_build(node.completions, node.residency)
    listener = Listener(
        app,
        node.completions,
        host=options.host,
        port=options.port,
        drain_seconds=options.drain_seconds,
    )
    _LOG.info("node %s listens on %s:%d", node.name, options.host, options.port)
    listened = listener.serve_until_told()
    _LOG.info("node %s stopped", node.name)
    return 0 if listened else 1


def _stop(node: Node) -> None:
    """Let go of everything; what hangs for longer than its time ends with the process."""
    stopping = threading.Thread(target=node.stop, name="stop", daemon=True)
    stopping.start()
    stopping.join(_STOP_SECONDS)
    if stopping.is_alive():
        _LOG.error("node %s: something hangs, and ends with the process", node.name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MalformedError(f"{path}: cannot be read: {error.strerror}") from error
