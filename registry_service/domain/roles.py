"""Who asks: a token's subject, role and tenant."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from uuid import UUID

from registry_service.domain.errors import NotFoundError

# What belongs to no tenant stands under this one, so that no key is ever null.
PLATFORM: Final = UUID(int=0)


class Role(StrEnum):
    """What a token may be used for. One role a token."""

    PUBLISHER = "publisher"
    REVIEWER = "reviewer"
    OPERATOR = "operator"
    VALIDATOR = "validator"
    NODE = "node"
    GATEWAY = "gateway"
    AUDITOR = "auditor"
    ADMIN = "admin"


TENANT_ROLES: Final = frozenset({Role.PUBLISHER})
PLATFORM_ROLES: Final = frozenset({Role.VALIDATOR, Role.NODE, Role.ADMIN})


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. ``tenant_id`` is ``PLATFORM`` for one that is bound to no tenant."""

    token_id: UUID
    subject: str
    role: Role
    tenant_id: UUID
    tenant: str

    @property
    def is_platform(self) -> bool:
        return self.tenant_id == PLATFORM

    def tenant_check(self, tenant_id: UUID) -> None:
        """Refuse a caller that is bound to another tenant, with the answer for an unknown name.

        Raises:
            NotFoundError: bound to another tenant.
        """
        if not self.is_platform and self.tenant_id != tenant_id:
            raise NotFoundError("not found")
