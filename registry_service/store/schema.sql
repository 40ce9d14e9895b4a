-- The whole schema as it stands. Migrations lead to the same; a test compares the two catalogs.
-- Roles are made before: registry_owner owns everything, registry_app serves requests inside one
-- tenant, registry_system claims jobs and numbers events, registry_auditor only reads, everywhere.

CREATE TABLE tenant (
    id             uuid        PRIMARY KEY,
    name           text        NOT NULL UNIQUE,
    state          text        NOT NULL CHECK (state IN ('ACTIVE', 'SUSPENDED')),
    quota_bytes    bigint      NOT NULL CHECK (quota_bytes >= 0),
    stored_bytes   bigint      NOT NULL DEFAULT 0 CHECK (stored_bytes >= 0),
    reserved_bytes bigint      NOT NULL DEFAULT 0 CHECK (reserved_bytes >= 0),
    full_tensors   boolean     NOT NULL DEFAULT false,
    created_at     timestamptz NOT NULL
);
-- What belongs to no tenant (bases, nodes) has its events and tokens under this one.
INSERT INTO tenant (id, name, state, quota_bytes, created_at)
VALUES ('00000000-0000-0000-0000-000000000000', 'platform', 'ACTIVE', 0, now());

CREATE TABLE token (
    tenant_id  uuid        NOT NULL REFERENCES tenant (id),
    id         uuid        NOT NULL,
    hash       bytea       NOT NULL UNIQUE CHECK (length(hash) = 32),
    subject    text        NOT NULL,
    role       text        NOT NULL CHECK (role IN ('publisher', 'reviewer', 'operator', 'validator',
                                                    'node', 'gateway', 'auditor', 'admin')),
    created_at timestamptz NOT NULL,
    created_by text        NOT NULL,
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz,
    PRIMARY KEY (tenant_id, id),
    CHECK (role <> 'publisher' OR tenant_id <> '00000000-0000-0000-0000-000000000000'),
    CHECK (role NOT IN ('validator', 'node', 'admin')
           OR tenant_id = '00000000-0000-0000-0000-000000000000')
);

CREATE TABLE base (
    digest               text        PRIMARY KEY,
    name                 text        NOT NULL UNIQUE,
    manifest             bytea       NOT NULL,
    tokenizer_digest     text        NOT NULL,
    chat_template_digest text        NOT NULL,
    quantization         text        NOT NULL,
    state                text        NOT NULL CHECK (state IN ('PENDING', 'USABLE', 'CONFLICTED')),
    catalog_digest       text,
    statement            bytea,
    -- Catalogs are collected in rounds; remaking says that this one is to replace the admitted one.
    round                integer     NOT NULL DEFAULT 1 CHECK (round >= 1),
    remaking             boolean     NOT NULL DEFAULT false,
    created_at           timestamptz NOT NULL,
    created_by           text        NOT NULL,
    CHECK ((state = 'USABLE') = (catalog_digest IS NOT NULL AND statement IS NOT NULL)),
    CHECK (state = 'USABLE' OR NOT remaking)
);

CREATE TABLE base_file (
    base_digest text   NOT NULL REFERENCES base (digest),
    path        text   NOT NULL,
    kind        text   NOT NULL CHECK (kind IN ('file', 'header')),
    digest      text   NOT NULL,
    content     bytea  NOT NULL,
    PRIMARY KEY (base_digest, path)
);

CREATE TABLE base_catalog (
    base_digest          text  NOT NULL REFERENCES base (digest),
    digest               text  NOT NULL,
    model_class          text  NOT NULL,
    transformers_version text  NOT NULL,
    content              bytea NOT NULL,
    PRIMARY KEY (base_digest, digest)
);

CREATE TABLE catalog_maker (
    base_digest    text        NOT NULL,
    round          integer     NOT NULL,
    worker         text        NOT NULL,
    catalog_digest text        NOT NULL,
    created_at     timestamptz NOT NULL,
    PRIMARY KEY (base_digest, round, worker, catalog_digest),
    FOREIGN KEY (base_digest, catalog_digest) REFERENCES base_catalog (base_digest, digest)
);

