"""The scan: static checks 1 to 5 and 8 on the stored bytes, without torch, in the service.

A reader that fails on the bytes is a finding. A fault of ours (the store, the database, a base
whose catalog is not agreed yet) gives the job back; it never ends the artifact.
"""

from __future__ import annotations

import platform
from typing import Any, Final

from registry_service.domain import limits
from registry_service.domain.catalog import Catalog, catalog_parse
from registry_service.domain.comparison import measured_modules
from registry_service.domain.errors import RegistryError, UnavailableError
from registry_service.domain.file_set import HEAD_BYTES, TAIL_BYTES, FileFact
from registry_service.domain.findings import Check, Code, Finding, refuse
from registry_service.domain.manifest import FileEntry
from registry_service.domain.policy import AdmissionPolicy
from registry_service.domain.report import findings_cut
from registry_service.domain.safetensors_header import LENGTH_BYTES, header_end
from registry_service.domain.verification import (
    WHOLE_PATHS,
    BaseFacts,
    StaticInputs,
    own_facts,
    static_check,
)
from registry_service.store import jobs as job_store
from registry_service.store.artifacts import ArtifactRow, artifact_files, artifact_get
from registry_service.store.bases import BaseRow, base_find, base_granted
from registry_service.store.catalogs import catalog_get
from registry_service.store.tenants import tenant_get
from registry_service.usecases.comparison import change_findings
from registry_service.usecases.context import (
    Context,
    policy_of,
    system_transaction,
    tenant_transaction,
)
from registry_service.usecases.jobs import job_failed, job_holding, job_settle

SCANNER: Final = "scanner"
_BASE_SECONDS: Final = 2.0
_CHECKS: Final = (1, 2, 3, 4, 5, 8)


class BaseNotReadyError(UnavailableError):
    """The base has no agreed catalog yet; the scan waits for it."""


def scan_next(context: Context) -> bool:
    """Run the next scan, if there is one; True when there was."""
    with system_transaction(context) as session:
        job = job_store.job_claim(session, worker=SCANNER, kinds=["scan"], bases=None)
    if job is None:
        return False
    try:
        rules, findings = _scan(context, job)
    except BaseNotReadyError as error:
        with job_holding(context, job.id, job.lease, SCANNER) as held:
            job_store.job_postpone(held.session, held.job, error.message, seconds=_BASE_SECONDS)
    except RegistryError as error:
        with job_holding(context, job.id, job.lease, SCANNER) as held:
            job_failed(context, held, f"{error.code}: {error.message}")
    else:
        with job_holding(context, job.id, job.lease, SCANNER) as held:
            job_settle(context, held, findings, _report(rules, findings))
    return True


def _scan(context: Context, job: job_store.JobRow) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """What the checks went by, and what they found.

    The verdict names the same, whatever the tenant may and the base's catalog is meanwhile.
    """
    with tenant_transaction(context, job.tenant_id) as session:
        artifact = artifact_get(session, job.tenant_id, job.subject)
        files = artifact_files(session, job.tenant_id, job.subject)
        policy = policy_of(context, tenant_get(session, artifact.tenant))
        base = base_find(session, artifact.base_digest)
        if base is None or not base_granted(session, job.tenant_id, base.digest):
            unknown = refuse(
                Check.DECLARATION,
                Code.BASE_UNKNOWN,
                "adapter-declaration.json: baseModelDigest",
                "the digest of a base that this tenant may use",
                artifact.base_digest,
            )
            return {"fullTensors": policy.full_tensors}, (unknown,)
        if base.catalog_digest is None:
            raise BaseNotReadyError(f"base '{base.name}' is {base.state}: no agreed catalog")
        catalog = catalog_parse(catalog_get(session, base.digest, base.catalog_digest))
    inputs = _inputs(context, policy, artifact, files, base, catalog)
    rules = {"fullTensors": policy.full_tensors, "catalogDigest": base.catalog_digest}
    report = static_check(inputs, context.header_check, context.matcher)
    with tenant_transaction(context, job.tenant_id) as session:
        changes = change_findings(session, artifact, report.modules)
    return {**rules, **measured_modules(report.modules)}, (*report.findings, *changes)


def _inputs(
    context: Context,
    policy: AdmissionPolicy,
    artifact: ArtifactRow,
    files: list[FileEntry],
    base: BaseRow,
    catalog: Catalog,
) -> StaticInputs:
    def part(file: FileEntry, start: int, end: int) -> bytes:
        return b"".join(
            context.blobs.open(
                artifact.tenant_id,
                file.digest,
                size=file.size,
                start=start,
                end=min(end, file.size),
            )
        )

    def header(file: FileEntry) -> bytes:
        return part(file, 0, header_end(part(file, 0, LENGTH_BYTES)))

    by_path = {file.path: file for file in files}
    weight = by_path.get("adapter_model.safetensors")
    return StaticInputs(
        files=tuple(
            FileFact(
                path=file.path,
                size=file.size,
                head=part(file, 0, HEAD_BYTES),
                tail=part(file, max(0, file.size - TAIL_BYTES), file.size),
                is_link=False,
            )
            for file in files
        ),
        header_prefix=None if weight is None else header(weight),
        weight_size=0 if weight is None else weight.size,
        config=_whole(context, artifact, by_path.get("adapter_config.json"), limits.CONFIG_BYTES),
        declaration=_whole(
            context, artifact, by_path.get("adapter-declaration.json"), limits.DECLARATION_BYTES
        ),
        catalog=catalog,
        own=own_facts(
            {file.path: file.digest for file in files},
            {
                path: context.blobs.read(
                    artifact.tenant_id, by_path[path].digest, limit=limits.DOC_BYTES
                )
                for path in WHOLE_PATHS & by_path.keys()
                if by_path[path].size <= limits.DOC_BYTES
            },
        ),
        max_rank=policy.max_rank,
        max_weight_bytes=policy.max_weight_bytes,
        full_tensors=policy.full_tensors,
        base=BaseFacts(
            tokenizer_digest=base.tokenizer_digest, chat_template_digest=base.chat_template_digest
        ),
    )


def _whole(
    context: Context, artifact: ArtifactRow, file: FileEntry | None, limit: int
) -> bytes | None:
    if file is None:
        return None
    if file.size > limit:
        # One byte over is enough for the reader to say so.
        chunks = context.blobs.open(
            artifact.tenant_id, file.digest, size=file.size, start=0, end=limit + 1
        )
        return b"".join(chunks)
    return context.blobs.read(artifact.tenant_id, file.digest, limit=limit)


def _report(rules: dict[str, Any], findings: tuple[Finding, ...]) -> dict[str, Any]:
    return {
        "findings": [f.to_json() for f in findings_cut(findings, limits.REPORT_FINDINGS)],
        "checks": list(_CHECKS),
        "device": "none",
        "versions": {"python": platform.python_version()},
        "sandbox": None,
        "measurements": {"findings": len(findings), **rules},
    }
