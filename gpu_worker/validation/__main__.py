"""``python -m gpu_worker.validation``: the validation worker's command line."""

from __future__ import annotations

import argparse
import fcntl
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_worker.base_files import base_prove
from gpu_worker.validation.confine import process_unreadable
from gpu_worker.validation.sandbox import sandbox_find
from gpu_worker.validation.supervisor import ZygoteFaultError
from gpu_worker.validation.worker import ValidationWorker, WorkerSettings, log
from registry_service.client import RegistryClient
from registry_service.domain.errors import (
    ConflictError,
    MalformedError,
    RegistryError,
    UnavailableError,
)
from registry_service.domain.limits import KIB

_TOKEN_BYTES: Final = 4 * KIB


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and work until SIGTERM. Returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        _work(options)
    except ZygoteFaultError as error:
        log.error("%s", error)
        return UnavailableError.exit_code
    except RegistryError as error:
        log.error("%s", error.message)
        return error.exit_code
    return 0


def _work(options: argparse.Namespace) -> None:
    process_unreadable()
    cuda = options.device != "cpu" and Path("/dev/nvidiactl").exists()
    sandbox = sandbox_find(wanted=not options.no_sandbox, cuda=cuda)
    if not sandbox.active:
        log.warning("--no-sandbox: adapters are opened without a sandbox; every report says so")
    scratch = _scratch(options.scratch, options.name)
    bases = [base_prove(directory) for directory in options.base]
    settings = WorkerSettings(options.name, scratch, options.device, sandbox)
    with RegistryClient(options.url, _token(options.token_file)) as client:
        try:
            # A token of no use is said at once, not after a base was loaded.
            client.whoami()
        except UnavailableError as error:
            log.warning("%s; starting all the same", error.message)
        worker = ValidationWorker(client, settings, bases)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        worker.prepare()
        named = ", ".join(base.digest for base in bases)
        log.info("ready: %s, sandbox %s, bases %s", options.name, sandbox.active, named)
        worker.run()
    log.info("stopped")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker.validation", description="Checks adapters before admission."
    )
    parser.add_argument("--url", required=True, help="the registry's address")
    parser.add_argument("--token-file", required=True, type=Path, help="file with the token")
    parser.add_argument("--name", required=True, help="this worker's name")
    parser.add_argument(
        "--base", required=True, type=Path, action="append", help="a base's directory; repeatable"
    )
    parser.add_argument("--scratch", required=True, type=Path, help="directory to work in")
    parser.add_argument(
        "--no-sandbox", action="store_true", help="work without a sandbox; every report says so"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _token(path: Path) -> str:
    try:
        with path.open("rb") as file:
            token = file.read(_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MalformedError(f"--token-file {path}: cannot be read: {error}") from error
    if not token:
        raise MalformedError(f"--token-file {path}: is empty")
    return token


def _scratch(root: Path, name: str) -> Path:
    """This worker's own directory, locked as long as it lives."""
    if not name or name.startswith(".") or "/" in name or len(name) > 128:
        raise MalformedError("--name: expected a plain name")
    scratch = root.resolve() / name
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        # Kept open to the end of the process on purpose: the lock goes with it.
        lock = os.open(scratch / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConflictError(f"--scratch {scratch}: a worker of this name runs already") from error
    except OSError as error:
        raise UnavailableError(f"--scratch {scratch}: {error.strerror}") from error
    return scratch


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