-- Every catalog that a base was ever admitted with: verdicts go on naming the one they were given
-- under, and nodes that made it go on.
CREATE TABLE base_admission (
    base_digest    text        NOT NULL,
    catalog_digest text        NOT NULL,
    at             timestamptz NOT NULL,
    PRIMARY KEY (base_digest, catalog_digest),
    FOREIGN KEY (base_digest, catalog_digest) REFERENCES base_catalog (base_digest, digest)
);
ALTER TABLE base ADD CONSTRAINT base_admission_fkey FOREIGN KEY (digest, catalog_digest)
    REFERENCES base_admission (base_digest, catalog_digest);

CREATE TABLE base_grant (
    tenant_id   uuid        NOT NULL REFERENCES tenant (id),
    base_digest text        NOT NULL REFERENCES base (digest),
    created_at  timestamptz NOT NULL,
    created_by  text        NOT NULL,
    PRIMARY KEY (tenant_id, base_digest)
);

-- Events are committed unnumbered with the change they record; the sequencer sets the position.
CREATE TABLE event (
    tenant_id uuid        NOT NULL REFERENCES tenant (id),
    id        uuid        NOT NULL,
    kind      text        NOT NULL,
    subject   text        NOT NULL,
    actor     text        NOT NULL,
    at        timestamptz NOT NULL,
    body      jsonb       NOT NULL,
    position  bigint      UNIQUE CHECK (position >= 1),
    -- Orders the events of one transaction, which share their time.
    written   bigint      GENERATED ALWAYS AS IDENTITY,
    PRIMARY KEY (tenant_id, id)
);
CREATE INDEX event_unnumbered ON event (written) WHERE position IS NULL;
CREATE INDEX event_subject ON event (subject, position);

CREATE TABLE adapter (
    tenant_id  uuid        NOT NULL REFERENCES tenant (id),
    name       text        NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, name)
);

CREATE TABLE adapter_grant (
    tenant_id  uuid        NOT NULL,
    adapter    text        NOT NULL,
    subject    text        NOT NULL,
    epoch      bigint      NOT NULL CHECK (epoch >= 1),
    active     boolean     NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, adapter, subject),
    FOREIGN KEY (tenant_id, adapter) REFERENCES adapter (tenant_id, name)
);

CREATE TABLE blob (
    tenant_id   uuid        NOT NULL REFERENCES tenant (id),
    digest      text        NOT NULL,
    size        bigint      NOT NULL CHECK (size >= 0),
    lease_until timestamptz NOT NULL,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, digest)
);

CREATE TABLE upload (
    tenant_id      uuid        NOT NULL REFERENCES tenant (id),
    id             uuid        NOT NULL,
    adapter        text        NOT NULL,
    reserved_bytes bigint      NOT NULL CHECK (reserved_bytes >= 0),
    created_at     timestamptz NOT NULL,
    expires_at     timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id)
);

CREATE TABLE transition (
    from_state text NOT NULL,
    event      text NOT NULL,
    to_state   text NOT NULL,
    PRIMARY KEY (from_state, event, to_state)
);
-- 'created' is the root of every chain of moves, so that no first move needs a null.
INSERT INTO transition (from_state, event, to_state) VALUES
    ('NEW', 'created', 'NEW'),
    ('NEW', 'submitted', 'SCANNING'),
    ('SCANNING', 'scan_passed', 'VALIDATING'),
    ('SCANNING', 'scan_failed', 'REJECTED'),
    ('SCANNING', 'scan_lost', 'STALLED'),
    ('VALIDATING', 'validation_passed', 'IN_REVIEW'),
    ('VALIDATING', 'validation_failed', 'REJECTED'),
    ('VALIDATING', 'validation_lost', 'STALLED'),
    ('STALLED', 'requeued', 'SCANNING'),
    ('REJECTED', 'reopened', 'SCANNING'),
    ('IN_REVIEW', 'approved', 'APPROVED'),
    ('IN_REVIEW', 'rejected', 'REJECTED'),
    ('IN_REVIEW', 'withdrawn', 'REJECTED'),
    ('APPROVED', 'revoked', 'REVOKING'),
    ('IN_REVIEW', 'revoked', 'REVOKING'),
    ('STALLED', 'revoked', 'REVOKING'),
    ('VALIDATING', 'revoked', 'REVOKING'),
    ('SCANNING', 'revoked', 'REVOKING'),
    ('REVOKING', 'drained', 'REVOKED');

