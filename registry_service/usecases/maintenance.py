"""The background loops: number events, sweep what died, end drained revocations."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from registry_service.domain import limits
from registry_service.domain.digests import Digest
from registry_service.domain.errors import RegistryError
from registry_service.store import blobs as blob_store
from registry_service.store import jobs as job_store
from registry_service.store.events import events_number
from registry_service.store.nodes import revocations_drained
from registry_service.store.tenants import bytes_settle, tenant_ids
from registry_service.usecases.context import Context, system_transaction, tenant_transaction
from registry_service.usecases.jobs import job_failed, job_holding
from registry_service.usecases.revocations import drained_settle


def events_sequence(context: Context) -> int:
    """Number the committed events that have no position yet; how many there were."""
    with system_transaction(context) as session:
        return events_number(session)


def jobs_sweep(context: Context) -> int:
    """Stall the artifacts of jobs whose worker died on the last attempt; how many."""
    with system_transaction(context) as session:
        dead = job_store.jobs_dead(session)
    swept = 0
    for job in dead:
        try:
            with job_holding(context, job.id, job.lease, job.worker) as held:
                if held.job.lease_until <= context.clock.now():
                    job_failed(context, held, "the worker's lease ran out")
                    swept += 1
        except RegistryError:
            # The worker came back between the two transactions; the job is its own again.
            continue
    return swept


def revocations_sweep(context: Context) -> int:
    """End revocations that wait only for nodes whose lease ran out; how many."""
    with system_transaction(context) as session:
        waiting = revocations_drained(session)
    return sum(drained_settle(context, row.tenant_id, row.artifact_digest) for row in waiting)


def uploads_sweep(context: Context) -> int:
    """Drop uploads over their age with their bytes and reservation; how many."""
    with system_transaction(context) as session:
        expired = blob_store.uploads_expired(session)
    for upload in expired:
        context.blobs.upload_abort(upload.tenant_id, upload.id)
        with tenant_transaction(context, upload.tenant_id) as session:
            reserved = blob_store.upload_delete(session, upload.tenant_id, upload.id)
            bytes_settle(session, upload.tenant_id, reserved=reserved, stored=0)
    return len(expired)


def blobs_sweep(context: Context) -> int:
    """Delete blobs that nothing points to and whose lease is over; how many.

    The row goes first: a submission that renews the lease keeps both.
    """
    with system_transaction(context) as session:
        candidates = blob_store.blobs_unreferenced(session)
    swept = 0
    for blob in candidates:
        with tenant_transaction(context, blob.tenant_id) as session:
            size = blob_store.blob_delete(session, blob.tenant_id, blob.digest)
            if size is not None:
                bytes_settle(session, blob.tenant_id, reserved=0, stored=-size)
        if size is not None:
            _bytes_delete(context, blob.tenant_id, blob.digest)
            swept += 1
    return swept


def orphans_sweep(context: Context) -> int:
    """Delete stored bytes that never got a row: the service died in between; how many.

    Only what is older than a blob's lease or an upload's age: younger ones may be waiting.
    """
    with system_transaction(context) as session:
        tenants = tenant_ids(session)
    oldest = context.clock.now() - timedelta(seconds=limits.BLOB_LEASE_SECONDS)
    swept = 0
    for tenant_id in tenants:
        for digest, stored_at in context.blobs.list(tenant_id):
            if stored_at <= oldest and _bytes_delete(context, tenant_id, digest):
                swept += 1
        for upload_id, touched_at in context.blobs.uploads(tenant_id):
            if touched_at <= oldest:
                swept += _upload_delete(context, tenant_id, upload_id)
    return swept


def _bytes_delete(context: Context, tenant_id: UUID, digest: Digest) -> bool:
    """Delete a blob's bytes unless a row names them; under the lock that makes rows."""
    with tenant_transaction(context, tenant_id) as session:
        blob_store.blob_lock(session, tenant_id, digest)
        if blob_store.blob_size(session, tenant_id, digest) is not None:
            return False
        context.blobs.delete(tenant_id, digest)
    return True


def _upload_delete(context: Context, tenant_id: UUID, upload_id: UUID) -> bool:
    with tenant_transaction(context, tenant_id) as session:
        if blob_store.upload_exists(session, tenant_id, upload_id):
            return False
        context.blobs.upload_abort(tenant_id, upload_id)
    return True
