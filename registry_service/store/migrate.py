"""Create the four database roles and bring the schema to the newest migration.

Runs as the database's administrator, becomes ``registry_owner`` for the schema itself. One
migration runs at a time (advisory lock), and none waits long for a lock or runs without bound, so
that a deployment cannot stand still behind a long query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.engine import URL, Connection, make_url

import migrations

OWNER: Final = "registry_owner"
APP: Final = "registry_app"
SYSTEM: Final = "registry_system"
AUDITOR: Final = "registry_auditor"

_ADVISORY_LOCK: Final = 7_262_001
_LOCK_TIMEOUT: Final = "5s"
_STATEMENT_TIMEOUT: Final = "60s"


def driver_url(url: str) -> URL:
    """``url`` with SQLAlchemy's psycopg 3 driver."""
    return make_url(url).set(drivername="postgresql+psycopg")


def migrate(superuser_url: str) -> None:
    """Create missing roles and run all migrations. Safe to repeat and to run concurrently."""
    engine = create_engine(driver_url(superuser_url))
    try:
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _ADVISORY_LOCK})
            try:
                _roles_create(connection)
                _schema_upgrade(connection)
            finally:
                connection.rollback()
                connection.execute(text("RESET ROLE"))
                connection.execute(
                    text("SELECT pg_advisory_unlock(:lock)"), {"lock": _ADVISORY_LOCK}
                )
                connection.commit()
    finally:
        engine.dispose()


def _roles_create(connection: Connection) -> None:
    for role in (OWNER, APP, SYSTEM, AUDITOR):
        if not connection.execute(
            text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}
        ).scalar():
            login = "NOLOGIN" if role == OWNER else "LOGIN"
            connection.execute(
                text(f"CREATE ROLE {role} {login} NOSUPERUSER NOBYPASSRLS NOCREATEDB NOCREATEROLE")
            )
    connection.execute(text(f"GRANT {OWNER} TO CURRENT_USER"))
    connection.execute(text(f"GRANT CREATE, USAGE ON SCHEMA public TO {OWNER}"))
    connection.commit()


def _schema_upgrade(connection: Connection) -> None:
    connection.execute(text(f"SET ROLE {OWNER}"))
    connection.execute(text(f"SET lock_timeout = '{_LOCK_TIMEOUT}'"))
    connection.execute(text(f"SET statement_timeout = '{_STATEMENT_TIMEOUT}'"))
    connection.commit()
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    connection.commit()