CREATE TABLE artifact (
    tenant_id    uuid        NOT NULL,
    digest       text        NOT NULL,
    adapter      text        NOT NULL,
    base_digest  text        NOT NULL,
    manifest     bytea       NOT NULL,
    declaration  jsonb       NOT NULL,
    publisher    text        NOT NULL,
    bytes        bigint      NOT NULL CHECK (bytes >= 0),
    state        text        NOT NULL,
    revision     integer     NOT NULL,
    submitted_at timestamptz NOT NULL,
    -- Of the tensors, however they are packed; from the validation that it passed.
    content_digest text,
    PRIMARY KEY (tenant_id, digest),
    UNIQUE (tenant_id, adapter, digest),
    FOREIGN KEY (tenant_id, adapter) REFERENCES adapter (tenant_id, name)
);
CREATE INDEX artifact_state ON artifact (state, submitted_at);

CREATE TABLE move (
    tenant_id         uuid        NOT NULL,
    artifact_digest   text        NOT NULL,
    revision          integer     NOT NULL,
    previous_revision integer     NOT NULL,
    from_state        text        NOT NULL,
    event             text        NOT NULL,
    to_state          text        NOT NULL,
    actor             text        NOT NULL,
    reason            text        NOT NULL,
    event_id          uuid        NOT NULL,
    at                timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, artifact_digest, revision),
    UNIQUE (tenant_id, artifact_digest, revision, to_state),
    UNIQUE (tenant_id, event_id),
    CHECK ((revision = 0 AND previous_revision = 0 AND event = 'created')
           OR (revision >= 1 AND previous_revision = revision - 1 AND event <> 'created')),
    FOREIGN KEY (from_state, event, to_state) REFERENCES transition (from_state, event, to_state),
    FOREIGN KEY (tenant_id, artifact_digest, previous_revision, from_state)
        REFERENCES move (tenant_id, artifact_digest, revision, to_state),
    FOREIGN KEY (tenant_id, event_id) REFERENCES event (tenant_id, id),
    CONSTRAINT move_artifact_fkey FOREIGN KEY (tenant_id, artifact_digest)
        REFERENCES artifact (tenant_id, digest) DEFERRABLE INITIALLY DEFERRED
);
ALTER TABLE artifact ADD CONSTRAINT artifact_last_move_fkey
    FOREIGN KEY (tenant_id, digest, revision, state)
    REFERENCES move (tenant_id, artifact_digest, revision, to_state)
    DEFERRABLE INITIALLY DEFERRED;

-- The foreign key alone would let a row go back to an older move.
CREATE FUNCTION artifact_moves_forward() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.revision <> OLD.revision + 1 THEN
        RAISE EXCEPTION 'artifact %: revision % cannot follow %', OLD.digest, NEW.revision,
            OLD.revision USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER artifact_moves_forward BEFORE UPDATE ON artifact
    FOR EACH ROW EXECUTE FUNCTION artifact_moves_forward();

CREATE TABLE artifact_blob (
    tenant_id       uuid   NOT NULL,
    artifact_digest text   NOT NULL,
    path            text   NOT NULL,
    blob_digest     text   NOT NULL,
    size            bigint NOT NULL,
    media_type      text   NOT NULL,
    PRIMARY KEY (tenant_id, artifact_digest, path),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES artifact (tenant_id, digest),
    FOREIGN KEY (tenant_id, blob_digest) REFERENCES blob (tenant_id, digest)
);
CREATE INDEX artifact_blob_digest ON artifact_blob (tenant_id, blob_digest);

