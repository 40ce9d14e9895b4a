"""Connections: one engine a database role, each proven to be that role before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import CursorResult, Executable, create_engine, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from registry_service.domain.errors import UnavailableError
from registry_service.store.migrate import APP, AUDITOR, SYSTEM, driver_url

_ROLE_SQL = text(
    "SELECT current_user::text AS name, r.rolsuper, r.rolbypassrls, "
    "pg_has_role(current_user, 'registry_owner', 'MEMBER') AS owns "
    "FROM pg_roles r WHERE r.rolname = current_user"
)


@dataclass(frozen=True)
class Database:
    """Session makers of the three roles that serve. None of them commits by itself."""

    app: sessionmaker[Session]
    system: sessionmaker[Session]
    auditor: sessionmaker[Session]
    # The app role for single statements, each a transaction of its own: one round trip, not three.
    lookup: Engine
    engines: tuple[Engine, ...]

    def close(self) -> None:
        """Close all connections."""
        for engine in self.engines:
            engine.dispose()


def database_open(app_url: str, system_url: str, auditor_url: str, *, pool: int = 20) -> Database:
    """Connect as the three roles.

    Raises:
        UnavailableError: the database does not answer.
        RuntimeError: a connection is a superuser, the owner, bypasses row-level security, or is
            another role than expected.
    """
    engines = (
        *(_engine(url, pool) for url in (app_url, system_url, auditor_url)),
        _engine(app_url, pool, isolation_level="AUTOCOMMIT", pool_reset_on_return=None),
    )
    for engine, expected in zip(engines, (APP, SYSTEM, AUDITOR, APP), strict=True):
        _role_check(engine, expected)
    app, system, auditor = (sessionmaker(engine, expire_on_commit=False) for engine in engines[:3])
    return Database(app, system, auditor, engines[3], engines)


def rows_changed(session: Session, statement: Executable, values: Mapping[str, Any]) -> int:
    """Run an INSERT, UPDATE or DELETE; how many rows it changed."""
    return cast("CursorResult[Any]", session.execute(statement, values)).rowcount


def _engine(url: str, pool: int, **options: Any) -> Engine:
    return create_engine(
        driver_url(url),
        pool_size=pool,
        max_overflow=0,
        pool_timeout=10,
        pool_pre_ping=False,
        hide_parameters=True,
        **options,
        connect_args={"connect_timeout": 5, "options": "-c statement_timeout=30000"},
    )


def _role_check(engine: Engine, expected: str) -> None:
    try:
        with engine.connect() as connection:
            row = connection.execute(_ROLE_SQL).one()
    except OperationalError as error:
        raise UnavailableError("the database does not answer; is it running?") from error
    if row.rolsuper or row.rolbypassrls or row.owns:
        raise RuntimeError(
            f"refusing to start: database role {row.name} is a superuser, the owner or bypasses "
            f"row-level security; connect as {expected}"
        )
    if row.name != expected:
        raise RuntimeError(f"refusing to start: expected database role {expected}, got {row.name}")
