"""The worker's loop: claim, fetch, have it checked in the sandbox, answer.

This process holds the token. It hashes an adapter's bytes on their way to disk and never parses
them.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_worker.base_files import ProvenBase, base_reprove
from gpu_worker.validation.heartbeat import Heartbeat
from gpu_worker.validation.report import ReportError, report_build
from gpu_worker.validation.sandbox import Sandbox
from gpu_worker.validation.supervisor import Ready, Zygote, ZygoteFaultError, catalog_make
from registry_service.client import RegistryClient
from registry_service.domain import limits
from registry_service.domain.catalog import catalog_parse
from registry_service.domain.errors import (
    ConflictError,
    ForbiddenError,
    RegistryError,
    UnauthenticatedError,
    UnavailableError,
)
from registry_service.domain.text import bounded

log = logging.getLogger("gpu_worker.validation")

KINDS: Final = ("validate", "catalog")
IDLE_SECONDS: Final = 0.5
BACKOFF_SECONDS: Final = 15.0
SEND_TRIES: Final = 5
ZYGOTES: Final = 2
"""Bases held in memory at a time; the least recently used one makes room."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Who the worker is and where it works. ``scratch`` is this worker's alone."""

    name: str
    scratch: Path
    device: str
    sandbox: Sandbox


class ValidationWorker:
    """Runs jobs until it is stopped. All but ``stop`` belongs to the main thread."""

    def __init__(
        self, client: RegistryClient, settings: WorkerSettings, bases: Sequence[ProvenBase]
    ) -> None:
        self._client = client
        self._settings = settings
        self._bases: dict[str, ProvenBase] = {base.digest: base for base in bases}
        self._zygotes: dict[str, tuple[Zygote, Ready]] = {}
        self._stop = threading.Event()
        self._inputs = settings.scratch / "inputs"

    def stop(self) -> None:
        """Ask the loop to end; a running job is given back. Safe in a signal handler."""
        self._stop.set()

    def prepare(self) -> None:
        """Empty the scratch directory and bring up the first base, so that the first job is quick.

        Raises:
            ZygoteFaultError: the base does not load.
        """
        shutil.rmtree(self._inputs, ignore_errors=True)
        self._inputs.mkdir(parents=True, mode=0o700)
        for base in list(self._bases.values())[:1]:
            try:
                self._zygote(base)
            except ZygoteFaultError:
                if not self._stop.is_set():
                    raise

    def run(self) -> None:
        """Work until stopped.

        Raises:
            UnauthenticatedError, ForbiddenError: the token is of no use.
            UnavailableError: no base on this node is what it was.
        """
        pause = IDLE_SECONDS
        try:
            while not self._stop.is_set():
                try:
                    busy = self._once()
                    pause = IDLE_SECONDS
                except (UnauthenticatedError, ForbiddenError):
                    raise
                except RegistryError as error:
                    log.warning("no job: %s; trying again in %.1f s", error.message, pause)
                    busy, pause = False, min(BACKOFF_SECONDS, pause * 2)
                if not busy:
                    self._stop.wait(pause)
                if not self._bases:
                    raise UnavailableError("no base on this node is what it was at the start")
        finally:
            for zygote, _ in self._zygotes.values():
                zygote.close()
            self._zygotes.clear()
            shutil.rmtree(self._inputs, ignore_errors=True)

    def _once(self) -> bool:
        job = self._client.job_claim(self._settings.name, KINDS, list(self._bases))
        if job is None:
            return False
        log.info("job %s: %s, attempt %s", job["id"], job["kind"], job["attempt"])
        with Heartbeat(
            self._client, job["id"], job["lease"], float(job["leaseSeconds"])
        ) as heartbeat:
            answer = self._answer(job, heartbeat)
            if not heartbeat.lost.is_set():
                self._send(job, answer)
        return True

    def _answer(self, job: dict[str, Any], heartbeat: Heartbeat) -> dict[str, Any]:
        """What to send: a report, a catalog, or the reason of a fault."""

        def stopped() -> bool:
            return self._stop.is_set() or heartbeat.lost.is_set()

        folder = self._inputs / str(job["id"])
        try:
            base = self._base(str(job["baseModelDigest"]))
            if job["kind"] == "catalog":
                content = catalog_make(self._settings.sandbox, base, self._inputs, stopped)
                return {"catalog": json.loads(catalog_parse(content).to_bytes())}
            zygote, ready = self._zygote(base)
            manifest = self._client.pull(
                job["tenant"], job["adapter"], job["adapterDigest"], folder
            )
            result = self._checked(zygote, folder, manifest.files, stopped)
            sandbox = self._settings.sandbox.active
            report = report_build(
                result, device=ready.device, versions=ready.versions, sandbox=sandbox
            )
            return {"report": report}
        except (ZygoteFaultError, ReportError) as error:
            return {"fault": str(error)}
        except RegistryError as error:
            return {"fault": f"{error.code}: {error.message}"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _checked(self, zygote: Zygote, folder: Path, files: Any, stopped: Any) -> dict[str, Any]:
        try:
            return zygote.run(folder, files, stopped)
        except ZygoteFaultError:
            # After any abnormal end nothing in there is trusted: the next job gets a new one.
            self._zygotes.pop(zygote.base.digest, None)
            zygote.close()
            raise

    def _base(self, digest: str) -> ProvenBase:
        if digest not in self._bases:
            raise ReportError(f"this worker does not hold base {bounded(digest)}")
        try:
            self._bases[digest] = base_reprove(self._bases[digest])
        except RegistryError:
            # It is another base now: this worker claims nothing for it any more.
            del self._bases[digest]
            if digest in self._zygotes:
                self._zygotes.pop(digest)[0].close()
            raise
        return self._bases[digest]

    def _zygote(self, base: ProvenBase) -> tuple[Zygote, Ready]:
        # Taken out and put back: the order of the dictionary is that of use.
        held = self._zygotes.pop(base.digest, None)
        if held is None:
            while len(self._zygotes) >= ZYGOTES:
                self._zygotes.pop(next(iter(self._zygotes)))[0].close()
            settings = self._settings
            zygote = Zygote(settings.sandbox, base, self._inputs, device=settings.device)
            try:
                held = (zygote, zygote.ready(self._stop.is_set))
            except ZygoteFaultError:
                zygote.close()
                raise
        self._zygotes[base.digest] = held
        return held

    def _send(self, job: dict[str, Any], answer: dict[str, Any]) -> None:
        """Send an answer, several times if need be; the lease is held meanwhile."""
        for attempt in range(SEND_TRIES):
            try:
                self._send_once(job["id"], job["lease"], answer)
                return
            except ConflictError as error:
                log.warning("job %s: the result came too late: %s", job["id"], error.message)
                return
            except UnavailableError as error:
                log.warning("job %s: %s", job["id"], error.message)
                if self._stop.wait(min(BACKOFF_SECONDS, IDLE_SECONDS * 2**attempt)):
                    return
            except RegistryError as error:
                # The service does not take this answer: without an end the job would only time out.
                answer = {"fault": f"the result was refused: {error.code}: {error.message}"}

    def _send_once(self, job_id: str, lease: int, answer: dict[str, Any]) -> None:
        if "fault" in answer:
            reason = bounded(answer["fault"], limits.REASON_CHARS - 10)
            log.warning("job %s: fault: %s", job_id, reason)
            self._client.job_fault(job_id, lease, reason)
        else:
            self._client.job_complete(job_id, lease, **answer)
            log.info("job %s: done", job_id)