CREATE TABLE report (
    tenant_id       uuid        NOT NULL,
    id              uuid        NOT NULL,
    artifact_digest text        NOT NULL,
    stage           text        NOT NULL CHECK (stage IN ('scan', 'validate')),
    attempt         integer     NOT NULL,
    worker          text        NOT NULL,
    verdict         text        NOT NULL CHECK (verdict IN ('pass', 'refuse')),
    digest          text        NOT NULL,
    content         jsonb       NOT NULL,
    created_at      timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES artifact (tenant_id, digest)
);
CREATE INDEX report_artifact ON report (tenant_id, artifact_digest, created_at);

CREATE TABLE review (
    tenant_id       uuid        NOT NULL,
    artifact_digest text        NOT NULL,
    revision        integer     NOT NULL,
    reviewer        text        NOT NULL,
    decision        text        NOT NULL CHECK (decision IN ('approve', 'reject')),
    reason          text        NOT NULL,
    at              timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, artifact_digest, revision, reviewer),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES artifact (tenant_id, digest)
);

CREATE TABLE verdict (
    tenant_id       uuid        NOT NULL,
    artifact_digest text        NOT NULL,
    base_digest     text        NOT NULL REFERENCES base (digest),
    envelope        bytea       NOT NULL,
    policy_digest   text        NOT NULL,
    not_after       timestamptz NOT NULL,
    event_id        uuid        NOT NULL,
    created_at      timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, artifact_digest, base_digest),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES artifact (tenant_id, digest),
    FOREIGN KEY (tenant_id, event_id) REFERENCES event (tenant_id, id)
);

-- Version labels and aliases share one namespace.
CREATE TABLE tag (
    tenant_id       uuid        NOT NULL,
    adapter         text        NOT NULL,
    name            text        NOT NULL,
    kind            text        NOT NULL CHECK (kind IN ('label', 'alias')),
    artifact_digest text        NOT NULL,
    base_digest     text        NOT NULL,
    generation      bigint      NOT NULL CHECK (generation >= 1),
    actor           text        NOT NULL,
    updated_at      timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, adapter, name),
    FOREIGN KEY (tenant_id, adapter, artifact_digest)
        REFERENCES artifact (tenant_id, adapter, digest)
);
CREATE INDEX tag_artifact ON tag (tenant_id, artifact_digest);

CREATE FUNCTION tag_moves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.kind = 'label' THEN
        RAISE EXCEPTION 'label % never moves', OLD.name
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF NEW.generation <> OLD.generation + 1 OR NEW.kind <> OLD.kind THEN
        RAISE EXCEPTION 'alias %: generation % cannot follow %', OLD.name, NEW.generation,
            OLD.generation USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER tag_moves BEFORE UPDATE ON tag FOR EACH ROW EXECUTE FUNCTION tag_moves();

CREATE TABLE alias_move (
    tenant_id       uuid        NOT NULL,
    adapter         text        NOT NULL,
    alias           text        NOT NULL,
    generation      bigint      NOT NULL,
    previous_digest text,
    artifact_digest text        NOT NULL,
    base_digest     text        NOT NULL,
    actor           text        NOT NULL,
    reason          text        NOT NULL,
    event_id        uuid        NOT NULL,
    at              timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, adapter, alias, generation),
    FOREIGN KEY (tenant_id, adapter, alias) REFERENCES tag (tenant_id, adapter, name),
    FOREIGN KEY (tenant_id, event_id) REFERENCES event (tenant_id, id)
);

CREATE TABLE job (
    tenant_id    uuid        NOT NULL REFERENCES tenant (id),
    id           uuid        NOT NULL UNIQUE,
    kind         text        NOT NULL CHECK (kind IN ('scan', 'validate', 'catalog')),
    subject      text        NOT NULL,
    adapter      text        NOT NULL,
    base_digest  text        NOT NULL,
    state        text        NOT NULL CHECK (state IN ('QUEUED', 'RUNNING', 'DONE', 'DEAD')),
    lease        integer     NOT NULL DEFAULT 0,
    lease_until  timestamptz NOT NULL,
    attempt      integer     NOT NULL DEFAULT 0,
    max_attempts integer     NOT NULL,
    worker       text        NOT NULL DEFAULT '',
    fault        text        NOT NULL DEFAULT '',
    created_at   timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id),
    CHECK (attempt <= max_attempts)
);
CREATE UNIQUE INDEX job_open ON job (tenant_id, kind, subject) WHERE state IN ('QUEUED', 'RUNNING');
CREATE INDEX job_claimable ON job (created_at) WHERE state IN ('QUEUED', 'RUNNING');

