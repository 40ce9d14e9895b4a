"""Whatever a pickle scanner flags is refused without it: it is a second opinion here, no part."""

from __future__ import annotations

import io

import pytest
import sample_adapter as sample
from payloads import ARCHIVES, MODELS, PICKLES, zipped
from picklescan.scanner import ScanResult, scan_bytes, scan_numpy, scan_pickle_bytes, scan_zip_bytes

from registry_service.domain.file_set import file_set_check

FLAGGED = {
    "a pickle": PICKLES["protocol 4"],
    "protocol 0": PICKLES["protocol 0"],
    "protocol 1": PICKLES["protocol 1"],
    "protocol 2": PICKLES["protocol 2"],
    "protocol 3": PICKLES["protocol 3"],
    "protocol 5": PICKLES["protocol 5"],
    "by hand": PICKLES["protocol 0 by hand"],
    "an instance": PICKLES["an instance"],
    "an object": PICKLES["an object"],
    "a name from the stack": PICKLES["a name from the stack"],
    "built in two steps": PICKLES["built in two steps"],
    "words behind the end": PICKLES["words behind the end"],
    "garbage behind the call": PICKLES["garbage behind the call"],
    "torch before 1.6": PICKLES["torch before 1.6"],
    "in a zip": zipped(),
    "in a zip with a flag bit": ARCHIVES["zip with a flag bit"],
    "in an array": MODELS["NumPy objects"],
}


def scanned(content: bytes) -> ScanResult:
    data = io.BytesIO(content)
    if content.startswith(b"PK"):
        return scan_zip_bytes(data, "x")
    if content.startswith(b"\x93NUMPY"):
        return scan_numpy(data, "x")
    return scan_pickle_bytes(data, "x", multiple_pickles=True)


@pytest.mark.parametrize("content", FLAGGED.values(), ids=FLAGGED)
@pytest.mark.parametrize("path", [sample.WEIGHTS, "README.md", "model.pt"])
def test_what_a_scanner_flags_is_refused_without_it(path: str, content: bytes) -> None:
    assert scanned(content).issues_count > 0
    findings = file_set_check([sample.fact(path, content)], frozenset())
    codes = {"CONTENT_PICKLE", "CONTENT_ARCHIVE", "CONTENT_UNKNOWN"}
    assert codes & sample.codes(findings)


def test_a_scanner_passes_what_we_refuse() -> None:
    # Nothing scanned is nothing found: a scanner's silence lets nothing in.
    for content in (ARCHIVES["pickle in zip in gzip"], ARCHIVES["tar (v7)"]):
        result = scan_bytes(io.BytesIO(content), "model.txt", "txt")
        assert result.issues_count == 0
        findings = file_set_check([sample.fact("README.md", content)], frozenset())
        assert "CONTENT_ARCHIVE" in sample.codes(findings)
