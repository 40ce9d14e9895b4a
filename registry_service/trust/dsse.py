"""DSSE envelopes (secure-systems-lab/dsse, protocol v1), with one signature each."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable
from typing import Any, Final

from registry_service.domain.canonical import canonical_json, json_parse
from registry_service.domain.errors import UntrustedError
from registry_service.trust.denial import denial
from registry_service.trust.keys import PublicKey, key_id, signature_check

MEDIA_TYPE: Final = "application/vnd.dsse.envelope.v1+json"
IN_TOTO: Final = "application/vnd.in-toto+json"
_LIMIT: Final = 1024 * 1024


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """PAE: what is signed, so that payload and type cannot be read apart otherwise."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def dsse_sign(
    payload_type: str, payload: bytes, sign: Callable[[bytes], bytes], signer_key_id: str
) -> bytes:
    """An envelope around ``payload`` as canonical JSON."""
    signature = sign(pre_authentication_encoding(payload_type, payload))
    return canonical_json(
        {
            "payloadType": payload_type,
            "payload": base64.b64encode(payload).decode(),
            "signatures": [{"keyid": signer_key_id, "sig": base64.b64encode(signature).decode()}],
        }
    )


@denial("not a DSSE envelope with one signature")
def dsse_verify(
    envelope: bytes, key: PublicKey, payload_type: str, *, limit: int = _LIMIT
) -> bytes:
    """The payload of an envelope of at most ``limit`` bytes that ``key`` signed.

    The key is chosen by the verifier's policy, never by the envelope: its key id only has to
    agree. Any error is a denial.

    Raises:
        UntrustedError: with the reason.
    """
    document = json_parse(envelope, what="envelope", limit=limit)
    kind, payload, signature, signer = _parts(document)
    if kind != payload_type:
        raise UntrustedError(f"expected a payload of type {payload_type}, got another")
    if not hmac.compare_digest(signer.encode(), key_id(key).encode()):
        raise UntrustedError("signed by another key than the pinned one")
    signature_check(key, signature, pre_authentication_encoding(kind, payload))
    return payload


def _parts(document: Any) -> tuple[str, bytes, bytes, str]:
    if not isinstance(document, dict) or set(document) != {"payloadType", "payload", "signatures"}:
        raise UntrustedError("envelope: expected exactly payloadType, payload and signatures")
    signatures = document["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise UntrustedError("envelope: expected one signature")
    only = signatures[0]
    if not isinstance(only, dict) or set(only) != {"keyid", "sig"}:
        raise UntrustedError("envelope: signature: expected exactly keyid and sig")
    texts = (document["payloadType"], document["payload"], only["sig"], only["keyid"])
    if not all(isinstance(text, str) for text in texts):
        raise UntrustedError("envelope: expected text in every field")
    return texts[0], _decode(texts[1]), _decode(texts[2]), texts[3]


def _decode(text: str) -> bytes:
    data = base64.b64decode(text, validate=True)
    # One spelling only: stray bits after the last byte would be a second envelope of the same.
    if base64.b64encode(data).decode() != text:
        raise UntrustedError("envelope: expected plain base64")
    return data
