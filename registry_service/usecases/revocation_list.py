"""The signed revocation list: issued with every revocation and before half of its life is over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.orm import Session

from registry_service.domain.errors import RefusedError, UnavailableError
from registry_service.domain.roles import PLATFORM, Principal, Role
from registry_service.store import nodes as node_store
from registry_service.store import revocation_list as store
from registry_service.store.artifacts import ArtifactRow
from registry_service.trust.dsse import dsse_sign
from registry_service.trust.revocation_list import (
    PAYLOAD_TYPE,
    RevocationList,
    revocation_list_payload,
)
from registry_service.usecases.context import Context, tenant_transaction

# Of its life. Nodes raise an alarm at half: between the two, they have time to fetch the next one.
_RENEW_AT: Final = 0.4


@dataclass(frozen=True, slots=True)
class ServedList:
    """A list as it was signed, byte for byte, with its number."""

    number: int
    envelope: bytes


def revocation_list_issue(context: Context, session: Session, now: datetime) -> int:
    """Sign the next list in the caller's transaction; its number.

    Whoever gives a list out holds its row, so that the lock that is taken here waits for them: of
    each node it is known, when this returns, until when it may go on with an older list.
    """
    return _issue(context, session, store.list_lock(session), now)


def revocation_list_renew(context: Context) -> bool:
    """Issue the list anew when its time has come; True when it was done."""
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        if not _due(context, store.list_read(session), now):
            return False
        held = store.list_lock(session)
        # Another one may have been here first.
        if not _due(context, held, now):
            return False
        _issue(context, session, held, now)
    return True


def revocation_list_give(context: Context, principal: Principal) -> ServedList:
    """The list that stands; for a node, it is remembered until when this list lets it serve.

    Raises:
        UnavailableError: none that holds; the background process issues them.
    """
    with tenant_transaction(context, PLATFORM) as session:
        row = store.list_hold(session)
        if row.number == 0 or row.expires_at <= context.clock.now():
            raise UnavailableError(
                "expected a revocation list that holds, got none; is the background running?"
            )
        if principal.role is Role.NODE:
            node_store.node_fresh(session, principal.subject, row.expires_at)
    return ServedList(row.number, row.envelope)


def listed_check(session: Session, artifact: ArtifactRow) -> None:
    """Bytes that were revoked stay revoked, in whatever package they come.

    Raises:
        RefusedError: its weights or tensors are those of a revoked artifact.
    """
    if store.content_is_listed(session, artifact):
        raise RefusedError(
            "expected weights that are not revoked, got those of a revoked artifact in another "
            "package; reject it"
        )


def _due(context: Context, row: store.ListRow, now: datetime) -> bool:
    life = timedelta(seconds=context.revocation_list_seconds)
    return now - row.issued_at >= life * _RENEW_AT or row.expires_at - row.issued_at > life


def _issue(context: Context, session: Session, held: store.ListRow, now: datetime) -> int:
    issued_at = now.replace(microsecond=0)
    revocations = RevocationList(
        number=held.number + 1,
        issuer=context.verifier_id,
        issued_at=issued_at,
        expires_at=issued_at + timedelta(seconds=context.revocation_list_seconds),
        entries=store.list_entries(session),
    )
    signer = context.list_signer
    payload = revocation_list_payload(revocations)
    envelope = dsse_sign(PAYLOAD_TYPE, payload, signer.sign, signer.key_id)
    store.list_put(
        session,
        store.ListRow(revocations.number, envelope, issued_at, revocations.expires_at),
    )
    return revocations.number
