"""Names and tokenizer files of an adapter, through the data plane and the scan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from registry_service.client_transfer import PublishFile
from registry_service.domain.digests import Digest
from registry_service.domain.manifest import (
    ADAPTER_PATHS,
    DOC_MEDIA_TYPE,
    FILEPATH_ANNOTATION,
    MANIFEST_MEDIA_TYPE,
    TITLE_ANNOTATION,
    WEIGHT_CONFIG_MEDIA_TYPE,
    FileEntry,
    adapter_manifest_build,
    media_type_of,
)
from tests.integration.conftest import World

DIGEST = Digest("sha256:" + "0" * 64)
NAMES = {
    "up": "../adapter_config.json",
    "absolute": "/etc/passwd",
    "a folder": "sub/README.md",
    "a Windows folder": "sub\\README.md",
    "a drive": "C:\\README.md",
    "hidden": ".gitattributes",
    "the folder itself": "..",
    "NUL": "README.md\0",
    "a newline": "README.md\n",
    "an escape sequence": "README\u001b[2J.md",
    "a bidirectional mark": "README\u202edm.md",
    "a look-alike": "READM\u0415.md",
    "a width of nothing": "README\u200b.md",
    "no characters": "",
    "too many characters": "a" * 256,
}


def manifest(path: str) -> bytes:
    """A manifest of one file, in canonical form, whose annotations say this path."""
    good = adapter_manifest_build(
        "support-zh", [FileEntry("README.md", DIGEST, 1, DOC_MEDIA_TYPE)], "fp32"
    )
    fields: dict[str, Any] = json.loads(good.manifest)
    fields["layers"][0]["annotations"] = {FILEPATH_ANNOTATION: path, TITLE_ANNOTATION: path}
    # As RFC 8785 writes them: sorted, without spaces, only control characters escaped.
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def put(world: World, content: bytes) -> httpx.Response:
    return httpx.put(
        f"{world.url}/v2/t-1042/support-zh/manifests/v1",
        headers={
            "Authorization": f"Bearer {world.tokens['publisher:t-1042']}",
            "Content-Type": MANIFEST_MEDIA_TYPE,
        },
        content=content,
        timeout=60,
    )


@pytest.mark.parametrize("path", NAMES.values(), ids=NAMES)
def test_a_manifest_with_a_hostile_path_is_refused(world: World, path: str) -> None:
    answer = put(world, manifest(path))
    assert answer.status_code == 400
    (error,) = answer.json()["errors"]
    assert error["code"] == "MANIFEST_INVALID"
    assert "layers[0]: expected a flat ASCII file name" in error["message"]
    # The name comes back in a form that does nothing to a terminal.
    assert all(32 <= ord(character) < 127 or character == "…" for character in error["message"])


def test_the_same_manifest_with_a_good_path_is_asked_for_its_blobs(world: World) -> None:
    answer = put(world, manifest("README.md"))
    assert [error["code"] for error in answer.json()["errors"]] != ["MANIFEST_INVALID"]


def any_media_type(path: str) -> str:
    if path in ADAPTER_PATHS:
        return media_type_of(path)
    return WEIGHT_CONFIG_MEDIA_TYPE if path == "config.json" else DOC_MEDIA_TYPE


FILES = {
    "modeling_x.py": (b"import os\n", "FILE_NAME_FORBIDDEN"),
    "config.json": (b'{"auto_map": {}}', "FILE_NAME_FORBIDDEN"),
    "adapter_model.bin": (b"\x80\x02K\x01.", "CONTENT_PICKLE"),
    "tokenizer_config.json": (b'{"auto_map": {"AutoTokenizer": "x.Y"}}', "CONFIG_FIELD_FORBIDDEN"),
    "special_tokens_map.json": (b'{"vocab_file": "/etc/passwd"}', "CONFIG_FIELD_FORBIDDEN"),
    "README.md": (b"<html>404</html>", "CONTENT_SCRIPT"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_beside_a_good_adapter_is_rejected_by_its_code(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Our client has no type for such names; another client may use any that a layer can have.
    monkeypatch.setattr("registry_service.client_transfer.media_type_of", any_media_type)
    content, code = FILES[name]
    names = [*world.folder(tmp_path), name]
    (tmp_path / name).write_bytes(content)
    with world.client("publisher:t-1042") as client:
        files = [PublishFile(path, tmp_path / path) for path in sorted({*names})]
        digest = client.push("t-1042", "support-zh", files)
        world.settle()
        assert client.artifact_show("t-1042", digest)["state"] == "REJECTED"
        (scan,) = client.report_list("t-1042", digest)
    assert code in {f["code"] for f in scan["findings"] if f["severity"] == "refuse"}
