-- Tenants: whose everything is, the keys that say so, and what each may use.

-- What a tenant may use. NULL is the default of the settings; 2147483647 and 'infinity' are no limit.
CREATE TABLE tenant (
    tenant_id           text COLLATE "C" PRIMARY KEY CHECK (tenant_id ~ '^[A-Za-z0-9_-]{1,64}$'),
    max_queued          integer CHECK (max_queued >= 0),
    max_running         integer CHECK (max_running >= 0),
    requests_per_second double precision CHECK (requests_per_second > 0),
    spend_per_day_usd   double precision CHECK (spend_per_day_usd >= 0),
    created_at          timestamptz NOT NULL DEFAULT now(),
    -- Raised by every claim of a run of a tenant whose running runs are limited: who counted them before that has
    -- counted wrongly.
    claims              bigint NOT NULL DEFAULT 0
);

CREATE TABLE api_key (
    key_id       uuid PRIMARY KEY,
    tenant_id    text COLLATE "C" NOT NULL REFERENCES tenant,
    name         text NOT NULL,
    -- How the key begins, for whoever looks for it in a list. The key itself is nowhere.
    prefix       text NOT NULL,
    -- SHA-256. The secret is 32 random bytes, which nobody can guess however quick the hash is; a slow one is for
    -- passwords.
    hash         bytea NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    scopes       text[] NOT NULL CHECK (scopes <@ ARRAY['read', 'write', 'admin'] AND cardinality(scopes) > 0),
    created_at   timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz,
    last_used_at timestamptz,
    revoked_at   timestamptz
);

CREATE INDEX api_key_tenant ON api_key (tenant_id);

-- What a tenant's runs have cost on a day (UTC), in parts, so that journals that add to it do not wait for each other.
CREATE TABLE tenant_spend (
    tenant_id text COLLATE "C" NOT NULL,
    day       date NOT NULL,
    part      smallint NOT NULL,
    cost_usd  double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, day, part)
);

-- '': nobody's in particular, made while nobody was asked who they are. '*' (assistants): everybody's, a graph's own.
ALTER TABLE thread ADD COLUMN tenant_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN tenant_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE assistant ADD COLUMN tenant_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE cron ADD COLUMN tenant_id text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE webhook_delivery ADD COLUMN tenant_id text COLLATE "C" NOT NULL DEFAULT '';

-- The queue as it is claimed from: within each priority, tenant by tenant, and of each only graphs that the worker has.
-- `run_ready` stays: for what is due next, for the figures, and for workers of the version before.
CREATE INDEX run_turn ON run (priority DESC, tenant_id, graph_id, ready_at)
    WHERE status = 'pending' AND ready_at IS NOT NULL;
-- What limits count. By hash, so that no claim, which steps through the tenants in their order, is tempted to do so by
-- one of these. Without tenants they are empty, and cost nothing.
CREATE INDEX run_tenant_pending ON run USING hash (tenant_id) WHERE status = 'pending' AND tenant_id <> '';
CREATE INDEX run_tenant_running ON run USING hash (tenant_id) WHERE status = 'running' AND tenant_id <> '';
-- What lists are about; that of runs likewise in no order of tenants.
CREATE INDEX run_tenant_recent ON run (hashtext(tenant_id), created_at DESC) WHERE tenant_id <> '';
CREATE INDEX thread_tenant ON thread (tenant_id, updated_at DESC) WHERE tenant_id <> '';
CREATE INDEX webhook_delivery_tenant ON webhook_delivery (tenant_id, created_at DESC) WHERE tenant_id <> '';
