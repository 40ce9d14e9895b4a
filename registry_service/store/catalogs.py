"""The catalogs that workers made of a base, who made them, and the base's admission with one.

A base's row lock, which the callers take first, orders what is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from registry_service.domain.catalog import Catalog
from registry_service.domain.digests import Digest
from registry_service.domain.errors import NotFoundError
from registry_service.store.bases import BaseRow
from registry_service.store.database import rows_changed


@dataclass(frozen=True, slots=True)
class MakerRow:
    """One worker's catalog of a base."""

    worker: str
    catalog_digest: Digest
    model_class: str
    transformers_version: str
    created_at: datetime


_MAKER = (
    "SELECT m.worker, m.catalog_digest, c.model_class, c.transformers_version, m.created_at "
    "FROM catalog_maker m JOIN base_catalog c "
    "ON c.base_digest = m.base_digest AND c.digest = m.catalog_digest "
    "WHERE m.base_digest = :base AND "
)


def catalog_insert(
    session: Session, base: BaseRow, *, worker: str, catalog: Catalog, at: datetime
) -> None:
    """Keep a worker's catalog in the base's present round."""
    digest = catalog.digest
    session.execute(
        text(
            "INSERT INTO base_catalog (base_digest, digest, model_class, transformers_version, "
            "content) VALUES (:base, :digest, :model_class, :version, :content) "
            "ON CONFLICT DO NOTHING"
        ),
        {
            "base": base.digest,
            "digest": digest,
            "model_class": catalog.model_class,
            "version": catalog.transformers_version,
            "content": catalog.to_bytes(),
        },
    )
    session.execute(
        text(
            "INSERT INTO catalog_maker (base_digest, round, worker, catalog_digest, created_at) "
            "VALUES (:base, :round, :worker, :digest, :at)"
        ),
        {"base": base.digest, "round": base.round, "worker": worker, "digest": digest, "at": at},
    )


def catalog_get(session: Session, digest: str, catalog_digest: str) -> bytes:
    """The bytes of a catalog.

    Raises:
        NotFoundError: none with this digest.
    """
    content = session.execute(
        text("SELECT content FROM base_catalog WHERE base_digest = :base AND digest = :digest"),
        {"base": digest, "digest": catalog_digest},
    ).scalar_one_or_none()
    if content is None:
        raise NotFoundError("not found")
    return bytes(content)


def round_makers(session: Session, base: BaseRow) -> list[MakerRow]:
    """Who made which catalog in the base's present round, oldest first."""
    rows = session.execute(
        text(_MAKER + "m.round = :round ORDER BY m.created_at, m.worker"),
        {"base": base.digest, "round": base.round},
    )
    return [MakerRow(**row._mapping) for row in rows]


def admitted_makers(session: Session, base: BaseRow) -> list[MakerRow]:
    """Who made the admitted catalog, in whichever round, oldest first and each once."""
    rows = session.execute(
        text(_MAKER + "m.catalog_digest = :digest ORDER BY m.created_at, m.worker"),
        {"base": base.digest, "digest": base.catalog_digest},
    )
    first: dict[str, MakerRow] = {}
    for row in rows:
        first.setdefault(row.worker, MakerRow(**row._mapping))
    return list(first.values())


def makers_delete(session: Session, base: BaseRow, worker: str) -> None:
    """Drop what a worker made in the present round and the base was never admitted with.

    Raises:
        NotFoundError: there is nothing of the kind.
    """
    if not rows_changed(
        session,
        text(
            "DELETE FROM catalog_maker WHERE base_digest = :base AND round = :round "
            "AND worker = :worker AND catalog_digest NOT IN "
            "(SELECT catalog_digest FROM base_admission WHERE base_digest = :base)"
        ),
        {"base": base.digest, "round": base.round, "worker": worker},
    ):
        raise NotFoundError("not found")


def round_open(session: Session, base: BaseRow) -> None:
    """Begin a new round, in which the base's catalog is made again."""
    session.execute(
        text("UPDATE base SET round = round + 1, remaking = true WHERE digest = :base"),
        {"base": base.digest},
    )


def base_state_set(session: Session, base: BaseRow, state: str) -> None:
    """Set the state of a base that is not admitted."""
    session.execute(
        text("UPDATE base SET state = :state WHERE digest = :base"),
        {"state": state, "base": base.digest},
    )


def base_admit(
    session: Session, base: BaseRow, *, catalog_digest: str, statement: bytes, at: datetime
) -> None:
    """Admit a base with a catalog, or admit it again with another one."""
    values = {"base": base.digest, "catalog": catalog_digest, "statement": statement, "at": at}
    session.execute(
        text(
            "INSERT INTO base_admission (base_digest, catalog_digest, at) "
            "VALUES (:base, :catalog, :at) ON CONFLICT DO NOTHING"
        ),
        values,
    )
    session.execute(
        text(
            "UPDATE base SET state = 'USABLE', catalog_digest = :catalog, statement = :statement, "
            "remaking = false WHERE digest = :base"
        ),
        values,
    )


def catalogs_admitted(session: Session, digest: str) -> tuple[Digest, ...]:
    """Every catalog that a base was ever admitted with, oldest admission first."""
    rows = session.execute(
        text(
            "SELECT catalog_digest FROM base_admission WHERE base_digest = :base "
            "ORDER BY at, catalog_digest"
        ),
        {"base": digest},
    )
    return tuple(Digest(row.catalog_digest) for row in rows)