CREATE TABLE node (
    name           text        PRIMARY KEY,
    subject        text        NOT NULL,
    url            text        NOT NULL,
    base_digest    text        NOT NULL REFERENCES base (digest),
    catalog_digest text        NOT NULL,
    feed_index     bigint      NOT NULL DEFAULT 0,
    residents      jsonb       NOT NULL DEFAULT '[]',
    registered_at  timestamptz NOT NULL,
    last_seen_at   timestamptz NOT NULL,
    lease_until    timestamptz NOT NULL,
    -- When the last revocation list that it was given expires: until then it may serve unheard.
    fresh_until    timestamptz NOT NULL DEFAULT 'epoch'
);

-- Which nodes may hold an artifact: at most as many live leases as it declares replicas.
CREATE TABLE placement (
    tenant_id       uuid        NOT NULL,
    artifact_digest text        NOT NULL,
    node            text        NOT NULL REFERENCES node (name),
    lease_until     timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, artifact_digest, node),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES artifact (tenant_id, digest)
);

-- What tenants used: the totals of each run of a node, which only grow.
CREATE TABLE usage (
    tenant_id         uuid        NOT NULL REFERENCES tenant (id),
    adapter_digest    text        NOT NULL CHECK (adapter_digest ~ '^(base|sha256:[0-9a-f]{64})$'),
    node              text        NOT NULL REFERENCES node (name),
    run               uuid        NOT NULL,
    base_digest       text        NOT NULL REFERENCES base (digest),
    requests          bigint      NOT NULL,
    prompt_tokens     bigint      NOT NULL,
    completion_tokens bigint      NOT NULL,
    reused_tokens     bigint      NOT NULL,
    reported_at       timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, adapter_digest, node, run)
);

CREATE TABLE revocation (
    tenant_id        uuid        NOT NULL,
    artifact_digest  text        NOT NULL,
    base_digest      text        NOT NULL,
    reason           text        NOT NULL,
    actor            text        NOT NULL,
    deadline_seconds integer,
    at               timestamptz NOT NULL,
    weights_digest   text,
    content_digest   text,
    -- Revoked by the platform: the same bytes are revoked for every tenant.
    every_tenant     boolean     NOT NULL,
    PRIMARY KEY (tenant_id, artifact_digest),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES artifact (tenant_id, digest)
);

CREATE TABLE revocation_node (
    tenant_id       uuid NOT NULL,
    artifact_digest text NOT NULL,
    node            text NOT NULL REFERENCES node (name),
    acknowledged_at timestamptz,
    freed_bytes     bigint,
    purged_blocks   bigint,
    PRIMARY KEY (tenant_id, artifact_digest, node),
    FOREIGN KEY (tenant_id, artifact_digest) REFERENCES revocation (tenant_id, artifact_digest)
);

-- The signed list: number, bytes and times in one row, and so under one lock. Number 0 is none yet.
CREATE TABLE revocation_list (
    one        boolean     PRIMARY KEY DEFAULT true CHECK (one),
    number     bigint      NOT NULL CHECK (number >= 0),
    envelope   bytea       NOT NULL,
    issued_at  timestamptz NOT NULL,
    expires_at timestamptz NOT NULL
);
INSERT INTO revocation_list (number, envelope, issued_at, expires_at)
VALUES (0, '', 'epoch', 'epoch');

CREATE FUNCTION revocation_list_grows() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.number <= OLD.number THEN
        RAISE EXCEPTION 'revocation list % cannot follow %', NEW.number, OLD.number
            USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER revocation_list_grows BEFORE UPDATE ON revocation_list
    FOR EACH ROW EXECUTE FUNCTION revocation_list_grows();

