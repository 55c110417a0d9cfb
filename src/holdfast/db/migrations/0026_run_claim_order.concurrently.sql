-- The queue as it is claimed from: tenant by tenant, of each the highest priority first, and only graphs that the worker
-- has. The priority is negated, so that all columns go in one direction and rows of them can be compared; as bigint,
-- because the smallest integer has no negative.
CREATE INDEX CONCURRENTLY IF NOT EXISTS run_claim_order ON run (tenant_id, (-priority::bigint), graph_id, ready_at)
    WHERE status = 'pending' AND ready_at IS NOT NULL;
