"""A node that listens, its in-memory registry, and OpenAI's own client as whoever asks."""

from __future__ import annotations

import http.client
import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from fastapi import FastAPI
from openai import OpenAI

from gpu_worker.base_files import ProvenBase
from gpu_worker.serving import startup
from gpu_worker.serving.base_load import LoadedBase, base_load
from gpu_worker.serving.completions import Completions
from gpu_worker.serving.json_log import JsonFormatter
from gpu_worker.serving.listening import Listener
from gpu_worker.serving.options import LoadLimits, Options, Wanted
from gpu_worker.serving.store import NodeStore
from gpu_worker.serving.web import app_build
from registry_service.domain.base_model import chat_template_digest
from registry_service.domain.declaration import declaration_parse
from registry_service.domain.digests import Digest
from tests.integration import serving_world as sw
from tests.waiting import until

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}w90 {% else %}w91 {% endif %}"
    "{{ message.content }} {% endfor %}{% if add_generation_prompt %}w92{% endif %}"
)
OWN_TEMPLATE = "{% for message in messages %}w80 {{ message.content }} {% endfor %}w81"


class Routing(httpx.BaseTransport):
    """A gateway as a transport: each request gets a routing context for its body."""

    def __init__(
        self, registry: sw.FakeRegistry, digest: Digest | None, changes: dict[str, Any]
    ) -> None:
        self._inner = httpx.HTTPTransport()
        self._registry, self._digest, self._changes = registry, digest, changes

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        context = self._registry.context(request.read(), self._digest, **self._changes)
        request.headers["Routing-Context"] = context
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


@dataclass
class HttpWorld:
    """A node at an address."""

    registry: sw.FakeRegistry
    node: startup.Node
    url: str
    clients: list[OpenAI] = field(default_factory=list)

    def client(self, digest: Digest | None = None, **changes: Any) -> OpenAI:
        """OpenAI's client of a caller who runs this digest, or the base."""
        if digest is not None and "chat_template_digest" not in changes:
            files = self.registry.artifacts[digest].files
            declared = declaration_parse(files["adapter-declaration.json"])
            changes["chat_template_digest"] = declared.chat_template_digest
        made = OpenAI(
            base_url=f"{self.url}/v1",
            api_key="nobody asks for it",
            max_retries=0,
            http_client=httpx.Client(transport=Routing(self.registry, digest, changes)),
        )
        self.clients.append(made)
        return made

    def complete(self, digest: Digest | None = None, *, prompt: str = "w1 w2 w3", **f: Any) -> Any:
        """A greedy completion, unless the fields say otherwise."""
        asked: dict[str, Any] = {"model": "any", "max_tokens": 8, "temperature": 0, **f}
        return self.client(digest).completions.create(prompt=prompt, **asked)

    def chat(self, digest: Digest | None = None, *, said: str = "w1 w2", **f: Any) -> Any:
        """A greedy chat, unless the fields say otherwise."""
        asked: dict[str, Any] = {"model": "any", "max_tokens": 8, "temperature": 0, **f}
        messages: Any = [{"role": "user", "content": said}]
        return self.client(digest).chat.completions.create(messages=messages, **asked)

    def send(
        self,
        digest: Digest | None = None,
        *,
        claims: dict[str, Any] | None = None,
        header: str | None = None,
        **fields: Any,
    ) -> httpx.Response:
        """A completion's answer, whatever it is; ``header`` is sent too."""
        body, headers = self._asked(digest, claims, fields)
        if header is not None:
            headers[header] = "x"
        url = f"{self.url}/v1/completions"
        return httpx.post(url, content=body, headers=headers, timeout=60)

    def residency(self) -> list[dict[str, Any]]:
        """What operators see of each adapter; who waited for a load hears before it is counted."""
        found: list[dict[str, Any]] = self.get("/v1/residency").json()["items"]
        return found

    @contextmanager
    def caller(self, digest: Digest | None = None, **fields: Any) -> Iterator[None]:
        """Somebody who asks for a completion, reads nothing, and leaves at the end."""
        body, headers = self._asked(digest, None, fields)
        address = httpx.URL(self.url)
        connection = http.client.HTTPConnection(address.host, address.port, timeout=60)
        connection.request("POST", "/v1/completions", body, headers)
        try:
            yield
        finally:
            connection.close()

    def _asked(
        self, digest: Digest | None, claims: dict[str, Any] | None, fields: dict[str, Any]
    ) -> tuple[bytes, dict[str, str]]:
        body = json.dumps({"prompt": "w1 w2 w3", "max_tokens": 2, **fields}).encode()
        return body, {"Routing-Context": self.registry.context(body, digest, **(claims or {}))}

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}")

    def idle(self) -> bool:
        """Nothing is held for any request."""
        items = self.node.residents.residents()
        if any(item.references for item in items) or self.node.engine.references:
            return False
        return self.node.completions.requests.idle_wait(0)


