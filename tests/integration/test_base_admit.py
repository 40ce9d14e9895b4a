"""What a node compares of its base with the registry's before it loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_worker.serving import startup
from registry_service.domain.digests import digest_of
from registry_service.domain.errors import RefusedError, UntrustedError
from tests.integration import serving_world as sw

pytestmark = pytest.mark.torch


def test_a_base_that_the_registry_does_not_know_stops_the_start(
    tmp_path: Path,
) -> None:
    base = sw.prove(sw.base_make(tmp_path / "base"))
    registry = sw.FakeRegistry(tmp_path / "registry", base)
    client: Any = registry
    other = sw.prove(sw.base_make(tmp_path / "other", "gpt2"))
    with pytest.raises(RefusedError, match="no base"):
        startup.base_admit(client, registry.trust(), other)
    registry.state = "CONFLICTED"
    with pytest.raises(RefusedError, match="CONFLICTED"):
        startup.base_admit(client, registry.trust(), base)
    registry.state = "PENDING"
    assert startup.base_admit(client, registry.trust(), base).digest == base.digest
    registry.state = "USABLE"
    own, other_catalog = sw.identity(base).catalog_digest, digest_of(b"other")
    registry.statement_changes = {"catalog_digest": other_catalog}
    with pytest.raises(RefusedError, match="expected catalog"):
        startup.base_admit(client, registry.trust(), base)
    registry.statement_changes["earlier_catalog_digests"] = (own,)
    assert startup.base_admit(client, registry.trust(), base).catalog_digest == own
    forged = sw.FakeRegistry(tmp_path / "forged", base)
    with pytest.raises(UntrustedError):
        startup.base_admit(client=forged, trust=registry.trust(), proven=base)  # type: ignore[arg-type]  # a stand-in, or wrong on purpose
