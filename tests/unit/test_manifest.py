"""The manifest: one form, one digest, and a reason for every other form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from registry_service.domain import manifest as m
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError

FILES = tuple(
    m.FileEntry(path, digest_of(path.encode()), size, m.media_type_of(path))
    for path, size in (
        ("adapter_model.safetensors", 4096),
        ("adapter_config.json", 512),
        ("adapter-declaration.json", 300),
        ("tokenizer.json", 9),
        ("README.md", 7),
    )
)


def build() -> m.BuiltManifest:
    return m.adapter_manifest_build("support-zh", FILES, "bfloat16")


def changed(**fields: object) -> bytes:
    return canonical_json(json.loads(build().manifest) | fields)


def layers_changed(index: int, **fields: object) -> bytes:
    layers = json.loads(build().manifest)["layers"]
    layers[index] |= fields
    return changed(layers=layers)


def test_the_same_files_in_any_order_give_the_same_bytes() -> None:
    built = build()
    assert m.adapter_manifest_build("support-zh", FILES[::-1], "bfloat16") == built
    assert built.digest == digest_of(built.manifest)
    # The digest is part of the product: a change of one byte of the form changes it.
    assert built.digest == GOLDEN


GOLDEN = "sha256:41240c033fa7325737c7877169e9f79dd3f95a36ebdf12168ace09f4f5885c91"


def test_parse_returns_what_was_built() -> None:
    parsed = m.manifest_parse(build().manifest)
    assert parsed.files == tuple(sorted(FILES, key=lambda file: file.path))
    assert parsed.config_digest == digest_of(build().config)
    assert parsed.config_size == len(build().config)
    assert not parsed.subject


def test_form_is_modelpack() -> None:
    document = json.loads(build().manifest)
    assert document["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    layer = document["layers"][2]
    assert layer["mediaType"] == "application/vnd.cncf.model.weight.config.v1.raw"
    assert layer["annotations"] == {
        "org.cncf.model.filepath": "adapter_config.json",
        "org.opencontainers.image.title": "adapter_config.json",
    }
    assert json.loads(build().config) == {
        "descriptor": {"name": "support-zh"},
        "config": {"format": "safetensors", "precision": "bfloat16"},
        "modelfs": {"type": "layers", "diffIds": [entry["digest"] for entry in document["layers"]]},
    }


def test_config_is_checked_against_the_manifest() -> None:
    built = build()
    parsed = m.manifest_parse(built.manifest)
    assert m.manifest_config_check(built.config, parsed) == "support-zh"
    documents: tuple[Any, ...] = (
        json.loads(built.config) | {"extra": 1},
        json.loads(built.config) | {"descriptor": {"name": "support-zh", "createdAt": "now"}},
        json.loads(built.config) | {"modelfs": {"type": "layers", "diffIds": []}},
        {},
        [],
    )
    for document in documents:
        other = canonical_json(document)
        with pytest.raises(MalformedError, match="config"):
            m.manifest_config_check(other, replace(parsed, config_digest=digest_of(other)))
    with pytest.raises(MalformedError, match="bytes of digest"):
        m.manifest_config_check(b"{}", parsed)


def test_a_base_has_no_name_in_its_digest() -> None:
    files = [
        m.FileEntry("config.json", digest_of(b"c"), 1, m.WEIGHT_CONFIG_MEDIA_TYPE),
        m.FileEntry("model.safetensors", digest_of(b"w"), 1, m.WEIGHT_MEDIA_TYPE),
    ]
    one, two = (m.base_manifest_build(name, files, "bfloat16") for name in ("one", "two"))
    assert one == two


def test_a_statement_is_recognised() -> None:
    subject = {"mediaType": m.MANIFEST_MEDIA_TYPE, "digest": digest_of(b""), "size": 0}
    assert m.manifest_parse(changed(subject=subject)).subject


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (json.dumps(json.loads(build().manifest)).encode(), "RFC 8785"),
        (build().manifest + b"\n", "RFC 8785"),
        (b"[]", "object"),
        (b"{", "not JSON"),
        (b'{"a":1,"a":1}', "twice"),
        (changed(annotations={"org.opencontainers.image.created": "x"}), "exactly"),
        (changed(schemaVersion=1), "schemaVersion"),
        (changed(mediaType="application/json"), "mediaType"),
        (changed(artifactType="application/vnd.unknown"), "artifactType"),
        (changed(subject={"digest": "x"}), "subject"),
        (changed(layers=[]), "at least one"),
        (changed(layers=json.loads(build().manifest)["layers"][::-1]), "sorted"),
        (changed(layers=json.loads(build().manifest)["layers"][:1] * 2), "once"),
        (layers_changed(0, size=-1), "size"),
        (layers_changed(0, size=True), "size"),
        (layers_changed(0, size="1"), "size"),
        (layers_changed(0, digest="md5:1"), "sha256"),
        (layers_changed(0, urls=["http://x"]), "expected mediaType"),
        (layers_changed(0, annotations={}), "annotations"),
        (layers_changed(0, mediaType="application/x-tar"), "media type"),
        (layers_changed(2, mediaType=m.WEIGHT_MEDIA_TYPE), "media type"),
    ],
)
def test_another_form_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(MalformedError, match=reason):
        m.manifest_parse(content)


@pytest.mark.parametrize("path", ["../x", "a/b", "a\\b", "", ".hidden", "a\x00", "a\u202eb", "ä"])
def test_a_path_that_is_not_flat_is_refused(path: str) -> None:
    notes = {m.FILEPATH_ANNOTATION: path, m.TITLE_ANNOTATION: path}
    with pytest.raises(MalformedError):
        m.manifest_parse(layers_changed(0, annotations=notes))


@pytest.mark.parametrize("files", [(), FILES + FILES[:1]])
def test_nothing_is_built_that_would_not_parse(files: tuple[m.FileEntry, ...]) -> None:
    with pytest.raises(MalformedError):
        m.adapter_manifest_build("support-zh", files, "bfloat16")


def test_media_type_of_refuses_other_files() -> None:
    with pytest.raises(MalformedError):
        m.media_type_of("adapter_model.bin")