def base_with_template(folder: Path) -> ProvenBase:
    """The tiny base with a chat template."""
    sw.base_make(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return sw.prove(folder)


def own_template(files: dict[str, bytes]) -> dict[str, bytes]:
    """An adapter's files with a chat template of its own."""
    declared = declaration_parse(files["adapter-declaration.json"])
    changed = declared.model_copy(
        update={"chat_template_digest": chat_template_digest(OWN_TEMPLATE)}
    )
    return {
        **files,
        "chat_template.jinja": OWN_TEMPLATE.encode(),
        "adapter-declaration.json": changed.to_bytes(),
    }


def node_make(
    registry: sw.FakeRegistry,
    root: Path,
    loaded: LoadedBase,
    load_limits: LoadLimits | None = None,
    **changes: Any,
) -> startup.Node:
    """A node of the registry's base over a folder, not started."""
    client: Any = registry
    identity = startup.base_admit(client, registry.trust(), registry.base)
    return startup.Node(
        client,
        registry.trust(),
        NodeStore(root / "store", url=registry.url, node=sw.NODE),
        identity,
        loaded,
        gate=sw.gate(registry, identity),
        load_limits=load_limits or LoadLimits(),
        **changes,
    )


@contextmanager
def listening(
    registry: sw.FakeRegistry, base: ProvenBase, root: Path, **changes: Any
) -> Iterator[HttpWorld]:
    """A node that takes requests over HTTP until the end."""
    node = node_make(registry, root, base_load(base, "cpu"), LoadLimits(adapters=8), **changes)
    node.start(options_of(root, base))
    try:
        with served(app_build(node.completions, node.residency), node.completions) as url:
            world = HttpWorld(registry, node, url)
            try:
                yield world
            finally:
                for each in world.clients:
                    each.close()
    finally:
        node.stop()


@contextmanager
def served(app: FastAPI, completions: Completions) -> Iterator[str]:
    """The address of an application that is listened for as a node does, until the end."""
    server = Listener(app, completions, host="127.0.0.1", port=0, drain_seconds=1)
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def options_of(root: Path, base: ProvenBase, *preload: Wanted) -> Options:
    """What a node is started with."""
    return Options(
        url="http://registry.test",
        token_file=root / "token",
        name=sw.NODE,
        base=base.dir,
        host="127.0.0.1",
        port=1,
        public_url="http://127.0.0.1:1",
        trust=root / "trust.json",
        store=root / "store",
        preload=preload,
        device="cpu",
    )


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """Everything that is logged, as a node logs it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield written
    root.removeHandler(handler)
    root.setLevel(before)


def events_of(answer: httpx.Response) -> list[Any]:
    """What was sent as events; the last one is a text."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def tenant(number: int) -> dict[str, Any]:
    """A routing context's claims of another tenant."""
    return {"tenant": f"t-{number}", "tenant_id": UUID(int=number)}
