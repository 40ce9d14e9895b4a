"""Proving an artifact offline, as a node does: pinned key, verdict, nothing else."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from uuid import UUID

from registry_service.domain.digests import digest_parse
from registry_service.trust.keys import public_key_parse
from registry_service.trust.verdict import TrustedVerifier, VerdictClaims, verdict_verify


def verdict_prove(
    envelope: bytes, *, trust: Path, digest: str, base_digest: str, tenant_id: UUID, now: datetime
) -> VerdictClaims:
    """What a verdict says, when it holds under the pinned key.

    Raises:
        UntrustedError: it does not hold.
    """
    pinned = json.loads(trust.read_text("utf-8"))["verdict"]
    verifier = TrustedVerifier(public_key_parse(pinned["publicKey"]), pinned["verifierId"])
    return verdict_verify(
        envelope,
        trusted=(verifier,),
        adapter_digest=digest_parse(digest),
        base_digest=digest_parse(base_digest),
        tenant_id=tenant_id,
        now=now,
    )
