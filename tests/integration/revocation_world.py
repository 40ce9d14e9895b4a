"""Serving nodes on the real service: everything of theirs is real but model and block cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

from gpu_worker.serving.adapter_load import BaseIdentity
from gpu_worker.serving.admission import Admission
from gpu_worker.serving.follower import Follower
from gpu_worker.serving.held_list import HeldList
from gpu_worker.serving.ledger import Ledger
from gpu_worker.serving.loading import Loading
from gpu_worker.serving.memory import Ledgers
from gpu_worker.serving.options import LoadLimits
from gpu_worker.serving.residency import Key
from gpu_worker.serving.residents import Lease, Residents
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.trust import trust_parse
from gpu_worker.serving.withdrawn import Withdrawn
from registry_service.client import RegistryClient
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RegistryError
from registry_service.domain.safetensors_header import header_parse
from registry_service.domain.tensor_content import content_digest
from registry_service.trust.keys import public_key_parse
from registry_service.trust.revocation_list import RevocationList, revocation_list_verify
from tests.integration.conftest import World, report, tiny_catalog

TENANT, ADAPTER = "t-1042", "support-zh"
MODULES = 4
ADAPTER_BYTES = 1000
BLOCKS = 3
MEMORY = 1 << 30


class Clock:
    """Wall clock and counter that a test can put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.ahead)

    def elapsed(self) -> float:
        return time.monotonic() + self.ahead


class Link(httpx.BaseTransport):
    """The way to the registry; a test can cut it, and change what comes over it."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.cut = False
        self.replies: dict[str, bytes] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._cut_check(request)
        reply = self.replies.get(request.url.path)
        if reply is not None:
            return httpx.Response(200, content=reply, request=request)
        response = self._inner.handle_request(request)
        # An answer that was under way when the link was cut does not arrive either.
        self._cut_check(request)
        return response

    def _cut_check(self, request: httpx.Request) -> None:
        if self.cut:
            raise httpx.ConnectError("the registry cannot be reached", request=request)

    def close(self) -> None:
        self._inner.close()


@dataclass
class StandInEngine:
    """Has an engine's steps around an adapter's life, and no model."""

    attached: set[Key] = field(default_factory=set)
    steps: list[str] = field(default_factory=list)
    on_cancel: Callable[[], None] = lambda: None
    on_attach: Callable[[], None] = lambda: None

    def attach(self, key: Key, _adapter: Any) -> tuple[int, int]:
        self.on_attach()
        self.attached.add(key)
        return MODULES, ADAPTER_BYTES

    def detach(self, key: Key) -> int:
        self.attached.remove(key)
        self.steps.append("unload")
        return ADAPTER_BYTES

    def cancel(self, _key: Key) -> int:
        self.on_cancel()
        return 1

    def purge(self, _key: Key) -> int:
        self.steps.append("purge")
        return BLOCKS


class FolderSlots:
    """Slot files named by the adapter's digest, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def save(self, digest: str) -> Path:
        path = self.folder / f"{digest.removeprefix('sha256:')}.slot"
        path.write_bytes(b"kv")
        return path

    def keys(self) -> set[Key]:
        """A file's name has no tenant, so that its adapter is found by its pulled files alone."""
        return set()

    def remove(self, digest: Digest) -> int:
        found = list(self.folder.glob(f"{digest.removeprefix('sha256:')}.slot"))
        for path in found:
            path.unlink()
        return len(found)


