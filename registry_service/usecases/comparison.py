"""What an artifact changes against the versions that its adapter's aliases point to now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy.orm import Session

from registry_service.domain import limits, wire
from registry_service.domain.comparison import (
    VersionFacts,
    change_check,
    measured_modules,
    version_facts,
    versions_compare,
)
from registry_service.domain.findings import Finding
from registry_service.domain.report import ModuleGroup
from registry_service.store.artifacts import ArtifactRow, artifact_get
from registry_service.store.reviews import MeasuredRow, measured_list
from registry_service.store.tags import TagRow, alias_page

_SCAN: Final = "scan"
_VALIDATE: Final = "validate"

_Measured = Mapping[tuple[str, str], MeasuredRow]


def reports_compared(
    session: Session, artifact: ArtifactRow, reports: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """``reports`` with the comparison in the newest scan, and none in all others.

    Only versions on the same base are compared, and at most ``limits.REPORT_ALIASES`` aliases.
    """
    aliases = _aliases(session, artifact)
    digests = {artifact.digest, *(alias.artifact_digest for alias in aliases)}
    measured = {
        (row.artifact_digest, row.stage): row
        for row in measured_list(session, artifact.tenant_id, sorted(digests))
    }
    now = _facts(artifact, measured)
    scan = measured.get((artifact.digest, _SCAN))
    shown = [{**report, "comparison": None} for report in reports]
    for report in shown if aliases else ():
        if scan and (scan.digest, scan.created_at) == (report["reportDigest"], report["createdAt"]):
            report["comparison"] = [
                _compared(session, artifact, alias, measured, now) for alias in aliases
            ]
    return shown


def change_findings(
    session: Session, artifact: ArtifactRow, modules: tuple[ModuleGroup, ...]
) -> tuple[Finding, ...]:
    """What of ``modules``, those of a scan that is running, is far from the present versions."""
    aliases = _aliases(session, artifact)
    others = sorted({alias.artifact_digest for alias in aliases})
    measured = {
        (row.artifact_digest, row.stage): row
        for row in measured_list(session, artifact.tenant_id, others)
    }
    now = version_facts(artifact.declaration, measured_modules(modules), None)
    return tuple(
        finding
        for alias in aliases
        for other in [artifact_get(session, artifact.tenant_id, alias.artifact_digest)]
        for finding in change_check(alias.name, _facts(other, measured), now)
    )


def _aliases(session: Session, artifact: ArtifactRow) -> list[TagRow]:
    page = alias_page(
        session, artifact.tenant_id, artifact.adapter, after="", limit=limits.PAGE_ROWS
    )
    others = [
        alias
        for alias in page
        if alias.base_digest == artifact.base_digest and alias.artifact_digest != artifact.digest
    ]
    return others[: limits.REPORT_ALIASES]


def _compared(
    session: Session,
    artifact: ArtifactRow,
    alias: TagRow,
    measured: _Measured,
    now: VersionFacts,
) -> dict[str, Any]:
    other = artifact_get(session, artifact.tenant_id, alias.artifact_digest)
    compared = wire.Comparison(
        alias=alias.name,
        generation=alias.generation,
        adapter_digest=alias.artifact_digest,
        **asdict(versions_compare(_facts(other, measured), now)),
    )
    return compared.model_dump(by_alias=True)


def _facts(artifact: ArtifactRow, measured: _Measured) -> VersionFacts:
    scan = measured.get((artifact.digest, _SCAN))
    validation = measured.get((artifact.digest, _VALIDATE))
    return version_facts(
        artifact.declaration,
        scan.measurements if scan else None,
        validation.measurements if validation else None,
    )
