"""The client against a service in memory: errors, paging, push with resume, pull with proof."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry_service import client_transfer
from registry_service.client import PublishFile, RegistryClient
from registry_service.client_transfer import HashingReader, precision_of
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import (
    ConflictError,
    CorruptStoreError,
    ForbiddenError,
    LeaseLostError,
    MalformedError,
    NotFoundError,
    QuotaExceededError,
    RefusedError,
    RegistryError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
    UntrustedError,
)

URL = "http://127.0.0.1:1"
Handler = Callable[[httpx.Request], httpx.Response]


def client_with(handler: Handler) -> RegistryClient:
    return RegistryClient(URL, "art_secret", transport=httpx.MockTransport(handler))


def answering(status: int, body: Any = None, **headers: str) -> RegistryClient:
    return client_with(lambda _: httpx.Response(status, json=body, headers=headers))


class FakeRegistry:
    """The data plane in memory. ``break_after`` bytes of the next PATCHes the connection breaks."""

    def __init__(self) -> None:
        self.uploads: dict[str, bytearray] = {}
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.break_after: list[int] = []
        self.lose_put_answer = 0
        self.forget_uploads = 0
        self.log: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.log.append(request.method)
        path = request.url.path
        if path.endswith("/blobs/uploads/"):
            name = str(len(self.uploads))
            self.uploads[name] = bytearray()
            return httpx.Response(202, headers={"Location": f"{path}{name}?_state=x"})
        upload = re.search(r"/blobs/uploads/(\d+)$", path)
        if upload:
            return self._upload(request, upload[1])
        name = path.rpartition("/")[2]
        store = self.manifests if "/manifests/" in path else self.blobs
        if request.method == "PUT":
            store[name] = request.read()
            return httpx.Response(201)
        if name not in store:
            return httpx.Response(404, json={"errors": [{"code": "BLOB_UNKNOWN", "message": "no"}]})
        return httpx.Response(200, content=store[name])

    def _upload(self, request: httpx.Request, name: str) -> httpx.Response:
        assert "_state=x" in str(request.url), "the Location is opaque and has to come back whole"
        if name not in self.uploads:
            return httpx.Response(404, json={"errors": [{"code": "BLOB_UPLOAD_UNKNOWN"}]})
        held = self.uploads[name]
        if request.method == "GET":
            if self.forget_uploads:
                self.forget_uploads -= 1
                del self.uploads[name]
                return httpx.Response(404)
            return httpx.Response(204, headers={"Range": f"0-{max(len(held) - 1, 0)}"})
        if request.method == "PUT":
            self.blobs[request.url.params["digest"]] = bytes(held)
            if self.lose_put_answer:
                self.lose_put_answer -= 1
                raise httpx.ReadError("connection reset")
            return httpx.Response(201)
        return self._patch(request, held)

    def _patch(self, request: httpx.Request, held: bytearray) -> httpx.Response:
        start = int(request.headers["content-range"].partition("-")[0])
        if start != len(held):
            return httpx.Response(416)
        limit = self.break_after.pop(0) if self.break_after else None
        assert isinstance(request.stream, httpx.SyncByteStream)
        for chunk in request.stream:
            for byte in chunk:
                if limit is not None and len(held) - start >= limit:
                    raise httpx.WriteError("broken pipe")
                held.append(byte)
        assert len(held) - start == int(request.headers["content-length"])
        return httpx.Response(202, headers={"Location": str(request.url)})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    monkeypatch.setattr(client_transfer, "_BACKOFF_SECONDS", 0)
    monkeypatch.setattr(client_transfer, "CHUNK_BYTES", 1000)
    return FakeRegistry()


def weights(size: int = 5000, dtype: str = "F32") -> bytes:
    header = json.dumps({"a": {"dtype": dtype, "shape": [1], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(i % 251 for i in range(size))


def adapter_files(folder: Path) -> list[PublishFile]:
    (folder / "w").write_bytes(weights())
    return [
        PublishFile("adapter_model.safetensors", folder / "w"),
        PublishFile("adapter_config.json", b"{}"),
    ]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "UNAUTHENTICATED", UnauthenticatedError),
        (403, "FORBIDDEN", ForbiddenError),
        (403, "QUOTA_EXCEEDED", QuotaExceededError),
        (404, "NOT_FOUND", NotFoundError),
        (409, "CONFLICT", ConflictError),
        (409, "LEASE_LOST", LeaseLostError),
        (412, "STALE_GENERATION", ConflictError),
        (413, "TOO_LARGE", TooLargeError),
        (422, "REFUSED", RefusedError),
        (428, "PRECONDITION_REQUIRED", MalformedError),
        (500, "INTERNAL", RegistryError),
        (503, "CORRUPT_STORE", CorruptStoreError),
        (504, None, UnavailableError),
    ],
)
def test_a_problem_becomes_the_error_of_its_code(
    status: int, code: str | None, kind: type[RegistryError]
) -> None:
    with pytest.raises(kind, match="the reason") as caught:
        answering(status, {"code": code, "detail": "the reason"}).whoami()
    assert type(caught.value) is kind


def test_a_problem_carries_its_findings_and_when_to_try_again() -> None:
    found = {"check": 5, "code": "SHAPE_MISMATCH", "where": "q", "expected": "1", "got": "2"}
    items = [{**found, "severity": "refuse"}, {"check": "odd"}]
    with pytest.raises(RefusedError) as refused:
        answering(422, {"code": "REFUSED", "detail": "no", "findings": items}).whoami()
    assert [finding.where for finding in refused.value.findings] == ["q"]
    with pytest.raises(UnavailableError) as unavailable:
        answering(503, {"code": "UNAVAILABLE", "detail": "no"}, **{"Retry-After": "9"}).whoami()
    assert unavailable.value.retry_after == 9


def test_an_oci_error_keeps_our_code() -> None:
    body = {"errors": [{"code": "DENIED", "message": "no", "detail": {"code": "QUOTA_EXCEEDED"}}]}
    with pytest.raises(QuotaExceededError, match="no"):
        answering(403, body).manifest("t", "a", "v1")


@pytest.mark.parametrize("content", [b"<html>", b"[]", b""])
def test_an_answer_of_something_else_is_still_an_error(content: bytes) -> None:
    client = client_with(lambda _: httpx.Response(502, content=content))
    with pytest.raises(UnavailableError, match="502"):
        client.whoami()


def test_no_connection_is_unavailable_and_says_where() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        client_with(handler).whoami()


@pytest.mark.parametrize(
    "error",
    [
        httpx.DecodingError("not gzip"),
        httpx.TooManyRedirects("round and round"),
        httpx.ReadTimeout(""),
        httpx.RemoteProtocolError("no status"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_goes_wrong_on_the_way_is_unavailable(error: httpx.RequestError) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        error.request = request
        raise error

    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        client_with(handler).whoami()


def test_an_answer_that_cannot_be_decoded_is_unavailable() -> None:
    client = client_with(
        lambda _: httpx.Response(
            200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")
        )
    )
    with pytest.raises(UnavailableError, match="no answer"):
        client.whoami()


@pytest.mark.parametrize("location", [None, "http://[::1", "http://127.0.0.1:1/\x00"])
def test_an_upload_that_is_nowhere_is_unavailable(location: str | None, tmp_path: Path) -> None:
    headers = {} if location is None else {"Location": location}
    client = client_with(lambda _: httpx.Response(202, headers=headers))
    with pytest.raises(UnavailableError):
        client.push("t", "a", adapter_files(tmp_path))


@pytest.mark.parametrize("url", ["localhost:8400", "ftp://x", "http://", ""])
def test_an_address_in_another_form_is_malformed(url: str) -> None:
    with pytest.raises(MalformedError, match="url"):
        RegistryClient(url, None)


def test_lists_follow_the_cursor_and_leave_out_absent_filters() -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        last = "cursor" in request.url.params
        return httpx.Response(
            200, json={"items": [{"n": len(asked)}], "nextCursor": None if last else "c"}
        )

    items = list(client_with(handler).artifact_list(tenant="t", state=None))
    assert [item["n"] for item in items] == [1, 2]
    assert asked == [{"tenant": "t"}, {"tenant": "t", "cursor": "c"}]


def test_names_cannot_leave_their_place_in_the_path() -> None:
    paths = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        assert request.headers["authorization"] == "Bearer art_secret"
        return httpx.Response(200, json={})

    client_with(handler).artifact_show("../x", "sha256:" + "0" * 64)
    assert paths == [b"/v1/tenants/..%2Fx/artifacts/sha256:" + b"0" * 64]


def test_a_job_is_claimed_or_there_is_none() -> None:
    assert client_with(lambda _: httpx.Response(204)).job_claim("w", ["validate"], []) is None
    assert answering(200, {"id": "1"}).job_claim("w", ["validate"], []) == {"id": "1"}


def test_moving_an_alias_names_the_generation() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.headers["if-match"] == '"3"'
        return httpx.Response(200, json={"generation": 4})

    moved = client_with(handler).alias_set("t", "a", "prod", "sha256:" + "0" * 64, 3, "why")
    assert moved["generation"] == 4


def test_push_uploads_blobs_then_the_manifest_under_its_label(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    seen: list[tuple[str, int, int]] = []
    digest = client_with(registry).push(
        "t", "a", adapter_files(tmp_path), "v1", lambda *step: seen.append(step)
    )
    assert registry.blobs[digest_of(weights())] == weights()
    assert set(registry.manifests) == {"v1"}
    assert digest_of(registry.manifests["v1"]) == digest
    assert seen[-2][0] == "adapter_model.safetensors"
    assert seen[-2][1] == seen[-2][2] == len(weights())
    config = json.loads(registry.blobs[json.loads(registry.manifests["v1"])["config"]["digest"]])
    assert config["config"] == {"format": "safetensors", "precision": "fp32"}


def test_the_same_files_have_the_same_digest_in_any_order(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    files = adapter_files(tmp_path)
    client = client_with(registry)
    assert client.push("t", "a", files) == client.push("t", "a", list(reversed(files)))


@pytest.mark.parametrize("breaks", [[2500], [0], [1], [1000, 1], [7, 7, 7]])
def test_push_continues_after_a_broken_connection(
    registry: FakeRegistry, tmp_path: Path, breaks: list[int]
) -> None:
    registry.break_after = list(breaks)
    client_with(registry).push("t", "a", adapter_files(tmp_path))
    assert registry.blobs[digest_of(weights())] == weights()
    assert "GET" in registry.log


def test_push_continues_when_the_last_answer_is_lost(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    registry.lose_put_answer = 1
    client_with(registry).push("t", "a", adapter_files(tmp_path))
    assert registry.blobs[digest_of(weights())] == weights()


def test_push_starts_again_when_the_upload_is_gone(registry: FakeRegistry, tmp_path: Path) -> None:
    registry.break_after, registry.forget_uploads = [100], 1
    client_with(registry).push("t", "a", adapter_files(tmp_path))
    assert registry.blobs[digest_of(weights())] == weights()


def test_push_gives_up_after_a_bounded_number_of_tries(
    registry: FakeRegistry, tmp_path: Path
) -> None:
    registry.break_after = [0] * 100
    with pytest.raises(UnavailableError):
        client_with(registry).push("t", "a", adapter_files(tmp_path))
    assert registry.log.count("PATCH") == client_transfer.UPLOAD_TRIES


def test_push_does_not_repeat_what_is_refused(tmp_path: Path) -> None:
    asked = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(403, json={"errors": [{"code": "DENIED", "message": "no"}]})

    with pytest.raises(ForbiddenError):
        client_with(handler).push("t", "a", adapter_files(tmp_path))
    assert len(asked) == 1


def test_push_refuses_a_file_that_no_adapter_has(registry: FakeRegistry) -> None:
    with pytest.raises(MalformedError, match="no such file"):
        client_with(registry).push("t", "a", [PublishFile("optimizer.pt", b"x")])
    assert registry.log == []


def test_the_token_goes_to_no_other_host(tmp_path: Path) -> None:
    location = {"Location": "http://evil.example/v2/upload"}
    client = client_with(lambda _: httpx.Response(202, headers=location))
    with pytest.raises(RefusedError, match="another host"):
        client.push("t", "a", adapter_files(tmp_path))


def pushed(registry: FakeRegistry, folder: Path) -> str:
    return client_with(registry).push("t", "a", adapter_files(folder))


def test_pull_writes_verified_read_only_files(registry: FakeRegistry, tmp_path: Path) -> None:
    digest = pushed(registry, tmp_path)
    manifest = client_with(registry).pull("t", "a", digest, tmp_path / "x" / "out")
    assert manifest.digest == digest
    target = tmp_path / "x" / "out" / "adapter_model.safetensors"
    assert target.read_bytes() == weights()
    assert target.stat().st_mode & 0o777 == 0o444
    assert [entry.name for entry in (tmp_path / "x").iterdir()] == ["out"]


@pytest.mark.parametrize("spoil", ["flip", "cut", "longer", "empty", "manifest", "gone"])
def test_pull_leaves_nothing_behind_when_bytes_differ(
    registry: FakeRegistry, tmp_path: Path, spoil: str
) -> None:
    digest = pushed(registry, tmp_path)
    blob = digest_of(weights())
    changed = {
        "flip": weights()[:-1] + b"\x01",
        "cut": weights()[:-1],
        "longer": weights() + b"\x00",
        "empty": b"",
    }
    if spoil in changed:
        registry.blobs[blob] = changed[spoil]
    elif spoil == "manifest":
        registry.manifests[digest] = registry.manifests[digest] + b" "
    else:
        del registry.blobs[blob]
    into = tmp_path / "into" / "out"
    with pytest.raises(NotFoundError if spoil == "gone" else UntrustedError):
        client_with(registry).pull("t", "a", digest, into)
    assert not into.parent.exists() or not list(into.parent.iterdir())


def test_pull_refuses_a_folder_that_exists(registry: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="exists"):
        client_with(registry).pull("t", "a", "sha256:" + "0" * 64, tmp_path)


def test_pull_takes_a_digest_only(registry: FakeRegistry, tmp_path: Path) -> None:
    with pytest.raises(MalformedError):
        client_with(registry).pull("t", "a", "prod", tmp_path / "out")


def test_the_last_chunk_comes_after_the_check(registry: FakeRegistry) -> None:
    registry.blobs["sha256:" + "0" * 64] = b"x" * 2500
    chunks: Iterator[bytes] = client_with(registry).blob_stream("t", "a", "sha256:" + "0" * 64)
    assert len(next(chunks) + next(chunks)) == 2000
    with pytest.raises(UntrustedError):
        next(chunks)


def test_a_manifest_over_its_limit_is_refused() -> None:
    client = client_with(lambda _: httpx.Response(200, content=b" " * 300_000))
    with pytest.raises(UntrustedError, match="more than"):
        client.manifest("t", "a", "v1")


def test_the_reader_hashes_each_byte_once_from_any_offset(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "f").write_bytes(data)
    for offsets in ([], [77], [0, 77], [1_100_000, 0, 3], [len(data)]):
        with HashingReader(tmp_path / "f") as reader:
            for offset in offsets:
                next(reader.chunks(offset), None)
            for offset in offsets:
                assert b"".join(reader.chunks(offset)) == data[offset:]
            assert reader.digest() == "sha256:" + hashlib.sha256(data).hexdigest()


def test_a_file_that_cannot_be_read_is_malformed(tmp_path: Path) -> None:
    with pytest.raises(MalformedError, match="cannot read"):
        HashingReader(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "precision"),
    [
        (weights(dtype="BF16"), "bf16"),
        (b"", "mixed"),
        (b"\x80\x04", "mixed"),
        (b"\xff" * 9, "mixed"),
    ],
)
def test_precision_is_read_from_the_header(content: bytes, precision: str) -> None:
    assert precision_of([PublishFile("adapter_model.safetensors", content)]) == precision
