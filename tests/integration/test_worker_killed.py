"""A real validation worker is killed in the middle of its job: the job runs again elsewhere."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from cli.base_folder import base_read
from cli.output import ProgressLines
from cli.publish_folder import Statement, declaration_build, files_choose, publish_files
from registry_service.usecases.context import system_transaction
from tests.integration.conftest import World
from tests.integration.validation_inputs import adapter_make, base_make

TENANT, ADAPTER = "t-1042", "real"

# peft 0.21 uses what transformers 5.24 deprecates; the adapter is made with both as they are.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


# The real main. One that stands never sends what came of an adapter.
PROGRAM = """
import sys, threading
from gpu_worker.validation.__main__ import main
from gpu_worker.validation.worker import ValidationWorker
send = ValidationWorker._send
def stand(self, job, answer):
    if job["kind"] == "validate":
        threading.Event().wait()
    send(self, job, answer)
if sys.argv[1] == "stands":
    ValidationWorker._send = stand
sys.exit(main(sys.argv[2:]))
"""


@contextmanager
def worker(
    world: World, folder: Path, base: Path, role: str, log: Path, how: str = "works"
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process with a token and a scratch folder of its own; killed at the end."""
    token = folder / f"{role}.token"
    token.touch(mode=0o600)
    token.write_text(world.tokens[role])
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", PROGRAM, how, "--url", world.url),
                *("--token-file", str(token), "--name", role, "--base", str(base)),
                *("--scratch", str(folder / f"scratch-{role}"), "--device", "cpu"),
            ],
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(what: str, found: Callable[[], Any], log: Path) -> Any:
    for _ in range(2400):
        if value := found():
            return value
        time.sleep(0.05)
    raise AssertionError(f"{what}: nothing after two minutes\n{log.read_text()[-2000:]}")


@pytest.mark.timeout(600)
def test_a_job_whose_worker_was_killed_runs_again_elsewhere(world: World, tmp_path: Path) -> None:
    folder = base_make(tmp_path / "base")
    adapter = adapter_make(folder, tmp_path / "adapter", task_type="CAUSAL_LM")
    with ProgressLines("hashing") as progress:
        base = base_read("real", folder, progress)
    log = tmp_path / "worker.log"
    with world.client("operator") as operator:
        operator.base_add("real", base.manifest, base.files, base.headers)
        operator.base_grant("real", TENANT)

        def running() -> Any:
            jobs = list(operator.job_list(state="RUNNING"))
            return next((job for job in jobs if job["kind"] == "validate"), None)

        with worker(world, tmp_path, folder, "validator", log, "stands") as first:
            made = until("a catalog", lambda: operator.base_show("real")["catalogs"], log)
            # The second maker agrees: as a serving node would.
            with world.client("node") as node:
                node.catalog_submit("real", _catalog(world))
            assert made[0]["worker"] == "worker-1"
            chosen = files_choose(adapter, operator.base_show("real"))
            declaration = declaration_build(
                chosen, operator.base_show("real"), Statement(TENANT, ADAPTER, "1", "none", 1)
            )
            with world.client("publisher:t-1042") as publisher:
                digest = publisher.push(TENANT, ADAPTER, publish_files(chosen, declaration))
            world.settle()
            job = until("a running job", running, log)
            first.kill()
            first.wait()
        assert operator.artifact_show(TENANT, digest)["state"] == "VALIDATING"
        with system_transaction(world.context) as session:
            # The lease runs out; nobody waits half a minute for it here.
            session.execute(
                text("UPDATE job SET lease_until = now() WHERE id = CAST(:id AS uuid)"),
                {"id": job["id"]},
            )
        with worker(world, tmp_path, folder, "worker-2", log):
            until(
                "a decision",
                lambda: operator.artifact_show(TENANT, digest)["state"] == "IN_REVIEW",
                log,
            )
        reports = operator.report_list(TENANT, digest)
    last = reports[-1]
    assert (last["worker"], last["attempt"], last["verdict"]) == ("worker-2", 2, "pass")
    assert last["sandbox"] is True
    assert last["checks"] == [9, 10, 11, 12, 13, 14, 15]


def _catalog(world: World) -> bytes:
    with world.context.database.app() as session:
        content = session.execute(
            text(
                "SELECT c.content FROM base_catalog c JOIN base b ON b.digest = c.base_digest "
                "WHERE b.name = 'real'"
            )
        )
        return bytes(content.scalar_one())
