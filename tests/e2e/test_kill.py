"""The service process is killed in the middle of publishing: repeating it loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from cli.stack import port_free
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RegistryError
from registry_service.domain.limits import MIB
from registry_service.usecases.context import Context, reading
from registry_service.usecases.tenants import token_create
from tests.conftest import TestDatabase
from tests.integration.conftest import World, lora_tensors, safetensors_bytes, world_prepare

# Moments of death after the upload began, in seconds: in the bytes, at the commit, in the rows.
MOMENTS = (0.0, 0.02, 0.05, 0.09, 0.15)


@contextmanager
def served(database: TestDatabase, folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The service as a process of its own; killed at the end."""
    environment = {
        **os.environ,
        "REGISTRY_DATABASE_URL": database.app_url,
        "REGISTRY_SYSTEM_DATABASE_URL": database.system_url,
        "REGISTRY_AUDITOR_DATABASE_URL": database.auditor_url,
        "REGISTRY_BLOB_DIR": str(folder / "blobs"),
        "REGISTRY_KEY_DIR": str(folder / "keys"),
        "REGISTRY_VERIFIER_ID": "urn:adapter-registry:test",
        "REGISTRY_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "registry_service", "serve"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(2400):
            try:
                httpx.get(f"http://127.0.0.1:{port}/v1/health")
                break
            except httpx.TransportError:
                assert process.poll() is None, "the service ended"
                time.sleep(0.05)
        else:
            raise AssertionError("the service does not answer")
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def killable(context: Context, database: TestDatabase, tmp_path: Path) -> World:
    port = port_free()
    admin = token_create(context, "test", subject="admin", role="admin", tenant=None)["token"]
    world = World(f"http://127.0.0.1:{port}", context, {"admin": admin}, Digest(""), {})
    with served(database, tmp_path, port):
        world_prepare(world)
    return world


@pytest.mark.timeout(900)
def test_repeating_a_publish_that_died_with_the_service_is_safe(
    killable: World, database: TestDatabase, tmp_path: Path
) -> None:
    port = int(killable.url.rsplit(":", 1)[1])
    # Large enough that a death falls into the bytes; a rank of its own for each moment.
    digests = []
    for number, moment in enumerate(MOMENTS):
        options = {
            "fill": number + 1,
            "weights": safetensors_bytes(lora_tensors(width=MIB // 16), number + 1),
            "label": f"v{number}",
        }
        with served(database, tmp_path, port) as process:
            timer = threading.Timer(moment, process.send_signal, [signal.SIGKILL])
            (tmp_path / str(number)).mkdir()
            killable.folder(tmp_path / str(number), fill=number + 1, weights=options["weights"])
            timer.start()
            try:
                killable.publish(tmp_path / str(number), **options)
            except RegistryError as error:
                assert error.exit_code == 7, error
            timer.join()
        with served(database, tmp_path, port):
            digests.append(killable.publish(tmp_path / str(number), **options))
    assert len(set(digests)) == len(MOMENTS)
    killable.settle()
    with reading(killable.context) as session:
        rows = session.execute(text("SELECT digest, state FROM artifact")).all()
        submitted = session.execute(
            text("SELECT count(*) FROM event WHERE kind = 'artifact.submitted'")
        ).scalar_one()
    # Each is there once and was scanned: refused for its width, by findings and not by the fault.
    assert {(row.digest, row.state) for row in rows} == {(d, "REJECTED") for d in digests}
    assert submitted == len(MOMENTS)
