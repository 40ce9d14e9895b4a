"""Sidecars: exactly our form or refused, with the reason; compared part by part."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.serving.slot_sidecar import (
    Refusal,
    Session,
    Sidecar,
    SlotRefusedError,
    identity_check,
    same_check,
    sidecar_parse,
)
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import MalformedError
from registry_service.trust.routing_context import BASE_MARKER
from tests.identities import IDENTITY, A, B

SIDECAR = Sidecar(
    identity=IDENTITY,
    session=Session("s-1", "app"),
    page=7,
    token_count=12,
    tokens_digest=digest_of(b"tokens"),
    state_digest=digest_of(b"state"),
    key_id=digest_of(b"key"),
)


def changed(**fields: Any) -> bytes:
    return canonical_json({**json.loads(SIDECAR.to_bytes()), **fields})


def refusal(content: bytes) -> Refusal:
    with pytest.raises(SlotRefusedError) as caught:
        sidecar_parse(content, 1)
    return caught.value.reason


@pytest.mark.parametrize("adapters", [((A, 1.0),), ((A, 0.25),), ((B, 16.0),), BASE_MARKER])
def test_a_sidecar_reads_back_as_it_was_written(adapters: Any) -> None:
    sidecar = replace(SIDECAR, identity=replace(IDENTITY, adapters=adapters))
    assert sidecar_parse(sidecar.to_bytes(), 1) == sidecar


def test_a_sidecar_is_canonical_json() -> None:
    content = SIDECAR.to_bytes()
    assert canonical_json(json.loads(content)) == content
    assert refusal(content + b" ") is Refusal.UNREADABLE
    assert refusal(json.dumps(json.loads(content)).encode()) is Refusal.UNREADABLE


def test_another_format_is_said_before_its_fields_are_looked_at() -> None:
    assert refusal(b'{"formatVersion":0,"unknown":1}') is Refusal.FORMAT
    assert refusal(b"{}") is Refusal.FORMAT
    assert refusal(changed(formatVersion=2)) is Refusal.FORMAT


def test_two_adapters_in_a_sidecar_are_refused_in_either_order() -> None:
    one, two = {"digest": A, "scale": 1}, {"digest": B, "scale": 1}
    for adapters in ([one, two], [two, one], [one, one], []):
        assert refusal(changed(adapters=adapters)) is Refusal.COMBINATION


@pytest.mark.parametrize(
    "fields",
    [
        {"more": 1},
        {"formatVersion": True},
        {"tenantId": "1042"},
        {"tenantId": None},
        {"baseDigest": "sha256:1"},
        {"adapters": [{"digest": A, "scale": 17}]},
        {"adapters": [{"digest": A, "scale": 0}]},
        {"adapters": [{"digest": A, "scale": True}]},
        {"adapters": [{"digest": A}]},
        {"adapters": ["base"]},
        {"adapters": [1]},
        {"layout": {"layers": [[2, 8, 8]]}},
        {"layout": {"layers": [], "blockTokens": 64}},
        {"layout": {"layers": 2, "blockTokens": 64}},
        {"layout": {"layers": [2], "blockTokens": 64}},
        {"layout": {"layers": [[2, 8, 8]], "blockTokens": "64"}},
        {"layout": 1},
        {"libraryVersions": {}},
        {"libraryVersions": []},
        {"sessionId": ""},
        {"sessionId": "x" * 257},
        {"sessionId": 1},
        {"subject": "two words"},
        {"page": 0},
        {"page": True},
        {"tokenCount": 1.5},
        {"tokensDigest": "x"},
        {"keyId": None},
    ],
)
def test_any_other_form_is_unreadable(fields: dict[str, Any]) -> None:
    assert refusal(changed(**fields)) is Refusal.UNREADABLE


@given(st.binary(max_size=64))
def test_no_bytes_crash_the_parser(content: bytes) -> None:
    with pytest.raises(SlotRefusedError):
        sidecar_parse(content, 1)


@given(st.data())
def test_a_changed_byte_reads_as_another_sidecar_or_not_at_all(data: st.DataObject) -> None:
    content = bytearray(SIDECAR.to_bytes())
    where = data.draw(st.integers(0, len(content) - 1))
    content[where] ^= data.draw(st.integers(1, 255))
    try:
        found = sidecar_parse(bytes(content), 1)
    except SlotRefusedError:
        return
    assert found != SIDECAR


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("format_version", 2, Refusal.FORMAT),
        ("tenant_id", UUID(int=2001), Refusal.TENANT),
        ("base_digest", digest_of(b"other"), Refusal.BASE),
        ("adapters", ((B, 1.0),), Refusal.ADAPTER),
        ("adapters", BASE_MARKER, Refusal.ADAPTER),
        ("adapters", ((A, 0.5),), Refusal.SCALE),
        ("tokenizer_digest", digest_of(b"other"), Refusal.TOKENIZER),
        ("chat_template_digest", digest_of(b"other"), Refusal.TEMPLATE),
        ("dtype", "bfloat16", Refusal.DTYPE),
        ("layout", replace(IDENTITY.layout, block_tokens=32), Refusal.LAYOUT),
        ("engine_version", "2", Refusal.ENGINE),
        ("library_versions", (("torch", "2.14.0"),), Refusal.LIBRARIES),
    ],
)
def test_each_part_that_differs_is_refused_by_name_in_both_directions(
    part: str, value: Any, reason: Refusal
) -> None:
    identity_check(IDENTITY, replace(IDENTITY))
    other = replace(IDENTITY, **{part: value})
    for found, wanted in ((IDENTITY, other), (other, IDENTITY)):
        with pytest.raises(SlotRefusedError) as caught:
            identity_check(found, wanted)
        assert caught.value.reason is reason
        assert caught.value.expected != caught.value.got


def test_a_refusal_shows_bounded_and_escaped_text() -> None:
    with pytest.raises(SlotRefusedError) as caught:
        same_check(Refusal.SESSION, "\x1b[2J\u202e" + "x" * 1000, "s-1")
    assert caught.value.got.isprintable()
    assert "\u202e" not in caught.value.got
    assert len(caught.value.got) < 250


@pytest.mark.parametrize(
    ("session", "subject"), [("", "app"), ("x" * 257, "app"), ("\ud800", "app"), ("s", "")]
)
def test_a_session_has_a_bounded_name_and_a_subject(session: str, subject: str) -> None:
    with pytest.raises(MalformedError):
        Session(session, subject)
