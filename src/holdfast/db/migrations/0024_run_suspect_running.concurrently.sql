-- The suspects that are executed, read by every claim. Nearly always empty.
CREATE INDEX CONCURRENTLY IF NOT EXISTS run_suspect_running ON run (worker_id)
    WHERE crashes_in_a_row > 0 AND status = 'running';
