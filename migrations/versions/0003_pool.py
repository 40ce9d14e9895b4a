"""How many adapters the nodes of one base hold together, of all tenants: two numbers and no names.

It has no way back: code from before runs on it.
"""

from alembic import op

revision = "0003"
down_revision = "0002"

_SQL = """
CREATE POLICY owner_counts ON placement FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_ends ON placement FOR DELETE TO registry_owner USING (true);

-- End what lapsed on the nodes of a base, and of one artifact. What lapsed on a node that is not
-- heard of, and may serve still, stays.
CREATE FUNCTION placements_end(base text, own_tenant uuid, own_digest text, at timestamptz,
                               skew_seconds integer)
RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    DELETE FROM public.placement p USING public.node n
    WHERE n.name = p.node AND p.lease_until <= at
      AND (n.base_digest = base OR (p.tenant_id, p.artifact_digest) = (own_tenant, own_digest))
      AND (n.lease_until > at OR n.fresh_until + make_interval(secs => skew_seconds) <= at)
$$;
REVOKE ALL ON FUNCTION placements_end(text, uuid, text, timestamptz, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION placements_end(text, uuid, text, timestamptz, integer) TO registry_app;

-- Leases on the nodes of a base, other than one's own: in all, and of its tenant.
CREATE FUNCTION pool_held(base text, own_tenant uuid, own_digest text, own_node text)
RETURNS TABLE (held bigint, of_tenant bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    SELECT count(*), count(*) FILTER (WHERE p.tenant_id = own_tenant)
    FROM public.placement p JOIN public.node n ON n.name = p.node
    WHERE n.base_digest = base
      AND (p.tenant_id, p.artifact_digest, p.node) <> (own_tenant, own_digest, own_node)
$$;
REVOKE ALL ON FUNCTION pool_held(text, uuid, text, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION pool_held(text, uuid, text, text) TO registry_app;
"""


def upgrade() -> None:
    op.execute(_SQL)
