"""Catalogs of bases: made by workers, agreed between two of them, made again when it is time.

A wrong catalog would void the structure check of every adapter, so a base is admitted with one only
when ``CATALOG_MAKERS`` different workers made it, byte for byte. Another version of transformers
may name tensors in another way: its catalog never mixes with the admitted one. An operator asks for
it; it is collected beside the admitted one, which stays in force, and replaces it in one
transaction once as many workers agree. What a base was admitted with stays admitted: verdicts name
the catalog that their artifact was checked against, and nodes that made it go on.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy.orm import Session

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog, catalog_parse
from registry_service.domain.digests import Digest, digest_equal
from registry_service.domain.errors import ConflictError, MalformedError, RefusedError
from registry_service.domain.names import reason_text
from registry_service.domain.roles import PLATFORM
from registry_service.store import catalogs as store
from registry_service.store.bases import BaseRow, base_get
from registry_service.store.catalogs import MakerRow
from registry_service.store.events import event_append
from registry_service.store.jobs import job_finish, job_held, job_insert, jobs_open
from registry_service.trust.dsse import IN_TOTO, dsse_sign
from registry_service.trust.verdict import BaseClaims, base_statement
from registry_service.usecases.context import Context, tenant_transaction

CATALOG_MAKERS: Final = 2


def catalog_submit(
    context: Context,
    worker: str,
    reference: str,
    content: bytes,
    *,
    job: tuple[UUID, int] | None = None,
) -> None:
    """Take a worker's catalog, and end the ``job`` (id and lease) that asked for it.

    Two workers that agree admit a base that has no catalog yet, and two that differ block it. An
    admitted base takes an admitted catalog only, or, while its catalog is made again, one of
    another transformers version: two that agree replace the admitted one, two that differ change
    nothing.

    Raises:
        MalformedError: not a catalog in canonical form, or of another base.
        RefusedError: a catalog that the base does not take. ConflictError: the worker handed in
            another one before. NotFoundError: no such base. LeaseLostError: the job is over.
    """
    catalog = catalog_parse(content)
    if catalog.to_bytes() != content:
        raise MalformedError("catalog: expected RFC 8785 JSON; write it with 'base catalog'")
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        base = base_get(session, reference, lock=True)
        _fitting(session, base, catalog)
        if _first_of_its_kind(session, base, worker, catalog):
            store.catalog_insert(session, base, worker=worker, catalog=catalog, at=now)
            details = {
                "catalogDigest": catalog.digest,
                "transformersVersion": catalog.transformers_version,
            }
            _event(session, "base.catalogued", base, worker, now, details)
            _settle(context, session, base, worker, now)
            _disagreement(session, base, worker, catalog.transformers_version, now)
        if job is not None:
            job_finish(session, job_held(session, *job), "DONE")
        catalog_work(session, base, now)


def catalog_drop(context: Context, actor: str, reference: str, worker: str, reason: str) -> None:
    """Drop a worker's catalog that is not admitted, and look again at what is left.

    Raises:
        NotFoundError: no such base, or no such catalog of this worker.
        ConflictError: the base is admitted, and its catalog is not being made again.
    """
    reason = reason_text(reason)
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        base = base_get(session, reference, lock=True)
        if base.state == "USABLE" and not base.remaking:
            raise ConflictError("the base is admitted with its catalog; there is nothing to settle")
        store.makers_delete(session, base, worker)
        details = {"worker": worker, "reason": reason}
        _event(session, "base.catalog_dropped", base, actor, now, details)
        _settle(context, session, base, actor, now)
        catalog_work(session, base, now)


def catalog_remake(context: Context, actor: str, reference: str, reason: str) -> None:
    """Ask for the catalog of an admitted base again, from workers with other transformers.

    Asking again begins anew: what was collected so far no longer counts.

    Raises:
        NotFoundError: no such base. ConflictError: it is not admitted yet.
    """
    reason = reason_text(reason)
    now = context.clock.now()
    with tenant_transaction(context, PLATFORM) as session:
        base = base_get(session, reference, lock=True)
        if base.state != "USABLE":
            raise ConflictError(
                f"expected an admitted base, got one that is {base.state}; its first catalog is "
                "still to be agreed ('adapterctl base show')"
            )
        store.round_open(session, base)
        details = {"reason": reason, **_named(store.admitted_makers(session, base)[0])}
        _event(session, "base.recatalog_requested", base, actor, now, details)
        catalog_work(session, base, now)


def catalog_work(session: Session, base: BaseRow, at: datetime) -> None:
    """Keep one job open while another worker's catalog is wanted, and none that waits after that.

    The base's row is locked.
    """
    base = base_get(session, base.digest)
    wanted = base.state == "PENDING" or recatalog_state(session, base) == "COLLECTING"
    jobs = jobs_open(session, PLATFORM, base.digest)
    if wanted and not jobs:
        job_insert(
            session,
            tenant_id=PLATFORM,
            kind="catalog",
            subject=base.digest,
            adapter="",
            base_digest=base.digest,
            at=at,
        )
    for job in jobs:
        if not wanted and job.state == "QUEUED":
            job_finish(session, job, "DONE")


def recatalog_state(session: Session, base: BaseRow) -> str | None:
    """How far making an admitted base's catalog again is; None when nobody asked for it."""
    if not base.remaking:
        return None
    groups = _by_version(store.round_makers(session, base), base)
    return "CONFLICTED" if any(map(_differ, groups.values())) else "COLLECTING"


