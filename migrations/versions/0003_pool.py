"""How many adapters the nodes of one base hold together, of all tenants: two numbers and no names.

It has no way back: code from before runs on it.
"""

from alembic import op

revision = "0003"
down_revision = "0002"

_SQL = """
CREATE POLICY owner_counts ON placement FOR SELECT TO registry_owner USING (true);

-- Live leases on the nodes of a base, other than one's own: in all, and of its tenant. A lease that
-- ended is live while its node is not heard of and may serve still.
CREATE FUNCTION pool_held(base text, own_tenant uuid, own_digest text, own_node text,
                          at timestamptz, skew_seconds integer)
RETURNS TABLE (held bigint, of_tenant bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    SELECT count(*), count(*) FILTER (WHERE p.tenant_id = own_tenant)
    FROM public.placement p JOIN public.node n ON n.name = p.node
    WHERE n.base_digest = base
      AND (p.tenant_id, p.artifact_digest, p.node) <> (own_tenant, own_digest, own_node)
      AND (p.lease_until > at OR (n.lease_until <= at
           AND n.fresh_until + make_interval(secs => skew_seconds) > at))
$$;
REVOKE ALL ON FUNCTION pool_held(text, uuid, text, text, timestamptz, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION pool_held(text, uuid, text, text, timestamptz, integer) TO registry_app;
"""


def upgrade() -> None:
    op.execute(_SQL)
