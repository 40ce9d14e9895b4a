"""The Python client of the registry: pipelines, the CLI and the workers use this one.

Answers of ``/v1`` come back as plain dictionaries; whatever the service refuses is raised as the
class of ``registry_service.domain.errors`` that stands for its code, and a broken or absent
connection as UnavailableError.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from registry_service import client_transfer
from registry_service.client_http import HttpSession, findings_parse, path_of
from registry_service.client_transfer import Progress, PublishFile
from registry_service.domain.digests import Digest, digest_parse
from registry_service.domain.manifest import Manifest

__all__ = ["Progress", "PublishFile", "RegistryClient", "findings_parse"]

Json = dict[str, Any]


class RegistryClient:
    """Speaks to one service with one token."""

    def __init__(
        self,
        url: str,
        token: str | None,
        *,
        timeout: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = HttpSession(url, token, timeout=timeout, transport=transport)
        self.url = self._http.url

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # Who, tenants, tokens

    def health(self) -> Json:
        """That the service answers."""
        return self._get("health")

    def whoami(self) -> Json:
        """Who this token speaks for."""
        return self._get("whoami")

    def tenant_create(self, name: str) -> Json:
        """Create a tenant."""
        return self._send("POST", "tenants", json={"name": name})

    def tenant_list(self) -> Iterator[Json]:
        """All tenants."""
        return self._list("tenants")

    def tenant_suspend(self, tenant: str, reason: str) -> Json:
        """Suspend a tenant."""
        return self._send("POST", "tenants", tenant, "suspension", json={"reason": reason})

    def tenant_policy_set(self, tenant: str, *, full_tensors: bool, reason: str) -> Json:
        """Set what a tenant's adapters may hold."""
        body = {"fullTensors": full_tensors, "reason": reason}
        return self._send("PUT", "tenants", tenant, "policy", json=body)

    def token_create(
        self,
        subject: str,
        role: str,
        tenant: str | None = None,
        expires_in_seconds: int | None = None,
    ) -> Json:
        """Make a token; its secret is in this answer only."""
        body: Json = {"subject": subject, "role": role, "tenant": tenant}
        if expires_in_seconds is not None:
            body["expiresInSeconds"] = expires_in_seconds
        return self._send("POST", "tokens", json=body)

    def token_list(self) -> Iterator[Json]:
        """All tokens, without their secrets."""
        return self._list("tokens")

    def token_revoke(self, token_id: str) -> Json | None:
        """Withdraw a token."""
        answer: Json | None = self._http.json("DELETE", path_of("v1", "tokens", token_id))
        return answer

    # Bases

    def base_add(
        self, name: str, manifest: bytes, files: Mapping[str, bytes], headers: Mapping[str, bytes]
    ) -> Json:
        """Register a base by manifest, config and tokenizer files, and safetensors headers."""
        body = {
            "name": name,
            "manifest": manifest.decode("utf-8"),
            "files": _encoded(files),
            "headers": _encoded(headers),
        }
        return self._send("POST", "bases", json=body)

    def base_list(self) -> Iterator[Json]:
        """The bases this token may see."""
        return self._list("bases")

    def base_show(self, base: str) -> Json:
        """One base, by name or digest."""
        return self._get("bases", base)

    def base_catalog(self, base: str) -> bytes:
        """The agreed catalog of a base."""
        return self._bytes("bases", base, "catalog")

    def base_statement(self, base: str) -> bytes:
        """The signed statement that admitted a base."""
        return self._bytes("bases", base, "statement")

    def base_file(self, base: str, path: str) -> bytes:
        """A kept file of a base."""
        return self._bytes("bases", base, "files", path)

    def base_grant(self, base: str, tenant: str) -> Json:
        """Let a tenant see and use a base."""
        return self._send("PUT", "bases", base, "tenants", tenant)

    def catalog_submit(self, base: str, catalog: bytes) -> Json:
        """Hand in this worker's own catalog of a base."""
        headers = {"Content-Type": "application/json"}
        return self._send("POST", "bases", base, "catalogs", content=catalog, headers=headers)

    def catalog_drop(self, base: str, worker: str, reason: str) -> Json:
        """Drop a worker's catalog of a base that is not admitted."""
        body = {"reason": reason}
        return self._send("POST", "bases", base, "catalogs", worker, "removal", json=body)

    def catalog_remake(self, base: str, reason: str) -> Json:
        """Have an admitted base's catalog made again, with another version of transformers."""
        return self._send("POST", "bases", base, "recatalog", json={"reason": reason})

    # Artifacts

    def artifact_list(self, **filters: str | int | None) -> Iterator[Json]:
        """Artifacts, newest first; filters: tenant, adapter, state, limit (of a page)."""
        return self._list("artifacts", **filters)

    def artifact_show(self, tenant: str, digest: str) -> Json:
        """One artifact."""
        return self._get("tenants", tenant, "artifacts", digest)

    def report_list(self, tenant: str, digest: str) -> list[Json]:
        """All reports of an artifact, oldest first."""
        return list(self._list("tenants", tenant, "artifacts", digest, "reports"))

    def verdict(self, tenant: str, digest: str) -> bytes:
        """The signed verdict of an admitted artifact."""
        return self._bytes("tenants", tenant, "artifacts", digest, "verdict")

    def review_submit(self, tenant: str, digest: str, decision: str, reason: str) -> Json:
        """Approve or reject."""
        body = {"decision": decision, "reason": reason}
        return self._send("POST", "tenants", tenant, "artifacts", digest, "reviews", json=body)

    def review_list(self, tenant: str, digest: str) -> list[Json]:
        """Who decided what."""
        return list(self._list("tenants", tenant, "artifacts", digest, "reviews"))

    def artifact_withdraw(self, tenant: str, digest: str, reason: str) -> Json:
        """Take an artifact out of review."""
        return self._artifact_post(tenant, digest, "withdrawal", {"reason": reason})

    def artifact_requeue(self, tenant: str, digest: str, reason: str) -> Json:
        """Scan a stalled artifact again."""
        return self._artifact_post(tenant, digest, "requeue", {"reason": reason})

    def revoke(
        self, tenant: str, digest: str, reason: str, deadline_seconds: int | None = None
    ) -> Json:
        """Revoke an artifact; safe to repeat."""
        body = {"reason": reason, "deadlineSeconds": deadline_seconds}
        return self._artifact_post(tenant, digest, "revocation", body)

    def revocation_show(self, tenant: str, digest: str) -> Json:
        """How far a revocation is."""
        return self._get("tenants", tenant, "artifacts", digest, "revocation")

    # Aliases, resolving, grants

    def alias_list(self, tenant: str, adapter: str) -> Iterator[Json]:
        """Aliases of an adapter."""
        return self._list("tenants", tenant, "adapters", adapter, "aliases")

    def alias_show(self, tenant: str, adapter: str, alias: str) -> Json:
        """Where an alias points, and its generation."""
        return self._get("tenants", tenant, "adapters", adapter, "aliases", alias)

    def alias_set(
        self, tenant: str, adapter: str, alias: str, digest: str, generation: int, reason: str
    ) -> Json:
        """Point an alias at an artifact if it still has ``generation`` (0: there is none yet).

        Raises:
            ConflictError: it was moved meanwhile.
        """
        return self._send(
            *("PUT", "tenants", tenant, "adapters", adapter, "aliases", alias),
            json={"adapterDigest": digest, "reason": reason},
            headers={"If-Match": f'"{generation}"'},
        )

    def alias_history(self, tenant: str, adapter: str, alias: str) -> Iterator[Json]:
        """Every move of an alias, newest first."""
        return self._list("tenants", tenant, "adapters", adapter, "aliases", alias, "history")

    def resolve(self, tenant: str, adapter: str, reference: str) -> Json:
        """The immutable digest behind an alias, label or digest."""
        return self._get("tenants", tenant, "adapters", adapter, "resolve", reference)

    def grant_show(self, tenant: str, adapter: str, subject: str) -> Json:
        """A subject's grant to run an adapter."""
        return self._get("tenants", tenant, "adapters", adapter, "grants", subject)

    def grant_set(self, tenant: str, adapter: str, subject: str) -> Json:
        """Let a subject run an adapter."""
        return self._send("PUT", "tenants", tenant, "adapters", adapter, "grants", subject)

    def grant_withdraw(self, tenant: str, adapter: str, subject: str) -> Json:
        """Withdraw a grant."""
        return self._send("DELETE", "tenants", tenant, "adapters", adapter, "grants", subject)

    def routing_context(
        self,
        *,
        tenant: str,
        adapter: str | None,
        reference: str | None,
        node: str,
        body_digest: str,
        session_id: str,
        subject: str,
    ) -> Json:
        """A short-lived signed statement for one request (``adapter`` None: the base)."""
        body = {
            "tenant": tenant,
            "adapter": adapter,
            "reference": reference,
            "node": node,
            "bodyDigest": body_digest,
            "sessionId": session_id,
            "subject": subject,
        }
        return self._send("POST", "routing-contexts", json=body)

    # Jobs

    def job_claim(self, worker: str, kinds: Sequence[str], base_digests: Sequence[str]) -> Any:
        """The next fitting job, or None."""
        body = {"worker": worker, "kinds": list(kinds), "baseModelDigests": list(base_digests)}
        return self._http.json("POST", path_of("v1", "jobs", "claim"), json=body)

    def job_heartbeat(self, job_id: str, lease: int) -> None:
        """Renew a job's lease. Raises LeaseLostError when another worker has it."""
        self._http.json("POST", path_of("v1", "jobs", job_id, "heartbeat"), json={"lease": lease})

    def job_complete(
        self, job_id: str, lease: int, report: Json | None = None, catalog: Json | None = None
    ) -> None:
        """Hand in a report or a catalog. Raises LeaseLostError when another worker has the job."""
        body: Json = {"lease": lease, "outcome": "done"}
        body |= {} if report is None else {"report": report}
        body |= {} if catalog is None else {"catalog": catalog}
        self._http.json("POST", path_of("v1", "jobs", job_id, "result"), json=body)

    def job_fault(self, job_id: str, lease: int, reason: str) -> None:
        """Give a job back because of a fault that is not the artifact's."""
        body = {"lease": lease, "outcome": "fault", "reason": reason}
        self._http.json("POST", path_of("v1", "jobs", job_id, "result"), json=body)

    def job_list(self, **filters: str | int | None) -> Iterator[Json]:
        """Jobs, newest first; filters: state, limit."""
        return self._list("jobs", **filters)

    # Nodes, feed, audit

    def node_register(self, node: str, base_digest: str, url: str, catalog_digest: str) -> Json:
        """Register a serving node, bound to one base."""
        body = {"baseModelDigest": base_digest, "url": url, "catalogDigest": catalog_digest}
        return self._send("PUT", "nodes", node, json=body)

    def node_heartbeat(self, node: str, feed_index: int, residents: Sequence[Json]) -> Json:
        """Renew a node's lease; the answer says what it has to let go of."""
        body = {"feedIndex": feed_index, "residents": list(residents)}
        return self._send("POST", "nodes", node, "heartbeat", json=body)

    def placement_take(self, node: str, tenant: str, digest: str) -> Json:
        """Let a node hold an adapter for a while; safe to repeat.

        Raises:
            ConflictError: as many other nodes as it declares hold it already.
        """
        body = {"tenant": tenant, "adapterDigest": digest}
        return self._send("POST", "nodes", node, "placements", json=body)

    def placement_release(self, node: str, tenant: str, digest: str) -> None:
        """Say that a node does not hold an adapter any more."""
        self._http.json("DELETE", path_of("v1", "nodes", node, "placements", tenant, digest))

    def usage_report(self, node: str, run: str, items: Sequence[Json]) -> None:
        """Tell what tenants used since a node's start: totals, so that telling twice is safe."""
        body = {"run": run, "items": list(items)}
        self._http.json("POST", path_of("v1", "nodes", node, "usage"), json=body)

    def usage_list(self, tenant: str) -> Iterator[Json]:
        """What a tenant used on all nodes, by adapter and base."""
        return self._list("tenants", tenant, "usage")

    def node_acknowledge(
        self, node: str, tenant_id: str, digest: str, freed_bytes: int, purged_blocks: int
    ) -> None:
        """Say that a revoked artifact is gone from a node."""
        body = {
            "tenantId": tenant_id,
            "adapterDigest": digest,
            "freedBytes": freed_bytes,
            "purgedBlocks": purged_blocks,
        }
        self._http.json("POST", path_of("v1", "nodes", node, "acknowledgements"), json=body)

    def node_list(self) -> Iterator[Json]:
        """Serving nodes."""
        return self._list("nodes")

    def node_show(self, node: str) -> Json:
        """One serving node."""
        return self._get("nodes", node)

    def feed(self, after: int, wait: float = 0) -> Json:
        """Numbered events after an index, waiting up to ``wait`` seconds for the first."""
        query = {"after": after, "wait": wait}
        timeout = self._http.timeout + wait
        answer: Json = self._http.json("GET", "/v1/feed", params=query, timeout=timeout)
        return answer

    def revocation_list(self, held: int = 0) -> bytes | None:
        """The signed revocation list, or None while it is still number ``held``."""
        headers = {"If-None-Match": f'"{held}"'} if held else {}
        response = self._http.request("GET", "/v1/revocation-list", headers=headers)
        return None if response.status_code == 304 else response.content

    def audit_list(self, **filters: str | int | None) -> Iterator[Json]:
        """The audit trail, oldest first; filters: tenant, subject, limit."""
        return self._list("audit", **filters)

    # Data plane

    def push(
        self,
        tenant: str,
        adapter: str,
        folder_files: Sequence[PublishFile],
        label: str | None = None,
        progress: Progress | None = None,
        begun: MutableMapping[str, str] | None = None,
    ) -> Digest:
        """Publish files as one artifact; a broken upload is continued where it stands.

        ``begun`` remembers uploads beyond this process.
        """
        return client_transfer.push(
            self._http,
            tenant,
            adapter,
            folder_files,
            label=label,
            progress=progress,
            begun=begun,
        )

    def pull(self, tenant: str, adapter: str, digest: str, into: Path) -> Manifest:
        """Fetch an artifact into a new folder: verified and whole, or nothing."""
        return client_transfer.pull(self._http, tenant, adapter, digest_parse(digest), into)

    def manifest(self, tenant: str, adapter: str, reference: str) -> bytes:
        """The manifest of a digest (then verified), label or alias."""
        return client_transfer.manifest_fetch(self._http, tenant, adapter, reference)

    def blob_stream(self, tenant: str, adapter: str, digest: str) -> Iterator[bytes]:
        """A blob's verified bytes; the last chunk comes after the check."""
        return client_transfer.blob_stream(self._http, tenant, adapter, digest)

    # Shared

    def _get(self, *segments: str) -> Json:
        answer: Json = self._http.json("GET", path_of("v1", *segments))
        return answer

    def _send(self, method: str, *segments: str, **options: Any) -> Json:
        answer: Json = self._http.json(method, path_of("v1", *segments), **options)
        return answer

    def _artifact_post(self, tenant: str, digest: str, what: str, body: Json) -> Json:
        return self._send("POST", "tenants", tenant, "artifacts", digest, what, json=body)

    def _bytes(self, *segments: str) -> bytes:
        return self._http.request("GET", path_of("v1", *segments)).content

    def _list(self, *segments: str, **filters: str | int | None) -> Iterator[Json]:
        return self._http.pages(path_of("v1", *segments), filters)


def _encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(data).decode("ascii") for path, data in files.items()}
