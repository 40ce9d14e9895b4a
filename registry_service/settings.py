"""All settings, from the environment (``REGISTRY_*``). An unknown one is an error at start-up."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from registry_service.domain import limits

_PREFIX: Final = "REGISTRY_"
# Read by other commands or by the tests, never by the service.
_ELSEWHERE: Final = frozenset(
    {"REGISTRY_OWNER_DATABASE_URL", "REGISTRY_TEST_DATABASE_URL", "REGISTRY_TEST_DATA"}
)


class Settings(BaseModel):
    """Where things are and who signs. Frozen; one instance, made by ``app``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    database_url: str = Field(description="PostgreSQL as role registry_app")
    system_database_url: str = Field(description="PostgreSQL as role registry_system")
    auditor_database_url: str = Field(description="PostgreSQL as role registry_auditor")
    blob_dir: Path = Field(description="folder of the filesystem blob store")
    key_dir: Path = Field(description="folder of the signing keys")
    verifier_id: str = Field(
        default="urn:adapter-registry:local", description="who signs verdicts, as a URI"
    )
    revocation_list_seconds: int = Field(
        default=limits.REVOCATION_LIST_SECONDS,
        ge=10,
        le=24 * 3600,
        description="life of a revocation list, and so how long a node serves unheard",
    )
    pool_adapters: int = Field(
        default=limits.POOL_ADAPTERS,
        ge=1,
        description="adapters that all nodes of one base hold together, each node's counted",
    )
    pool_tenant_adapters: int = Field(
        default=limits.POOL_TENANT_ADAPTERS, ge=1, description="one tenant's part of them"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8400, description="port to listen on")
    workers: int = Field(default=1, description="server processes")


def settings_load(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the environment.

    Raises:
        ValueError: an unknown ``REGISTRY_*`` name, a missing or an invalid setting.
    """
    given = {name for name in environment if name.startswith(_PREFIX)} - _ELSEWHERE
    known = {_PREFIX + name.upper(): name for name in Settings.model_fields}
    unknown = sorted(given - known.keys())
    if unknown:
        raise ValueError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return Settings.model_validate({known[name]: environment[name] for name in given})