-- What admitted means stands here once: approved, with an unexpired verdict whose event is numbered
-- (admissions take effect once included), on a base that is usable.
CREATE FUNCTION artifact_admitted(tenant uuid, artifact text, base text, state text)
RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT state = 'APPROVED' AND EXISTS (
        SELECT 1 FROM verdict v
        JOIN event e ON e.tenant_id = v.tenant_id AND e.id = v.event_id
        JOIN base b ON b.digest = v.base_digest
        WHERE v.tenant_id = tenant AND v.artifact_digest = artifact AND v.base_digest = base
          AND v.not_after > now() AND e.position IS NOT NULL AND b.state = 'USABLE')
$$;

-- A reference of a named tenant, bound to its admitted artifact, in one round trip. It runs with
-- the caller's rights: it enters the tenant as every transaction does, and sees that tenant's rows.
CREATE FUNCTION resolve_admitted(tenant_name text, adapter_name text, reference text)
RETURNS TABLE (tenant_id uuid, tenant_state text, kind text, generation bigint, digest text,
               base_digest text, tokenizer_digest text, chat_template_digest text)
LANGUAGE plpgsql AS $$
DECLARE
    owner tenant%ROWTYPE;
BEGIN
    SELECT * INTO owner FROM tenant t WHERE t.name = tenant_name;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM set_config('app.tenant', owner.id::text, true);
    RETURN QUERY
        SELECT owner.id, owner.state, coalesce(named.kind, 'digest'), named.generation, a.digest,
               a.base_digest, a.declaration ->> 'tokenizerDigest',
               a.declaration ->> 'chatTemplateDigest'
        FROM (SELECT 1) AS one
        LEFT JOIN tag named ON named.tenant_id = owner.id AND named.adapter = adapter_name
             AND named.name = reference
        JOIN artifact a ON a.tenant_id = owner.id AND a.adapter = adapter_name
             AND a.digest = coalesce(named.artifact_digest, reference)
        WHERE artifact_admitted(owner.id, a.digest, a.base_digest, a.state);
END $$;

