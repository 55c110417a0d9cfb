-- Everything that is not kept for ever is found by an index that holds only what there still is to do, so that a sweep
-- which finds nothing costs next to nothing, however much is kept.

-- The history of a thread is pruned up to here: of what is older, only what the thread needs is left. NULL: never looked
-- at. Counted from the thread's creation then.
ALTER TABLE thread
    ADD COLUMN history_from timestamptz,
    -- Since when the log may hold events of runs that were undone: no run is left to count their age from.
    ADD COLUMN undone_at timestamptz;

-- Threads at rest whose state has been written since their history was pruned. A thread that a run is under way in comes
-- back when the run has ended.
CREATE INDEX thread_history ON thread (coalesce(history_from, created_at))
    WHERE status <> 'busy' AND hidden_at IS NULL AND has_state
      AND state_updated_at > coalesce(history_from, created_at);

-- Threads at rest that were not given a time to live of their own.
CREATE INDEX thread_resting ON thread (updated_at)
    WHERE status <> 'busy' AND hidden_at IS NULL AND ttl_minutes IS NULL;

CREATE INDEX thread_undone ON thread (undone_at) WHERE undone_at IS NOT NULL;

-- A finished run is looked at twice: when its events have expired, and when it has itself. One index for each, of which
-- a run is in one at a time, instead of one that holds all of them for good.
CREATE INDEX run_replayable ON run (finished_at) WHERE finished_at IS NOT NULL AND first_seq IS NOT NULL;
CREATE INDEX run_forgettable ON run (finished_at)
    WHERE finished_at IS NOT NULL AND first_seq IS NULL AND dead_letter IS NULL;
DROP INDEX run_finished;
