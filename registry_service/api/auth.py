"""Who is asking: a token as Bearer, or as the password of Basic for OCI clients."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from registry_service.domain.errors import ForbiddenError, UnauthenticatedError
from registry_service.domain.roles import Principal, Role
from registry_service.usecases.context import Context

_MAX_HEADER = 2_000


async def request_context(request: Request) -> Context:
    """The parts that ``app`` gave to this service. It does not block: no thread is taken for it."""
    context: Context = request.app.state.context
    return context


Parts = Annotated[Context, Depends(request_context)]


def token_of(request: Request) -> str:
    """The token in the request's Authorization header.

    Raises:
        UnauthenticatedError: none, or in another form.
    """
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    if len(value) > _MAX_HEADER:
        raise UnauthenticatedError("expected a token, got an Authorization header over its limit")
    if scheme.lower() == "bearer" and value:
        return value.strip()
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(value, validate=True).decode("utf-8")
        except (binascii.Error, UnicodeDecodeError):
            pair = ""
        _, colon, password = pair.partition(":")
        if colon and password:
            return password
    raise UnauthenticatedError("expected 'Authorization: Bearer <token>', got none")


@dataclass(frozen=True)
class RoleCheck:
    """Lets a request pass whose token has one of ``roles``."""

    roles: frozenset[Role]

    async def __call__(self, request: Request) -> Principal:
        """The request's principal. It does not block: no thread is taken for it."""
        found: Principal = request.state.principal
        if found.role not in self.roles:
            raise ForbiddenError(
                f"expected a token with role {' or '.join(sorted(self.roles))}, got {found.role}"
            )
        return found


def allow(*roles: Role) -> Any:
    """A dependency: the caller's principal, when its role is one of ``roles``.

    Raises (at request time):
        ForbiddenError: another role.
    """
    return Depends(RoleCheck(frozenset(roles)))