class ServingNode:
    """One node's parts over a folder; made again over the same folder it is the node restarted."""

    def __init__(self, world: World, root: Path, name: str, trust_file: Path) -> None:
        self.world, self.root, self.name, self.trust_file = world, root, name, trust_file
        root.mkdir(exist_ok=True)
        self.clock, self.link, self.engine = Clock(), Link(), StandInEngine()
        self.slots = FolderSlots(root / "slots")
        self.client = RegistryClient(world.url, world.tokens[name], transport=self.link)
        self.store = NodeStore(root / "store", url=world.url, node=name)
        trust = trust_parse(trust_file.read_bytes())
        shown = self.client.base_show("tiny")
        self.template = Digest(shown["chatTemplateDigest"])
        base = BaseIdentity(
            world.base_digest,
            Digest(shown["tokenizerDigest"]),
            self.template,
            tiny_catalog(world.base_digest),
            "tiny",
        )
        self.held = HeldList(
            self.store,
            trust.list_key,
            trust.list_issuer,
            now=self.clock.now,
            elapsed=self.clock.elapsed,
        )
        self.withdrawn = Withdrawn(self.clock.now)
        self.follower = Follower(
            self.client, self.store, name, self.held, self.withdrawn, feed_wait=5
        )
        engine: Any = self.engine
        admission = Admission(
            self.client,
            trust,
            base,
            engine,
            self.store,
            self.held,
            now=self.clock.now,
            base_unchanged=lambda: True,
        )
        ledger = Ledger(MEMORY, bank=MEMORY // 2)
        memory = Ledgers(ledger, ledger, ADAPTER_BYTES, 0)
        loading = Loading(admission, memory, self.client, node=name, load_limits=LoadLimits(rank=8))
        self.residents = Residents(
            loading,
            engine,
            self.store,
            self.held,
            now=self.clock.now,
            acknowledge=self.follower.acknowledge,
            purges=[self.engine],
            slots=[self.slots],
        )
        self.base, self.placements = base, loading.placements
        self._closed = False

    def begin(self) -> None:
        """What a node does before it listens."""
        self.residents.start()
        self.follower.list_refresh(self.residents)
        self.client.node_register(
            self.name, self.base.digest, "http://127.0.0.1:1", self.base.catalog_digest
        )
        self.follower.reconcile(self.residents)

    def follow(self) -> None:
        """Follow in threads from now on."""
        self.follower.start(self.residents)

    def die(self) -> None:
        """Let go of the folder and say nothing more, as a process that is killed."""
        self.follower.stop()
        self.residents.stop()
        self.link.cut = True
        self._close()

    def end(self) -> None:
        """Stop following, and let go of everything, as a node that is told to stop."""
        self.follower.stop()
        self.residents.stop()
        self.follower.quiet_wait(5)
        self.placements.close(5)
        self.client.close()
        self._close()

    def _close(self) -> None:
        # Once only: the number of a closed descriptor may be somebody else's.
        if not self._closed:
            self._closed = True
            self.store.close()

    def restarted(self) -> ServingNode:
        """Another process over the same folder."""
        return ServingNode(self.world, self.root, self.name, self.trust_file)

    def lease(self, digest: str, *, adapter: str = ADAPTER, tenant: str = TENANT) -> Lease:
        """A running request's hold on an adapter; loads it."""
        return self.residents.acquire(
            tenant_id=tenant_id(self.world, tenant),
            tenant=tenant,
            adapter=adapter,
            digest=Digest(digest),
            template=self.template,
        )

    def accepts(self, digest: str, **options: str) -> bool:
        """True when a new request for this adapter is taken."""
        if self.follower.stale_reason is not None:
            return False
        try:
            self.lease(digest, **options).release()
        except RegistryError:
            return False
        return True

    def states(self) -> dict[str, str]:
        return {item.key.digest: str(item.state) for item in self.residents.residents()}


def tenant_id(world: World, tenant: str) -> UUID:
    """A tenant's id."""
    with world.client("admin") as admin:
        return next(UUID(t["id"]) for t in admin.tenant_list() if t["name"] == tenant)


def nodes_make(
    world: World, root: Path, names: Sequence[str], trust_file: Path
) -> list[ServingNode]:
    """Nodes with tokens of their own, each begun."""
    made = []
    with world.client("admin") as admin:
        for name in names:
            world.tokens[name] = admin.token_create(name, "node", None)["token"]
    for name in names:
        node = ServingNode(world, root / name, name, trust_file)
        node.begin()
        made.append(node)
    return made


def ending(nodes: Sequence[ServingNode]) -> Iterator[list[ServingNode]]:
    """Nodes that end with a fixture."""
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.end)
        yield list(nodes)


def background(world: World, stop: threading.Event) -> threading.Thread:
    """What the background process does, in a thread until ``stop``."""

    def run() -> None:
        while not stop.wait(0.02):
            world.settle()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def validate(world: World, content: str | None) -> None:
    """Do the next validation job as a worker that measured this content digest."""
    with world.client("validator") as worker:
        job = worker.job_claim("w1", ["validate"], [world.base_digest])
        assert job is not None
        measured = {} if content is None else {"contentDigest": content}
        worker.job_complete(job["id"], job["lease"], report=report() | {"measurements": measured})


def listed(world: World) -> RevocationList:
    """The list as an auditor verifies it."""
    with world.client("auditor") as auditor:
        envelope = auditor.revocation_list()
    assert envelope is not None
    return revocation_list_verify(
        envelope,
        public_key=public_key_parse(world.context.list_signer.public_pem),
        issuer=world.context.verifier_id,
        now=world.context.clock.now(),
    )


def revoke(world: World, digest: str, deadline: int | None = None) -> dict[str, object]:
    """Revoke as the platform's operator."""
    with world.client("operator") as operator:
        shown: dict[str, object] = operator.revoke(TENANT, digest, "leaks names", deadline)
        return shown


def content_of(weights: bytes) -> str:
    """The content digest of a weights file."""
    header, _ = header_parse(weights, len(weights))
    assert header is not None
    return content_digest(header, weights)
