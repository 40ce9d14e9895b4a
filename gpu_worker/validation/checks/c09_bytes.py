"""Check 9: the bytes at hand are those of the manifest.

Other bytes than the manifest's are not this artifact: a broken disk or download of ours must not
burn a digest. So a difference is a fault, whose reason carries the code, and never a finding. The
base's bytes are compared in the same spirit: its files when they are loaded and whenever their
stamps change, its loaded parameters before and after every load (check 11). How the base is
quantized on this node is compared with what the publisher declared: the same shapes fit, but it is
not the model that the adapter was trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Final

from gpu_worker.validation.checks.candidate import (
    CONFIG_PATH,
    DECLARATION_PATH,
    WEIGHT_PATH,
    Candidate,
    CheckFaultError,
    FileFact,
    reading,
)
from registry_service.domain.findings import Check, Code, Finding, refuse, review

_KEPT: Final = (WEIGHT_PATH, CONFIG_PATH, DECLARATION_PATH)


def bytes_check(candidate: Candidate, quantization: str) -> list[Finding]:
    """Re-hash every file, and keep weights and config as they were hashed.

    ``quantization`` is that of the base which this node holds, ``none`` if it is not quantized.

    Raises:
        CheckFaultError: a file is missing or differs from the manifest.
    """
    findings: list[Finding] = []
    contents = {fact.path: _verified(candidate, fact) for fact in candidate.files}
    for path in (WEIGHT_PATH, CONFIG_PATH):
        if path not in contents:
            findings.append(refuse(Check.BYTES, Code.FILE_MISSING, path, "the file", "none"))
    candidate.weights = contents.get(WEIGHT_PATH, b"")
    with reading(Check.BYTES, CONFIG_PATH, findings):
        candidate.config = dict(json.loads(contents.get(CONFIG_PATH, b"{}")))
    if DECLARATION_PATH in contents:
        with reading(Check.BYTES, DECLARATION_PATH, findings):
            declared = dict(json.loads(contents[DECLARATION_PATH])).get("baseQuantization")
            findings += _quantization(declared, quantization)
    return findings


def _quantization(declared: Any, held: str) -> list[Finding]:
    if declared == held:
        return []
    where = f"{DECLARATION_PATH}: baseQuantization"
    expected = f"{held}, as this node holds the base"
    return [review(Check.BYTES, Code.QUANTIZATION_DIFFERS, where, expected, str(declared))]


def _verified(candidate: Candidate, fact: FileFact) -> bytes:
    keep = fact.path in _KEPT
    state, size, kept = hashlib.sha256(), 0, bytearray()
    try:
        descriptor = os.open(candidate.directory / fact.path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            while chunk := file.read(4 << 20):
                state.update(chunk)
                size += len(chunk)
                if keep:
                    kept += chunk
    except OSError as error:
        raise CheckFaultError(f"{Code.BYTES_DIFFER}: {fact.path}: {error.strerror}") from error
    got = "sha256:" + state.hexdigest()
    if (got, size) != (fact.digest, fact.size):
        raise CheckFaultError(
            f"{Code.BYTES_DIFFER}: {fact.path}: expected {fact.digest} of {fact.size} bytes, "
            f"got {got} of {size} bytes"
        )
    return bytes(kept)
