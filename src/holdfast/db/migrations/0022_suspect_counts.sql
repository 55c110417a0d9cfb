-- Runs that have crashed workers of an earlier version keep their count. Apart from the ALTER TABLE, which locks the
-- table until its transaction ends. In the order in which everybody locks runs.
WITH crashed AS MATERIALIZED (
    SELECT run_id FROM run
    WHERE status IN ('pending', 'running') AND crashes > 0 AND crashes_in_a_row = 0
    ORDER BY run_id FOR NO KEY UPDATE
)
UPDATE run SET crashes_in_a_row = crashes WHERE run_id IN (SELECT run_id FROM crashed);