-- Row-level security: the app role sees the tenant of its transaction and nothing else.
DO $$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['token', 'base_grant', 'event', 'adapter', 'adapter_grant', 'blob',
        'upload', 'artifact', 'move', 'artifact_blob', 'report', 'review', 'verdict', 'tag',
        'alias_move', 'job', 'revocation', 'revocation_node', 'placement', 'usage']
    LOOP
        EXECUTE format('ALTER TABLE %I ENABLE ROW LEVEL SECURITY', name);
        EXECUTE format('ALTER TABLE %I FORCE ROW LEVEL SECURITY', name);
        EXECUTE format('CREATE POLICY tenant_only ON %I TO registry_app USING '
            || '(tenant_id = nullif(current_setting(''app.tenant'', true), '''')::uuid)', name);
        EXECUTE format('CREATE POLICY auditor_reads ON %I FOR SELECT TO registry_auditor '
            || 'USING (true)', name);
    END LOOP;
    FOREACH name IN ARRAY ARRAY['event', 'job', 'artifact', 'revocation', 'revocation_node',
        'upload', 'blob', 'artifact_blob', 'placement']
    LOOP
        EXECUTE format('CREATE POLICY system_all ON %I TO registry_system USING (true)', name);
    END LOOP;
END $$;
CREATE POLICY owner_authenticates ON token FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_lists ON revocation FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_lists ON artifact FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_lists ON artifact_blob FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_lists ON verdict FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_counts ON placement FOR SELECT TO registry_owner USING (true);
CREATE POLICY owner_ends ON placement FOR DELETE TO registry_owner USING (true);

-- The tenant of a token is not known before the token is: one look-up, and no more than that.
CREATE FUNCTION token_authenticate(token_hash bytea)
RETURNS TABLE (id uuid, subject text, role text, tenant_id uuid, tenant text, tenant_state text,
               expires_at timestamptz, revoked_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    SELECT k.id, k.subject, k.role, k.tenant_id, t.name, t.state, k.expires_at, k.revoked_at
    FROM public.token k JOIN public.tenant t ON t.id = k.tenant_id
    WHERE k.hash = token_hash
$$;
REVOKE ALL ON FUNCTION token_authenticate(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION token_authenticate(bytea) TO registry_app;

-- What every tenant revoked: bytes that stand here are not approved again.
CREATE FUNCTION revocations_listed()
RETURNS TABLE (tenant_id uuid, artifact_digest text, weights_digest text, content_digest text,
               every_tenant boolean, cancel_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    SELECT r.tenant_id, r.artifact_digest, r.weights_digest, r.content_digest, r.every_tenant,
           r.at + make_interval(secs => r.deadline_seconds)
    FROM public.revocation r ORDER BY r.at, r.tenant_id, r.artifact_digest
$$;
REVOKE ALL ON FUNCTION revocations_listed() FROM PUBLIC;
GRANT EXECUTE ON FUNCTION revocations_listed() TO registry_app;

-- What the signed list names, written in the transaction of one tenant. Not in it is what a tenant
-- revoked for itself and no node can load: it never had a verdict, and no approved artifact of that
-- tenant has its bytes. What does not stay may be left out when the list is full, by place: first
-- what still runs under another name, then the newest.
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

GRANT USAGE ON SCHEMA public TO registry_app, registry_system, registry_auditor;

GRANT SELECT, INSERT, UPDATE ON tenant TO registry_app;
GRANT SELECT (tenant_id, id, subject, role, created_at, created_by, expires_at, revoked_at),
    INSERT, UPDATE (revoked_at) ON token TO registry_app;
GRANT SELECT, INSERT ON base TO registry_app;
GRANT UPDATE (state, catalog_digest, statement, round, remaking) ON base TO registry_app;
GRANT SELECT, INSERT ON base_file, base_catalog, catalog_maker, base_admission, base_grant
    TO registry_app;
GRANT DELETE ON catalog_maker TO registry_app;
GRANT SELECT, INSERT ON event, adapter, transition, move, artifact_blob, report, review,
    alias_move, revocation TO registry_app;
REVOKE INSERT ON transition FROM registry_app;
GRANT SELECT, INSERT, UPDATE ON adapter_grant TO registry_app;
GRANT SELECT, INSERT, UPDATE (lease_until), DELETE ON blob TO registry_app;
GRANT SELECT, INSERT, UPDATE (reserved_bytes), DELETE ON upload TO registry_app;
GRANT SELECT, INSERT, UPDATE (state, revision, content_digest) ON artifact TO registry_app;
GRANT SELECT, INSERT, UPDATE ON verdict TO registry_app;
GRANT SELECT, INSERT, UPDATE (artifact_digest, base_digest, generation, actor, updated_at)
    ON tag TO registry_app;
GRANT SELECT, INSERT, UPDATE (state, lease_until, attempt, fault) ON job TO registry_app;
GRANT SELECT, INSERT, UPDATE ON node TO registry_app;
GRANT SELECT, INSERT, UPDATE (acknowledged_at, freed_bytes, purged_blocks) ON revocation_node
    TO registry_app;
GRANT SELECT, INSERT, UPDATE (lease_until), DELETE ON placement TO registry_app;
GRANT SELECT, INSERT, UPDATE (requests, prompt_tokens, completion_tokens, reused_tokens,
    reported_at) ON usage TO registry_app;
GRANT UPDATE (deadline_seconds) ON revocation TO registry_app;
GRANT SELECT, UPDATE (number, envelope, issued_at, expires_at) ON revocation_list TO registry_app;

GRANT SELECT, UPDATE (position) ON event TO registry_system;
GRANT SELECT, UPDATE (state, lease, lease_until, attempt, worker) ON job TO registry_system;
GRANT SELECT, UPDATE (lease_until) ON placement TO registry_system;
GRANT SELECT ON tenant, artifact, revocation, revocation_node, node, upload, blob, artifact_blob,
    base, catalog_maker TO registry_system;

GRANT SELECT ON tenant, base, base_file, base_catalog, catalog_maker, base_admission, base_grant,
    event, adapter, adapter_grant, transition, artifact, move, artifact_blob, report, review,
    verdict, tag, alias_move, job, node, placement, usage, revocation, revocation_node,
    revocation_list TO registry_auditor;
GRANT SELECT (tenant_id, id, subject, role, created_at, created_by, expires_at, revoked_at)
    ON token TO registry_auditor;
