"""What PostgreSQL itself refuses: unlisted moves, rewritten history, other tenants' rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from registry_service.domain.lifecycle import TRANSITIONS
from registry_service.store.database import database_open
from registry_service.store.migrate import OWNER, driver_url, migrate
from registry_service.usecases.context import reading, tenant_transaction
from tests.conftest import TestDatabase, _execute, _with
from tests.integration.conftest import World

ROOT = Path(__file__).parents[2]


def tenant_id(world: World, name: str) -> UUID:
    with reading(world.context) as session:
        return UUID(
            str(
                session.execute(
                    text("SELECT id FROM tenant WHERE name = :name"), {"name": name}
                ).scalar_one()
            )
        )


def refused(world: World, tenant: UUID, act: Callable[[Session], object]) -> str:
    with pytest.raises(DBAPIError) as caught, tenant_transaction(world.context, tenant) as session:
        act(session)
    return str(caught.value.orig)


def test_the_table_of_moves_is_that_of_the_domain(world: World) -> None:
    with reading(world.context) as session:
        rows = {tuple(row) for row in session.execute(text("SELECT * FROM transition"))}
    expected = {(s.value, e.value, t.value) for (s, e), t in TRANSITIONS.items()}
    assert rows == expected | {("NEW", "created", "NEW")}


def test_an_update_of_the_state_alone_is_refused(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path / "a")
    tenant = tenant_id(world, "t-1042")
    for statement in (
        "UPDATE artifact SET state = 'APPROVED'",
        "UPDATE artifact SET state = 'APPROVED', revision = revision + 1",
        "UPDATE artifact SET state = 'NEW', revision = 0",
    ):
        refused(world, tenant, lambda s, statement=statement: s.execute(text(statement)))


def test_an_unlisted_move_is_refused(world: World, tmp_path: Path) -> None:
    digest = world.publish(tmp_path / "a")
    tenant = tenant_id(world, "t-1042")

    def jump(session: Session) -> None:
        event = session.execute(
            text("SELECT event_id FROM move WHERE revision = 1 AND artifact_digest = :d"),
            {"d": digest},
        ).scalar_one()
        session.execute(
            text(
                "INSERT INTO move (tenant_id, artifact_digest, revision, previous_revision, "
                "from_state, event, to_state, actor, reason, event_id, at) VALUES (:t, :d, 2, 1, "
                "'SCANNING', 'approved', 'APPROVED', 'x', '', :e, now())"
            ),
            {"t": tenant, "d": digest, "e": event},
        )

    message = refused(world, tenant, jump)
    assert "transition" in message or "event_id" in message


def test_history_cannot_be_rewritten(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path / "a")
    tenant = tenant_id(world, "t-1042")
    for statement in (
        "UPDATE event SET actor = 'x'",
        "DELETE FROM event",
        "UPDATE move SET actor = 'x'",
        "DELETE FROM move",
        "DELETE FROM artifact",
        "INSERT INTO transition VALUES ('NEW', 'x', 'APPROVED')",
    ):
        message = refused(world, tenant, lambda s, statement=statement: s.execute(text(statement)))
        assert "permission denied" in message


def test_a_transaction_sees_its_tenant_only(world: World, tmp_path: Path) -> None:
    world.publish(tmp_path / "a")
    tables = ("artifact", "move", "event", "blob", "token", "job", "artifact_blob", "base_grant")
    theirs, own = tenant_id(world, "t-2001"), tenant_id(world, "t-1042")
    for table in tables:
        count = text(f"SELECT count(*) FROM {table} WHERE tenant_id = :own")
        with tenant_transaction(world.context, theirs) as session:
            assert session.execute(count, {"own": own}).scalar_one() == 0, table
        with tenant_transaction(world.context, own) as session:
            assert session.execute(count, {"own": own}).scalar_one() > 0, table
    with world.context.database.app.begin() as session:
        assert session.execute(text("SELECT count(*) FROM artifact")).scalar_one() == 0


def test_every_tenant_table_forces_row_level_security(database: TestDatabase) -> None:
    engine = create_engine(driver_url(database.superuser_url))
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT c.relname, c.relrowsecurity AND c.relforcerowsecurity AS forced "
                "FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid "
                "WHERE a.attname = 'tenant_id' AND c.relkind = 'r' "
                "AND c.relnamespace = 'public'::regnamespace"
            )
        ).all()
    engine.dispose()
    assert len(rows) == 20
    assert [row.relname for row in rows if not row.forced] == []


def test_the_service_refuses_another_role(database: TestDatabase) -> None:
    with pytest.raises(RuntimeError, match="superuser"):
        database_open(database.superuser_url, database.system_url, database.auditor_url)
    with pytest.raises(RuntimeError, match="expected database role registry_app"):
        database_open(database.system_url, database.system_url, database.auditor_url)


def test_a_fresh_schema_equals_a_migrated_one(superuser_url: str, database: TestDatabase) -> None:
    _execute(superuser_url, "CREATE DATABASE fresh")
    fresh_url = _with(superuser_url, database="fresh")
    engine = create_engine(driver_url(fresh_url))
    with engine.connect() as connection:
        connection.execute(text(f"GRANT CREATE, USAGE ON SCHEMA public TO {OWNER}"))
        connection.execute(text(f"SET ROLE {OWNER}"))
        schema = (ROOT / "registry_service/store/schema.sql").read_text(encoding="utf-8")
        connection.connection.dbapi_connection.execute(schema)
        connection.commit()
        fresh = shape(connection)
    engine.dispose()
    _execute(superuser_url, "DROP DATABASE fresh WITH (FORCE)")
    migrate(database.superuser_url)
    engine = create_engine(driver_url(database.superuser_url))
    with engine.connect() as connection:
        migrated = shape(connection)
    engine.dispose()
    assert len(fresh) > 300
    assert fresh == migrated


def shape(connection: object) -> set[tuple[str, ...]]:
    """Everything that makes a schema: columns, constraints, indexes, policies, grants, code."""
    queries = (
        "SELECT 'column', table_name, column_name, data_type, is_nullable, "
        "coalesce(column_default, '') FROM information_schema.columns "
        "WHERE table_schema = 'public'",
        "SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid) "
        "FROM pg_constraint WHERE connamespace = 'public'::regnamespace",
        "SELECT 'index', tablename, indexname, indexdef FROM pg_indexes "
        "WHERE schemaname = 'public'",
        "SELECT 'policy', tablename, policyname, roles::text, cmd, qual FROM pg_policies",
        "SELECT 'grant', table_name, grantee, privilege_type FROM "
        "information_schema.role_table_grants WHERE table_schema = 'public'",
        "SELECT 'column grant', table_name, column_name, grantee, privilege_type FROM "
        "information_schema.role_column_grants WHERE table_schema = 'public'",
        "SELECT 'function', proname, prosrc, prosecdef::text FROM pg_proc "
        "WHERE pronamespace = 'public'::regnamespace",
        "SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(oid) "
        "FROM pg_trigger WHERE NOT tgisinternal",
    )
    found = set()
    for query in queries:
        for row in connection.execute(text(query)):  # type: ignore[attr-defined]  # a stand-in, or wrong on purpose
            values = tuple(str(value) for value in row)
            if "alembic_version" not in values[1]:
                found.add(values)
    return found
