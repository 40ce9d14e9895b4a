"""The manifest: an OCI image manifest in ModelPack form whose bytes name the artifact.

It is RFC 8785 JSON with its layers sorted by path and no timestamps, so that the same input gives
the same digest on every machine. A manifest in another form is refused with the reason.
Sources: OCI image-spec 1.1 (image manifest), CNCF ModelPack model-spec (media types).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.digests import Digest, digest_equal, digest_of, digest_parse
from registry_service.domain.errors import MalformedError
from registry_service.domain.text import shown

MANIFEST_MEDIA_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
ARTIFACT_TYPE: Final = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_MEDIA_TYPE: Final = "application/vnd.cncf.model.config.v1+json"
WEIGHT_MEDIA_TYPE: Final = "application/vnd.cncf.model.weight.v1.raw"
WEIGHT_CONFIG_MEDIA_TYPE: Final = "application/vnd.cncf.model.weight.config.v1.raw"
DOC_MEDIA_TYPE: Final = "application/vnd.cncf.model.doc.v1.raw"
DECLARATION_MEDIA_TYPE: Final = "application/vnd.adapter-registry.declaration.v1+json"

FILEPATH_ANNOTATION: Final = "org.cncf.model.filepath"
TITLE_ANNOTATION: Final = "org.opencontainers.image.title"

WEIGHT_PATH: Final = "adapter_model.safetensors"
CONFIG_PATH: Final = "adapter_config.json"
DECLARATION_PATH: Final = "adapter-declaration.json"
TOKENIZER_PATHS: Final = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
        "tokenizer.model",
        "chat_template.jinja",
    }
)
DOC_PATHS: Final = frozenset({"README.md", "evaluation-report.json"})
REQUIRED_PATHS: Final = frozenset({WEIGHT_PATH, CONFIG_PATH, DECLARATION_PATH})
ADAPTER_PATHS: Final = REQUIRED_PATHS | TOKENIZER_PATHS | DOC_PATHS

_BASE_CONFIG_PATH: Final = "config.json"
_LAYER_MEDIA_TYPES: Final = frozenset(
    {WEIGHT_MEDIA_TYPE, WEIGHT_CONFIG_MEDIA_TYPE, DOC_MEDIA_TYPE, DECLARATION_MEDIA_TYPE}
)
# The weights of a base may be many shards; an adapter's files are counted by check 1.
_LAYERS: Final = 1_024
_PRECISION = re.compile(r"[a-z0-9][a-z0-9._-]{0,31}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact: path, blob digest, size in bytes, media type of its layer."""

    path: str
    digest: Digest
    size: int
    media_type: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A parsed manifest. ``subject`` is true for a statement about another manifest."""

    digest: Digest
    config_digest: Digest
    config_size: int
    files: tuple[FileEntry, ...]
    subject: bool


@dataclass(frozen=True, slots=True)
class BuiltManifest:
    """Manifest and config blob as bytes, and the digest that names the artifact."""

    manifest: bytes
    config: bytes
    digest: Digest


def media_type_of(path: str) -> str:
    """The layer media type of an adapter's file.

    Raises:
        MalformedError: an adapter has no such file.
    """
    if path == WEIGHT_PATH:
        return WEIGHT_MEDIA_TYPE
    if path == DECLARATION_PATH:
        return DECLARATION_MEDIA_TYPE
    if path == CONFIG_PATH or path in TOKENIZER_PATHS:
        return WEIGHT_CONFIG_MEDIA_TYPE
    if path in DOC_PATHS:
        return DOC_MEDIA_TYPE
    raise MalformedError(f"file {shown(path)}: an adapter has no such file")


def adapter_manifest_build(
    adapter: str, files: Sequence[FileEntry], precision: str
) -> BuiltManifest:
    """The manifest of an adapter's files, in any order.

    Raises:
        MalformedError: no files, a path that is not flat or occurs twice, a wrong media type.
    """
    return _build(adapter, files, precision)


def base_manifest_build(base: str, files: Sequence[FileEntry], precision: str) -> BuiltManifest:
    """The manifest of a base's ``config.json`` and weight files.

    The base's short name is the registry's and may change hands: it is not part of the digest.

    Raises:
        MalformedError: no files, a path that is not flat or occurs twice, a wrong media type.
    """
    del base
    return _build("base", files, precision)


def manifest_parse(content: bytes) -> Manifest:
    """Parse a manifest.

    Raises:
        MalformedError: not canonical, an unknown or missing field, an unsorted or repeated path.
    """
    document = json_parse(content, what="manifest", limit=limits.MANIFEST_BYTES)
    if not isinstance(document, dict):
        raise MalformedError("manifest: expected an object")
    _subject_check(document)
    fields = set(document) - {"subject"}
    wanted = {"schemaVersion", "mediaType", "artifactType", "config", "layers"}
    if fields != wanted:
        raise MalformedError(
            f"manifest: expected exactly {', '.join(sorted(wanted))}, got "
            f"{shown(', '.join(sorted(fields)))}"
        )
    _fixed(document, "schemaVersion", 2)
    _fixed(document, "mediaType", MANIFEST_MEDIA_TYPE)
    _fixed(document, "artifactType", ARTIFACT_TYPE)
    config = _descriptor(document["config"], "config", frozenset())
    if config.media_type != CONFIG_MEDIA_TYPE:
        raise MalformedError(f"manifest: config: expected media type {CONFIG_MEDIA_TYPE}")
    files = _layers(document["layers"])
    if canonical_json(document) != content:
        raise MalformedError("manifest: expected RFC 8785 JSON; build it with 'adapterctl publish'")
    return Manifest(
        digest_of(content), config.digest, config.size, files, subject="subject" in document
    )


def manifest_config_check(config: bytes, manifest: Manifest) -> str:
    """The name in a config blob, when the blob says exactly what the manifest says.

    Raises:
        MalformedError: other bytes than the manifest names, another form, or other layers.
    """
    if not digest_equal(digest_of(config), manifest.config_digest):
        raise MalformedError(f"config: expected bytes of digest {manifest.config_digest}")
    document = json_parse(config, what="config", limit=limits.MANIFEST_BYTES)
    try:
        name, precision = document["descriptor"]["name"], document["config"]["precision"]
    except (KeyError, TypeError) as error:
        raise MalformedError("config: expected descriptor.name and config.precision") from error
    # Writing it again gives the same bytes: nothing unknown or in another form was read.
    if not isinstance(name, str) or _config(name, precision, manifest.files) != config:
        raise MalformedError(
            "config: expected RFC 8785 JSON with exactly descriptor.name, config.format "
            "'safetensors', config.precision, and modelfs with the layers' digests in order"
        )
    return name


def _config(name: str, precision: Any, files: Sequence[FileEntry]) -> bytes:
    if not isinstance(precision, str) or not _PRECISION.fullmatch(precision):
        raise MalformedError(f"config: precision: expected a dtype's name, got {shown(precision)}")
    return canonical_json(
        {
            "descriptor": {"name": name},
            "config": {"format": "safetensors", "precision": precision},
            "modelfs": {"type": "layers", "diffIds": [file.digest for file in files]},
        }
    )


def _build(name: str, files: Sequence[FileEntry], precision: str) -> BuiltManifest:
    ordered = sorted(files, key=lambda file: file.path)
    config = _config(name, precision, ordered)
    manifest = canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_MEDIA_TYPE,
            "artifactType": ARTIFACT_TYPE,
            "config": {
                "mediaType": CONFIG_MEDIA_TYPE,
                "digest": digest_of(config),
                "size": len(config),
            },
            "layers": [
                {
                    "mediaType": file.media_type,
                    "digest": file.digest,
                    "size": file.size,
                    "annotations": {FILEPATH_ANNOTATION: file.path, TITLE_ANNOTATION: file.path},
                }
                for file in ordered
            ],
        }
    )
    # What is built here is accepted everywhere: the parser is the one place that decides.
    return BuiltManifest(manifest, config, manifest_parse(manifest).digest)


def _subject_check(document: Mapping[str, Any]) -> None:
    if "subject" in document:
        _descriptor(document["subject"], "subject", frozenset())


def _layers(value: Any) -> tuple[FileEntry, ...]:
    if not isinstance(value, list) or not value:
        raise MalformedError("manifest: layers: expected a list with at least one layer")
    if len(value) > _LAYERS:
        raise MalformedError(f"manifest: layers: expected at most {_LAYERS}, got {len(value)}")
    files = [_layer(layer, f"layers[{index}]") for index, layer in enumerate(value)]
    paths = [file.path for file in files]
    if paths != sorted(set(paths)):
        raise MalformedError("manifest: layers: expected each path once, sorted by path")
    return tuple(files)


def _layer(layer: Any, place: str) -> FileEntry:
    entry = _descriptor(layer, place, frozenset({"annotations"}))
    notes = layer["annotations"]
    if (
        not isinstance(notes, dict)
        or set(notes) != {FILEPATH_ANNOTATION, TITLE_ANNOTATION}
        or not isinstance(notes[FILEPATH_ANNOTATION], str)
        or notes[FILEPATH_ANNOTATION] != notes[TITLE_ANNOTATION]
    ):
        raise MalformedError(
            f"manifest: {place}: expected annotations {FILEPATH_ANNOTATION} and "
            f"{TITLE_ANNOTATION}, both the file's path"
        )
    path = notes[FILEPATH_ANNOTATION]
    _path_check(path, place)
    _media_type_check(path, entry.media_type, place)
    return FileEntry(path, entry.digest, entry.size, entry.media_type)


def _media_type_check(path: str, media_type: str, place: str) -> None:
    """A known file has its one media type; an unknown name (check 1 refuses it) a known type."""
    if path in ADAPTER_PATHS:
        wanted = frozenset({media_type_of(path)})
    elif path == _BASE_CONFIG_PATH:
        wanted = frozenset({WEIGHT_CONFIG_MEDIA_TYPE})
    else:
        wanted = _LAYER_MEDIA_TYPES
    if media_type not in wanted:
        raise MalformedError(
            f"manifest: {place}: {path}: expected media type {' or '.join(sorted(wanted))}, "
            f"got {shown(media_type)}"
        )


def _path_check(path: str, place: str) -> None:
    plain = path.isascii() and path.isprintable() and 0 < len(path) <= 255
    if not plain or "/" in path or "\\" in path or path.startswith("."):
        raise MalformedError(
            f"manifest: {place}: expected a flat ASCII file name, got {shown(path)}"
        )


def _descriptor(value: Any, place: str, extra: frozenset[str]) -> FileEntry:
    if not isinstance(value, Mapping) or set(value) != {"mediaType", "digest", "size"} | extra:
        raise MalformedError(f"manifest: {place}: expected mediaType, digest and size")
    size, media_type = value["size"], value["mediaType"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise MalformedError(f"manifest: {place}: size: expected bytes, got {shown(size)}")
    if not isinstance(media_type, str):
        raise MalformedError(f"manifest: {place}: mediaType: expected text")
    return FileEntry("", digest_parse(value["digest"], f"manifest: {place}"), size, media_type)


def _fixed(document: Mapping[str, Any], field: str, expected: Any) -> None:
    if document[field] != expected or isinstance(document[field], bool):
        raise MalformedError(
            f"manifest: {field}: expected {expected}, got {shown(document[field])}"
        )