def _fitting(session: Session, base: BaseRow, catalog: Catalog) -> None:
    """Refuse a catalog that this base does not take."""
    if not digest_equal(catalog.base_digest, base.digest):
        raise MalformedError(
            f"catalog: expected one of base {base.digest}, got {catalog.base_digest}"
        )
    if catalog.quantization != base.quantization:
        raise RefusedError(
            f"catalog: quantization: expected the base's {base.quantization}, "
            f"got {catalog.quantization}"
        )
    admitted = store.catalogs_admitted(session, base.digest)
    if not admitted or catalog.digest in admitted:
        return
    version = store.admitted_makers(session, base)[0].transformers_version
    if base.remaking and catalog.transformers_version != version:
        return
    raise RefusedError(
        f"expected the admitted catalog {base.catalog_digest}, made with transformers {version}, "
        f"got {catalog.digest} made with transformers {catalog.transformers_version}; use that "
        "version, or have the catalog made again with 'adapterctl base recatalog'"
    )


def _first_of_its_kind(session: Session, base: BaseRow, worker: str, catalog: Catalog) -> bool:
    """False when the worker handed in this very catalog in this round.

    Raises:
        ConflictError: it handed in another one that this one contradicts.
    """
    for made in store.round_makers(session, base):
        if made.worker != worker:
            continue
        if digest_equal(made.catalog_digest, catalog.digest):
            return False
        if base.catalog_digest is None or made.transformers_version == catalog.transformers_version:
            raise ConflictError(
                f"expected the catalog {made.catalog_digest} that this worker made before, "
                f"got {catalog.digest}"
            )
    return True


def _settle(context: Context, session: Session, base: BaseRow, actor: str, now: datetime) -> None:
    """Do what the catalogs there are decide."""
    if base.catalog_digest is None:
        _settle_first(context, session, base, actor, now)
    elif base.remaking:
        for group in _by_version(store.round_makers(session, base), base).values():
            if len(group) >= CATALOG_MAKERS and not _differ(group):
                _replace(context, session, base, group[0], actor, now)
                return


def _settle_first(
    context: Context, session: Session, base: BaseRow, actor: str, now: datetime
) -> None:
    makers = store.round_makers(session, base)
    digest = None
    if _differ(makers):
        state, kind = "CONFLICTED", "base.conflicted"
    elif len(makers) >= CATALOG_MAKERS:
        state, kind, digest = "USABLE", "base.admitted", makers[0].catalog_digest
    else:
        state, kind = "PENDING", "base.pending"
    if base.state == state:
        return
    if digest is None:
        store.base_state_set(session, base, state)
    else:
        _admit(context, session, base, digest, now)
    _event(session, kind, base, actor, now, {"catalogDigest": digest})


def _replace(
    context: Context, session: Session, base: BaseRow, new: MakerRow, actor: str, now: datetime
) -> None:
    old = store.admitted_makers(session, base)[0]
    _admit(context, session, base, new.catalog_digest, now)
    details = {"from": _named(old), "to": _named(new)}
    _event(session, "base.recatalogued", base, actor, now, details)


def _admit(
    context: Context, session: Session, base: BaseRow, catalog_digest: Digest, now: datetime
) -> None:
    earlier = store.catalogs_admitted(session, base.digest)
    claims = BaseClaims(
        base_digest=base.digest,
        name=base.name,
        catalog_digest=catalog_digest,
        policy_digest=context.policy.digest,
        issued_at=now,
        not_after=now + timedelta(seconds=limits.BASE_STATEMENT_SECONDS),
        verifier_id=context.verifier_id,
        earlier_catalog_digests=tuple(digest for digest in earlier if digest != catalog_digest),
    )
    signer = context.verdict_signer
    statement = dsse_sign(IN_TOTO, base_statement(claims), signer.sign, signer.key_id)
    store.base_admit(session, base, catalog_digest=catalog_digest, statement=statement, at=now)


def _disagreement(
    session: Session, base: BaseRow, worker: str, version: str, now: datetime
) -> None:
    """Record that a worker's new catalog differs from another's of the same version."""
    if not base.remaking:
        return
    group = _by_version(store.round_makers(session, base), base).get(version, [])
    if _differ(group):
        digests = sorted({made.catalog_digest for made in group})
        details = {"transformersVersion": version, "catalogDigests": digests}
        _event(session, "base.recatalog_conflicted", base, worker, now, details)


def _by_version(makers: list[MakerRow], base: BaseRow) -> dict[str, list[MakerRow]]:
    """What could replace the admitted catalog, by the transformers that made it."""
    groups: dict[str, list[MakerRow]] = {}
    for made in makers:
        if made.catalog_digest != base.catalog_digest:
            groups.setdefault(made.transformers_version, []).append(made)
    return groups


def _differ(makers: list[MakerRow]) -> bool:
    return len({made.catalog_digest for made in makers}) > 1


def _named(made: MakerRow) -> dict[str, str]:
    return {
        "catalogDigest": made.catalog_digest,
        "transformersVersion": made.transformers_version,
    }


def _event(
    session: Session, kind: str, base: BaseRow, actor: str, at: datetime, body: dict[str, Any]
) -> None:
    event_append(
        session, tenant_id=PLATFORM, kind=kind, subject=base.digest, actor=actor, at=at, body=body
    )
