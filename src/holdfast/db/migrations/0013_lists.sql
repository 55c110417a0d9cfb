-- What lists are asked for besides the latest: by an index that holds just that, so that a page of it costs the same
-- however much has ended well.

-- Threads in which something goes on, waits for an answer or has failed. Most are none of it.
CREATE INDEX thread_status ON thread (status, updated_at DESC, thread_id DESC) WHERE status <> 'idle';

CREATE INDEX thread_created ON thread (created_at DESC);

-- Runs that did not end well. The others, of which there are many, are found by `run_recent`, and those that have not
-- ended by `run_unfinished`.
CREATE INDEX run_failed ON run (status, created_at DESC, run_id DESC)
    WHERE status IN ('error', 'timeout', 'interrupted');
