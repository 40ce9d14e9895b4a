"""What every use case needs, and the transactions: they begin and end in this package only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from uuid import UUID

import psycopg
from psycopg.errors import DeadlockDetected, LockNotAvailable, SerializationFailure
from sqlalchemy import text
from sqlalchemy.exc import DataError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session, sessionmaker

from registry_service.domain import limits
from registry_service.domain.errors import MalformedError, UnavailableError
from registry_service.domain.expressions import Matcher
from registry_service.domain.policy import POLICY, AdmissionPolicy, tenant_active_check
from registry_service.domain.roles import Principal
from registry_service.domain.verification import LibraryCheck
from registry_service.ports import BlobStore, Clock, Signer
from registry_service.store.database import Database
from registry_service.store.tenants import TenantRow, tenant_get

_SET_TENANT = text("SELECT set_config('app.tenant', :tenant, true)")


@dataclass(frozen=True)
class Context:
    """The parts that use cases work with; made once, in ``app``."""

    database: Database
    blobs: BlobStore
    verdict_signer: Signer
    routing_signer: Signer
    list_signer: Signer
    clock: Clock
    verifier_id: str
    matcher: Matcher
    header_check: LibraryCheck | None = None
    policy: AdmissionPolicy = POLICY
    revocation_list_seconds: int = limits.REVOCATION_LIST_SECONDS
    pool_adapters: int = limits.POOL_ADAPTERS
    pool_tenant_adapters: int = limits.POOL_TENANT_ADAPTERS


@dataclass(frozen=True)
class Scope:
    """A transaction inside one tenant."""

    session: Session
    tenant: TenantRow


def policy_of(context: Context, tenant: TenantRow) -> AdmissionPolicy:
    """The rules for a tenant's artifacts: the service's, with what the tenant may."""
    return replace(context.policy, full_tensors=tenant.full_tensors)


@contextmanager
def tenant_transaction(context: Context, tenant_id: UUID) -> Iterator[Session]:
    """A transaction of the app role that sees ``tenant_id`` and nothing else."""
    with _transaction(context.database.app) as session:
        session.execute(_SET_TENANT, {"tenant": str(tenant_id)})
        yield session


@contextmanager
def tenant_scope(
    context: Context, principal: Principal, tenant: str, *, active: bool = False
) -> Iterator[Scope]:
    """A transaction inside the named tenant for a caller that may enter it.

    Raises:
        NotFoundError: no such tenant, or the caller is bound to another one.
        RefusedError: ``active`` is asked for and the tenant is suspended.
    """
    with _transaction(context.database.app) as session:
        row = tenant_get(session, tenant)
        principal.tenant_check(row.id)
        if active:
            tenant_active_check(row.state)
        session.execute(_SET_TENANT, {"tenant": str(row.id)})
        yield Scope(session, row)


@contextmanager
def system_transaction(context: Context) -> Iterator[Session]:
    """A transaction of the system role: claims jobs, numbers events, finds what to sweep."""
    with _transaction(context.database.system) as session:
        yield session


@contextmanager
def reading(context: Context) -> Iterator[Session]:
    """A read-only transaction across tenants, for callers that are bound to none."""
    with _transaction(context.database.auditor) as session:
        yield session


@contextmanager
def principal_reading(
    context: Context, principal: Principal
) -> Iterator[tuple[Session, UUID | None]]:
    """What this caller may read: everything, or its tenant; with the tenant to filter by."""
    if principal.is_platform:
        with reading(context) as session:
            yield session, None
    else:
        with tenant_transaction(context, principal.tenant_id) as session:
            yield session, principal.tenant_id


@contextmanager
def lookup(context: Context) -> Iterator[psycopg.Connection[Any]]:
    """The app role for single statements that read; each is a transaction of its own.

    On the driver itself: authenticating and resolving are the two things that happen on every
    request of a serving fleet, and through SQLAlchemy each cost 0.5 ms more of this process.
    """
    with _faults():
        pooled = context.database.lookup.raw_connection()
        try:
            yield cast("psycopg.Connection[Any]", pooled.driver_connection)
        except psycopg.OperationalError:
            pooled.invalidate()
            raise
        finally:
            pooled.close()


def database_check(context: Context) -> None:
    """The database answers.

    Raises:
        UnavailableError: it does not.
    """
    with lookup(context) as connection:
        connection.execute("SELECT 1")


@contextmanager
def _transaction(maker: sessionmaker[Session]) -> Iterator[Session]:
    with _faults(), maker.begin() as session:
        yield session


@contextmanager
def _faults() -> Iterator[None]:
    """Turn what the database says into what the caller can do about it."""
    try:
        yield
    except (DataError, psycopg.DataError, UnicodeEncodeError) as error:
        raise MalformedError("a value that cannot be stored: a NUL, or out of range") from error
    except OperationalError as error:
        if isinstance(error.orig, DeadlockDetected | SerializationFailure | LockNotAvailable):
            raise UnavailableError("two changes met; try again", retry_after=1) from error
        raise UnavailableError("the database does not answer; try again") from error
    except psycopg.OperationalError as error:
        raise UnavailableError("the database does not answer; try again") from error
    except PoolTimeoutError as error:
        raise UnavailableError("the database is busy; try again") from error
