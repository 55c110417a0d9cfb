-- The suspects that wait, read by every claim. Nearly always empty.
CREATE INDEX CONCURRENTLY IF NOT EXISTS run_suspect ON run (tenant_id, updated_at)
    WHERE crashes_in_a_row > 0 AND status = 'pending' AND ready_at IS NOT NULL;
