"""What the signed list has to name, and what it may leave out; it reads states and verdicts.

It has no way back: code from before runs on it.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

_SQL = """
CREATE POLICY owner_lists ON artifact FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_lists ON artifact_blob FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_lists ON verdict FOR SELECT TO registry_owner USING (true);

CREATE FUNCTION revocations_to_list()
RETURNS TABLE (tenant_id uuid, artifact_digest text, weights_digest text, content_digest text,
               every_tenant boolean, cancel_at timestamptz, stays boolean, place bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    WITH running AS MATERIALIZED (
        SELECT a.tenant_id, a.content_digest, b.blob_digest AS weights_digest
        FROM public.artifact a LEFT JOIN public.artifact_blob b ON b.tenant_id = a.tenant_id
             AND b.artifact_digest = a.digest AND b.path = 'adapter_model.safetensors'
        WHERE a.state = 'APPROVED'
    ), revoked AS (
        SELECT r.*, a.state = 'REVOKED' AS let_go,
               (r.tenant_id, r.artifact_digest) IN
                   (SELECT v.tenant_id, v.artifact_digest FROM public.verdict v) AS admitted,
               coalesce((r.tenant_id, r.weights_digest) IN
                   (SELECT o.tenant_id, o.weights_digest FROM running o
                    WHERE o.weights_digest IS NOT NULL), false)
               OR coalesce((r.tenant_id, r.content_digest) IN
                   (SELECT o.tenant_id, o.content_digest FROM running o
                    WHERE o.content_digest IS NOT NULL), false) AS running
        FROM public.revocation r JOIN public.artifact a ON a.tenant_id = r.tenant_id
             AND a.digest = r.artifact_digest
    ), listed AS (
        SELECT l.*, l.every_tenant OR (l.admitted AND NOT l.let_go) AS stays
        FROM revoked l WHERE l.every_tenant OR l.admitted OR l.running
    )
    SELECT l.tenant_id, l.artifact_digest, l.weights_digest, l.content_digest, l.every_tenant,
           l.at + make_interval(secs => l.deadline_seconds), l.stays,
           row_number() OVER (PARTITION BY l.stays, l.tenant_id
                              ORDER BY l.running DESC, l.at DESC, l.artifact_digest)
    FROM listed l ORDER BY l.at, l.tenant_id, l.artifact_digest
$$;
REVOKE ALL ON FUNCTION revocations_to_list() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION revocations_to_list() TO registry_app;
"""


def upgrade() -> None:
    op.execute(_SQL)
