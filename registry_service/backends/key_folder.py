"""The folder of the service's signing keys, and the file that nodes pin their public halves by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from registry_service.backends.file_signer import FileSigner

VERDICT_KEY: Final = "verdict.pem"
ROUTING_KEY: Final = "routing-context.pem"
LIST_KEY: Final = "revocation-list.pem"
TRUST_FILE: Final = "trust.json"


def keys_create(folder: Path, verifier_id: str) -> None:
    """Make the signing keys that are missing, and the file that nodes pin."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    signers = {}
    for name in (VERDICT_KEY, ROUTING_KEY, LIST_KEY):
        path = folder / name
        signers[name] = FileSigner.load(path) if path.exists() else FileSigner.create(path)
    trust = {
        "verdict": {"publicKey": signers[VERDICT_KEY].public_pem, "verifierId": verifier_id},
        "routingContext": {"publicKey": signers[ROUTING_KEY].public_pem, "issuer": verifier_id},
        "revocationList": {"publicKey": signers[LIST_KEY].public_pem, "issuer": verifier_id},
    }
    (folder / TRUST_FILE).write_text(json.dumps(trust, indent=2) + "\n", encoding="utf-8")
