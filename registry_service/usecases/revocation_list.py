"""The signed revocation list: issued with every revocation and before half of its life is over.

A list that nodes refuse would stop them all, so none is signed that is longer than they take. When
there is more to name, the tenants' own revocations that every node has let go of are left out, of
each tenant the ones that matter least; whatever else there is stays, or the revocation is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.errors import RefusedError, UnavailableError
from registry_service.domain.roles import PLATFORM, Principal, Role
from registry_service.store import nodes as node_store
from registry_service.store import revocation_list as store
from registry_service.store.artifacts import ArtifactRow
from registry_service.trust.dsse import dsse_sign
from registry_service.trust.revocation_list import (
    PAYLOAD_TYPE,
    RevocationList,
    Revoked,
    revocation_list_payload,
)
from registry_service.usecases.context import Context, tenant_transaction

_LOG = logging.getLogger(__name__)
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

    Raises:
        RefusedError: what has to stand in it is more than nodes take.
    """
    return _issue(context, session, store.list_lock(session), now)


def revocation_list_renew(context: Context) -> bool:
    """Issue the list anew when its time has come; True when it was done.

    It is never too long: what has to stand in it only grows with a revocation, which is refused.
    """
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
        entries=_chosen(store.list_entries(session)),
    )
    signer = context.list_signer
    payload = revocation_list_payload(revocations)
    envelope = dsse_sign(PAYLOAD_TYPE, payload, signer.sign, signer.key_id)
    store.list_put(
        session,
        store.ListRow(revocations.number, envelope, issued_at, revocations.expires_at),
    )
    return revocations.number


def _chosen(found: Sequence[store.Listable]) -> tuple[Revoked, ...]:
    """What a list names of everything that it could, in the same order.

    Raises:
        RefusedError: more has to stand in it than nodes take.
    """
    most = limits.REVOCATION_LIST_ENTRIES
    staying = sum(each.stays for each in found)
    if staying > most:
        raise RefusedError(
            f"revocation list: expected at most {most} entries that have to stay, got {staying}: "
            "nodes would refuse a longer list and stop. Nothing was revoked; withdraw the "
            "adapter's grants, and see 'The revocation list fills' in docs/operations.md"
        )
    _alarm(len(found), most)
    if len(found) <= most:
        return tuple(each.entry for each in found)
    others = sorted((each for each in found if not each.stays), key=lambda each: each.place)
    kept = {each.entry for each in others[: most - staying]}
    return tuple(each.entry for each in found if each.stays or each.entry in kept)


def _alarm(count: int, most: int) -> None:
    if count > most:
        _LOG.error(
            "revocation list: full: %d entries left out, of tenants' own revocations that every "
            "node has let go of",
            count - most,
            extra={"event": "revocation_list.full", "entries": count, "most": most},
        )
    elif count * 2 >= most:
        _LOG.warning(
            "revocation list: %d entries of the %d that nodes take",
            count,
            most,
            extra={"event": "revocation_list.half_full", "entries": count, "most": most},
        )
