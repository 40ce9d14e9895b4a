"""The composition root: the only place that knows which backends stand behind the ports."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI

from registry_service.api.service import service_build
from registry_service.backends.file_signer import FileSigner
from registry_service.backends.filesystem import FilesystemBlobStore
from registry_service.backends.key_folder import LIST_KEY, ROUTING_KEY, VERDICT_KEY
from registry_service.backends.safetensors_library import library_disagreement
from registry_service.backends.system_clock import SystemClock
from registry_service.domain.errors import RegistryError
from registry_service.matching import expressions_match
from registry_service.settings import Settings, settings_load
from registry_service.store.database import database_open
from registry_service.usecases import maintenance
from registry_service.usecases.context import Context
from registry_service.usecases.revocation_list import revocation_list_renew
from registry_service.usecases.scan import scan_next

_log = logging.getLogger("registry_service")

_SEQUENCE_SECONDS: Final = 0.05
_SCAN_SECONDS: Final = 0.2
_SWEEP_SECONDS: Final = 1.0
_LIST_SECONDS: Final = 1.0
_CLEAN_SECONDS: Final = 60.0
_ORPHAN_SECONDS: Final = 3600.0


def context_build(settings: Settings) -> Context:
    """Connect all parts.

    Raises:
        RegistryError, RuntimeError: a part is missing or not what it has to be.
    """
    return Context(
        database=database_open(
            settings.database_url, settings.system_database_url, settings.auditor_database_url
        ),
        blobs=FilesystemBlobStore(settings.blob_dir),
        verdict_signer=FileSigner.load(settings.key_dir / VERDICT_KEY),
        routing_signer=FileSigner.load(settings.key_dir / ROUTING_KEY),
        list_signer=FileSigner.load(settings.key_dir / LIST_KEY),
        clock=SystemClock(),
        verifier_id=settings.verifier_id,
        matcher=expressions_match,
        header_check=library_disagreement,
        revocation_list_seconds=settings.revocation_list_seconds,
        pool_adapters=settings.pool_adapters,
        pool_tenant_adapters=settings.pool_tenant_adapters,
    )


def application() -> FastAPI:
    """The HTTP application, for a server process."""
    return service_build(context_build(settings_load()))


def background_run(context: Context, stop: threading.Event) -> None:
    """Number events, scan, sweep and renew the revocation list until ``stop``.

    Each loop has a thread of its own.
    """
    loops: list[tuple[str, float, Callable[[], object]]] = [
        ("sequencer", _SEQUENCE_SECONDS, lambda: maintenance.events_sequence(context)),
        ("scanner", _SCAN_SECONDS, lambda: _while_any(lambda: scan_next(context), stop)),
        ("revocation list", _LIST_SECONDS, lambda: revocation_list_renew(context)),
        ("sweeper", _SWEEP_SECONDS, lambda: _sweep(context)),
        ("cleaner", _CLEAN_SECONDS, lambda: _clean(context)),
        ("orphans", _ORPHAN_SECONDS, lambda: maintenance.orphans_sweep(context)),
    ]
    threads = [
        threading.Thread(target=_loop, args=(name, seconds, step, stop), name=name)
        for name, seconds, step in loops
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stop_on_signals() -> threading.Event:
    """An event that Ctrl-C and SIGTERM set."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _sweep(context: Context) -> None:
    maintenance.jobs_sweep(context)
    maintenance.revocations_sweep(context)


def _clean(context: Context) -> None:
    maintenance.uploads_sweep(context)
    maintenance.blobs_sweep(context)


def _while_any(step: Callable[[], bool], stop: threading.Event) -> None:
    while not stop.is_set() and step():
        pass


def _loop(name: str, seconds: float, step: Callable[[], object], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            step()
        except RegistryError as error:
            _log.warning("%s: %s: %s", name, error.code, error.message)
            stop.wait(1.0)
        except Exception:  # noqa: BLE001 - the loop goes on, see below
            # A loop that ends would stop admissions silently; the next round may well succeed.
            _log.exception("%s failed", name)
            stop.wait(1.0)
        stop.wait(seconds)
