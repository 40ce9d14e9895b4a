"""What a node's HTTP gives to whoever it does not know: little memory, little time, one answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi.testclient import TestClient

from gpu_worker.serving.gate import DeniedError
from gpu_worker.serving.openai_answers import error_document
from gpu_worker.serving.running import OpenRequests
from gpu_worker.serving.web import app_build
from registry_service.domain import limits
from tests.integration.http_world import served
from tests.waiting import until

pytestmark = pytest.mark.torch

RESIDENT = {"adapterDigest": "sha256:secret"}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CONTEXT = b"Routing-Context: one\r\n"


class Denies:
    """Completions of a node that lets nobody in, with whatever is told of them."""

    def __init__(self) -> None:
        self.started: list[bytes] = []
        self.told: list[str] = []
        self.statuses: list[int] = []
        self.engine_alive, self.unready_reason, self.text = True, None, None
        self.base, self.requests = SimpleNamespace(name="tiny"), OpenRequests()
        self.recorder = SimpleNamespace(
            metrics=SimpleNamespace(answered=lambda _, status: self.statuses.append(status)),
            refused=lambda _asked, error, _who: self.told.append(error.code),
        )

    def start(self, _token: str, content: bytes, *_: Any, **__: Any) -> Any:
        self.started.append(content)
        raise DeniedError


@pytest.fixture
def node() -> Any:
    return Denies()


@pytest.fixture
def url(node: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # What the service that listens would believe of whoever asks, if it believed anything.
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with served(app_build(node, lambda: [RESIDENT]), node) as address:
        yield address


def answer(url: str, sent: bytes) -> bytes:
    """Everything that is answered to these bytes, up to the end of the connection."""
    split = urlsplit(url)
    with socket.create_connection((split.hostname, split.port), timeout=20) as raw:
        raw.sendall(sent)
        found = b""
        while part := raw.recv(65536):
            found += part
    return found


def test_without_exactly_one_context_nothing_of_the_body_is_read(node: Any, url: str) -> None:
    denied = json.dumps(error_document(DeniedError()), separators=(",", ":")).encode()
    for headers in (b"", CONTEXT * 2):
        # The body is announced and never sent: only who does not wait for it answers.
        said = answer(url, POST + headers + b"Content-Length: 1000\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 403")
        assert said.endswith(denied)
    assert node.started == []
    known = httpx.post(f"{url}/v1/completions", content=b"{}", headers={"Routing-Context": "one"})
    assert (known.status_code, known.content) == (403, denied)
    assert node.started == [b"{}"]
    assert node.told == ["FORBIDDEN"] * 3
    assert node.statuses == [403] * 3


def test_a_body_that_says_that_it_is_too_long_is_refused_at_once(node: Any, url: str) -> None:
    length = b"Content-Length: %d\r\n\r\n" % (limits.ASKED_BYTES + 1)
    assert answer(url, POST + CONTEXT + length).startswith(b"HTTP/1.1 413")
    assert node.started == []


def test_a_body_without_a_length_is_refused_where_it_goes_beyond(node: Any, url: str) -> None:
    chunk = b"%x\r\n" % (limits.ASKED_BYTES + 1) + b" " * (limits.ASKED_BYTES + 1)
    said = answer(url, POST + CONTEXT + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
    assert said.startswith(b"HTTP/1.1 413")
    assert node.started == []


def test_a_body_that_does_not_come_is_refused_in_time(
    node: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ASKED_SECONDS", 1)
    # It stays open: only who stops waiting for the rest answers.
    said = answer(url, POST + CONTEXT + b"Content-Length: 1000\r\n\r\n" + b"x" * 10)
    assert said.startswith(b"HTTP/1.1 408")
    error = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "body_timeout")
    assert error["message"] == "body: expected all of it within 1 s, got 10 bytes"
    assert node.started == []


def test_a_known_length_keeps_the_connection(url: str) -> None:
    with httpx.Client(headers={"Routing-Context": "one"}) as client:
        said = [client.post(f"{url}/v1/completions", content=b"{}") for _ in range(2)]
    assert all("connection" not in each.headers for each in said)


def test_more_connections_than_a_node_takes_are_503(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NODE_CONNECTIONS", 3)
    with served(app_build(node, lambda: []), node) as url:
        split = urlsplit(url)
        open_ones = [socket.create_connection((split.hostname, split.port)) for _ in range(3)]
        assert httpx.get(f"{url}/healthz").status_code == 503
        for each in open_ones:
            each.close()
        until(lambda: httpx.get(f"{url}/healthz").status_code == 200)


def test_residency_is_for_this_machine_whatever_a_header_says(node: Any, url: str) -> None:
    for said in ("10.0.0.1", "127.0.0.1"):
        here = httpx.get(f"{url}/v1/residency", headers={"X-Forwarded-For": said})
        assert here.json() == {"items": [RESIDENT]}
    app = app_build(node, lambda: [RESIDENT])
    for peer, status in (("127.0.0.1", 200), ("::1", 200), ("10.0.0.1", 404), ("elsewhere", 404)):
        with TestClient(app, client=(peer, 1), headers={"X-Forwarded-For": "127.0.0.1"}) as client:
            assert client.get("/v1/residency").status_code == status


def test_a_path_with_a_slash_more_is_another_path(node: Any, url: str) -> None:
    unknown = httpx.get(f"{url}/v1/models")
    assert unknown.status_code == 404
    for method, path in (
        ("POST", "/v1/completions/"),
        ("POST", "/v1/chat/completions/"),
        ("GET", "/v1/residency/"),
        ("GET", "/healthz/"),
    ):
        said = httpx.request(method, url + path, headers={"Routing-Context": "one"})
        assert (said.status_code, said.content) == (404, unknown.content)
        assert "location" not in said.headers
    assert node.started == []
