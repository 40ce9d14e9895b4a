"""Combinations of adapters stay out: two are refused wherever one could be named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpu_worker.serving.openai_bodies import chat_parse, completion_parse
from gpu_worker.serving.options import wanted_parse
from gpu_worker.serving.sequence import EngineError, Job
from gpu_worker.serving.slot_sidecar import Refusal, SlotRefusedError, sidecar_parse
from registry_service.api import bodies
from registry_service.domain.canonical import canonical_json
from registry_service.domain.digests import digest_parse
from registry_service.domain.errors import MalformedError, UntrustedError
from registry_service.trust.routing_context import routing_context_verify
from tests.identities import IDENTITY, A, B
from tests.integration import serving_world as sw
from tests.integration.turn_world import NOW, TurnWorld, context_make

pytestmark = pytest.mark.torch
PAIRS: list[Any] = [[A, B], [B, A], f"{A},{B}", f"{A} {B}"]


@pytest.mark.parametrize("adapters", [((A, 1.0), (B, 1.0)), ((B, 1.0), (A, 1.0))])
def test_an_identity_of_two_is_not_built(adapters: Any) -> None:
    with pytest.raises(MalformedError, match="exactly one"):
        replace(IDENTITY, adapters=adapters)


def test_a_sidecar_of_two_is_refused() -> None:
    pair = [{"digest": A, "scale": 1}, {"digest": B, "scale": 1}]
    from tests.unit.test_serving_slot_sidecar import SIDECAR

    content = canonical_json({**json.loads(SIDECAR.to_bytes()), "adapters": pair})
    with pytest.raises(SlotRefusedError) as caught:
        sidecar_parse(content, 1)
    assert caught.value.reason is Refusal.COMBINATION


@pytest.mark.parametrize("pair", PAIRS)
def test_a_routing_context_of_two_does_not_verify(tmp_path: Path, pair: Any) -> None:
    from registry_service.backends.file_signer import FileSigner
    from registry_service.trust.keys import public_key_parse
    from registry_service.trust.routing_context import routing_context_sign

    signer = FileSigner.create(tmp_path / "key.pem")

    def verify(digest: Any) -> None:
        context = context_make(digest, expires_at=NOW.replace(second=50))
        routing_context_verify(
            routing_context_sign(context, sw.VERIFIER, signer),
            public_key=public_key_parse(signer.public_pem),
            issuer=sw.VERIFIER,
            node="node-1",
            base_digest=context.base_digest,
            body=b"body",
            now=NOW,
        )

    verify(A)
    with pytest.raises(UntrustedError):
        verify(pair)


@pytest.mark.parametrize("pair", PAIRS)
def test_a_turn_of_two_does_not_begin(tmp_path: Path, pair: Any) -> None:
    with TurnWorld(tmp_path / "slots").node() as node:
        assert node.turns.begin(context_make(A)).root_key
        with pytest.raises(MalformedError):
            node.turns.begin(context_make(pair))
        with pytest.raises(EngineError, match="not attached"):
            list(node.engine.submit(Job((1, 2), 1, adapter=(A, B))).tokens())


@pytest.mark.parametrize("field", ["adapters", "adapter", "lora", "lora_adapters", "adapterDigest"])
def test_a_completion_names_no_adapter_at_all(field: str) -> None:
    chat = {"messages": [{"role": "user", "content": "w1"}]}
    assert completion_parse(b'{"prompt":"w1"}').prompt == "w1"
    assert chat_parse(json.dumps(chat).encode()).messages
    with pytest.raises(MalformedError):
        completion_parse(json.dumps({"prompt": "w1", field: [A, B]}).encode())
    with pytest.raises(MalformedError):
        chat_parse(json.dumps({**chat, field: [A, B]}).encode())


def test_a_preload_of_two_is_refused() -> None:
    assert wanted_parse(f"t-1042/support-zh@{A}").digest == A
    for text in (f"t-1042/support-zh@{A},{B}", f"t-1042/support-zh@{A}@{B}"):
        with pytest.raises(MalformedError):
            wanted_parse(text)


@pytest.mark.parametrize("pair", [[A, B], [B, A], (A, B)])
def test_an_alias_a_placement_and_a_route_name_one(pair: Any) -> None:
    route = {"tenant": "t-1042", "node": "node-1", "bodyDigest": A, "sessionId": "s"}
    for body, values, field in (
        (bodies.AliasBody, {"reason": "ready"}, "adapterDigest"),
        (bodies.PlacementBody, {"tenant": "t-1042"}, "adapterDigest"),
        (bodies.RoutingBody, {**route, "subject": "app"}, "adapter"),
        (bodies.RoutingBody, {**route, "subject": "app"}, "reference"),
    ):
        assert body.model_validate({**values, field: "one"})
        with pytest.raises(ValidationError):
            body.model_validate({**values, field: pair})


@pytest.mark.parametrize("text", [f"{A},{B}", f"{A} {B}", f"{A}{B}", f"{A}+{B}"])
def test_two_digests_in_one_text_are_no_digest(text: str) -> None:
    with pytest.raises(MalformedError):
        digest_parse(text)
