"""What tenants used on nodes: totals of each run of a node, which only grow."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

# A report that comes late or twice changes nothing: a run's totals only grow.
_KEEP = text(
    "INSERT INTO usage (tenant_id, adapter_digest, node, run, base_digest, requests, "
    "prompt_tokens, completion_tokens, reused_tokens, reported_at) VALUES (:tenant_id, :adapter, "
    ":node, :run, :base, :requests, :prompt, :completion, :reused, :at) "
    "ON CONFLICT (tenant_id, adapter_digest, node, run) DO UPDATE SET "
    "requests = greatest(usage.requests, EXCLUDED.requests), "
    "prompt_tokens = greatest(usage.prompt_tokens, EXCLUDED.prompt_tokens), "
    "completion_tokens = greatest(usage.completion_tokens, EXCLUDED.completion_tokens), "
    "reused_tokens = greatest(usage.reused_tokens, EXCLUDED.reused_tokens), "
    "reported_at = EXCLUDED.reported_at"
)
_PAGE = text(
    "SELECT adapter_digest, base_digest, sum(requests)::bigint AS requests, "
    "sum(prompt_tokens)::bigint AS prompt_tokens, "
    "sum(completion_tokens)::bigint AS completion_tokens, "
    "sum(reused_tokens)::bigint AS reused_tokens FROM usage WHERE tenant_id = :tenant_id "
    "AND (adapter_digest, base_digest) > (:adapter, :base) "
    "GROUP BY adapter_digest, base_digest ORDER BY adapter_digest, base_digest LIMIT :limit"
)


def usage_keep(
    session: Session,
    *,
    tenant_id: UUID,
    node: str,
    run: UUID,
    base_digest: str,
    items: Sequence[dict[str, Any]],
    at: datetime,
) -> None:
    """Keep a run's totals of one tenant, in wire form."""
    session.execute(
        _KEEP,
        [
            {
                "tenant_id": tenant_id,
                "adapter": item["adapterDigest"],
                "node": node,
                "run": run,
                "base": base_digest,
                "requests": item["requests"],
                "prompt": item["promptTokens"],
                "completion": item["completionTokens"],
                "reused": item["reusedTokens"],
                "at": at,
            }
            # In one order: two reports that meet must not wait for each other.
            for item in sorted(items, key=lambda item: str(item["adapterDigest"]))
        ],
    )


def usage_page(
    session: Session, tenant_id: UUID, *, after: tuple[str, str], limit: int
) -> list[Any]:
    """A tenant's totals over all nodes by adapter and base digest, after a pair."""
    values = {"tenant_id": tenant_id, "adapter": after[0], "base": after[1], "limit": limit}
    return list(session.execute(_PAGE, values))
