"""The data plane against real OCI clients, and each refusal with its OCI error code."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from registry_service.domain import limits
from registry_service.domain.digests import digest_of
from registry_service.domain.manifest import MANIFEST_MEDIA_TYPE
from tests.integration.conftest import World, basic

REPOSITORY = "/v2/t-1042/support-zh"


def publisher(world: World) -> httpx.Client:
    headers = basic(world.tokens["publisher:t-1042"])
    return httpx.Client(base_url=world.url, headers=headers, timeout=60)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["errors"][0]["code"]


def begin(client: httpx.Client) -> str:
    response = client.post(f"{REPOSITORY}/blobs/uploads/")
    assert response.status_code == 202
    return response.headers["location"]


def test_oras_pulls_by_digest_label_and_alias(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    import oras.client

    digest = world.admit(tmp_path / "a", label="v1")
    with world.client("operator") as operator:
        operator.alias_set("t-1042", "support-zh", "prod", digest, 0, "first")
    host = urlsplit(world.url).netloc
    client = oras.client.OrasClient(hostname=host, insecure=True, auth_backend="basic")
    client.auth.set_basic_auth("node", world.tokens["node"])
    for number, reference in enumerate((f"@{digest}", ":v1", ":prod")):
        target = tmp_path / f"pulled-{number}"
        client.pull(target=f"{host}/t-1042/support-zh{reference}", outdir=str(target))
        for file in (tmp_path / "a").iterdir():
            assert (target / file.name).read_bytes() == file.read_bytes()


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
def test_skopeo_copies_a_conforming_artifact_in(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a", label="v1")
    host = urlsplit(world.url).netloc
    layout = f"oci:{tmp_path / 'layout'}:v1"
    copy = ["skopeo", "--insecure-policy", "copy", "--preserve-digests"]
    subprocess.run(
        [*copy, "--src-tls-verify=false", "--src-creds", f"n:{world.tokens['node']}"]
        + [f"docker://{host}/t-1042/support-zh:v1", layout],
        check=True,
        capture_output=True,
    )
    subprocess.run(
        [*copy, "--dest-tls-verify=false", "--dest-creds"]
        + [f"p:{world.tokens['publisher:t-1042']}", layout]
        + [f"docker://{host}/t-1042/support-zh:v1-copy"],
        check=True,
        capture_output=True,
    )
    with world.client("operator") as operator:
        labels = operator.artifact_show("t-1042", digest)["labels"]
    assert labels == ["v1", "v1-copy"]


def test_a_broken_upload_continues_where_it_stopped(world: World) -> None:
    content = bytes(range(256)) * 8192
    half = len(content) // 2
    with publisher(world) as client:
        location = begin(client)
        split = urlsplit(world.url)
        with socket.create_connection((split.hostname, split.port)) as raw:
            head = (
                f"PATCH {location} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
                f"Authorization: {client.headers['authorization']}\r\n\r\n"
            )
            raw.sendall(head.encode() + content[:half])
        offset = 0
        for _ in range(200):
            status = client.get(location)
            assert status.status_code == 204
            offset = int(status.headers["range"].split("-")[1]) + 1
            if offset == half:
                break
        rest = client.patch(
            location,
            content=content[offset:],
            headers={"Content-Range": f"{offset}-{len(content) - 1}"},
        )
        assert rest.status_code == 202
        digest = "sha256:" + hashlib.sha256(content).hexdigest()
        assert client.put(location, params={"digest": digest}).status_code == 201
        assert client.put(location, params={"digest": digest}).status_code == 201
        whole = client.get(f"{REPOSITORY}/blobs/{digest}")
        assert whole.content == content
        part = client.get(f"{REPOSITORY}/blobs/{digest}", headers={"Range": "bytes=10-19"})
        assert (part.status_code, part.content) == (206, content[10:20])


def test_a_wrong_digest_is_refused(world: World) -> None:
    with publisher(world) as client:
        location = begin(client)
        client.patch(location, content=b"abc")
        answer = client.put(location, params={"digest": digest_of(b"abd")})
    assert code(answer) == (400, "DIGEST_INVALID")


def test_an_out_of_order_range_is_refused(world: World) -> None:
    with publisher(world) as client:
        location = begin(client)
        client.patch(location, content=b"abc", headers={"Content-Range": "0-2"})
        answer = client.patch(location, content=b"xyz", headers={"Content-Range": "9-11"})
    assert code(answer) == (416, "BLOB_UPLOAD_INVALID")


def test_an_oversize_body_is_refused_before_it_is_sent(world: World) -> None:
    with publisher(world) as client:
        location = begin(client)
        split = urlsplit(world.url)
        with socket.create_connection((split.hostname, split.port)) as raw:
            head = (
                f"PATCH {location} HTTP/1.1\r\nHost: x\r\n"
                f"Content-Length: {limits.WEIGHT_BYTES + 1}\r\n"
                f"Authorization: {client.headers['authorization']}\r\n\r\n"
            )
            raw.sendall(head.encode())
            answer = raw.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 413")


def test_an_unknown_media_type_is_refused(world: World) -> None:
    with publisher(world) as client:
        answer = client.put(
            f"{REPOSITORY}/manifests/v1",
            content=b"{}",
            headers={"Content-Type": "application/vnd.docker.distribution.manifest.v2+json"},
        )
    assert code(answer) == (415, "UNSUPPORTED")


def test_a_malformed_manifest_is_refused(world: World) -> None:
    with publisher(world) as client:
        answer = client.put(
            f"{REPOSITORY}/manifests/v1",
            content=b'{"schemaVersion":2}',
            headers={"Content-Type": MANIFEST_MEDIA_TYPE},
        )
    assert code(answer) == (400, "MANIFEST_INVALID")


def test_somebody_elses_repository_looks_like_none(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a", label="v1")
    with httpx.Client(
        base_url=world.url, headers=basic(world.tokens["publisher:t-2001"]), timeout=60
    ) as client:
        theirs = client.get(f"{REPOSITORY}/manifests/v1")
        none = client.get("/v2/t-9999/nothing/manifests/v1")
        assert (theirs.status_code, theirs.json()) == (none.status_code, none.json())
        assert code(theirs) == (404, "MANIFEST_UNKNOWN")
        push = client.post(f"{REPOSITORY}/blobs/uploads/")
        push_none = client.post("/v2/t-9999/nothing/blobs/uploads/")
        assert code(push) == code(push_none) == (403, "DENIED")
        mount = client.post(
            "/v2/t-2001/mine/blobs/uploads/",
            params={"mount": digest, "from": "t-1042/support-zh"},
        )
        assert mount.status_code == 202


def test_nothing_is_deleted(world: World, tmp_path: Path) -> None:
    digest = world.admit(tmp_path / "a")
    with publisher(world) as client:
        for path in ("manifests", "blobs"):
            assert code(client.delete(f"{REPOSITORY}/{path}/{digest}")) == (405, "UNSUPPORTED")


def test_no_token_is_challenged(world: World) -> None:
    answer = httpx.get(f"{world.url}/v2/", timeout=60)
    assert code(answer) == (401, "UNAUTHORIZED")
    assert answer.headers["www-authenticate"].startswith("Basic realm=")


def test_an_unapproved_artifact_is_for_checkers_only(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a", label="v1")
    for role, status in (("node", 404), ("operator", 404), ("validator", 200), ("reviewer", 200)):
        answer = httpx.get(
            f"{world.url}{REPOSITORY}/manifests/{digest}",
            headers=basic(world.tokens[role]),
            timeout=60,
        )
        assert answer.status_code == status, role
