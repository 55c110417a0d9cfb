-- The life of a run. docs/architecture.md has the picture and the state diagram.

CREATE TABLE thread (
    thread_id        uuid PRIMARY KEY,
    created_at       timestamptz NOT NULL DEFAULT now(),
    updated_at       timestamptz NOT NULL DEFAULT now(),
    state_updated_at timestamptz NOT NULL DEFAULT now(),
    status           text NOT NULL DEFAULT 'idle' CHECK (status IN ('idle', 'busy', 'interrupted', 'error')),
    -- What `status` returns to once no run of the thread is unfinished.
    resting_status   text NOT NULL DEFAULT 'idle' CHECK (resting_status IN ('idle', 'interrupted', 'error')),
    metadata         jsonb NOT NULL DEFAULT '{}',
    config           jsonb NOT NULL DEFAULT '{}',
    "values"         jsonb,
    interrupts       jsonb NOT NULL DEFAULT '{}',
    error            jsonb,
    -- The highest event number ever given out when the last run ended. A running run may be past it; the log knows.
    last_seq         bigint NOT NULL DEFAULT 0,
    -- False is certain: no checkpoint of this thread exists, so a first run need not look for one.
    has_state        boolean NOT NULL DEFAULT false,
    -- A stateless run's thread: hidden from the moment its run ends, swept a little later.
    temporary        boolean NOT NULL DEFAULT false,
    hidden_at        timestamptz
);

CREATE INDEX thread_updated ON thread (updated_at DESC);
CREATE INDEX thread_metadata ON thread USING gin (metadata jsonb_path_ops);
CREATE INDEX thread_hidden ON thread (hidden_at) WHERE hidden_at IS NOT NULL;

CREATE TABLE worker (
    worker_id     uuid PRIMARY KEY,
    status        text NOT NULL CHECK (status IN ('online', 'draining', 'offline', 'lost')),
    host          text NOT NULL,
    pid           integer NOT NULL,
    version       text NOT NULL,
    capacity      integer NOT NULL,
    graphs        text[] NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT now(),
    stopped_at    timestamptz,
    lease_until   timestamptz NOT NULL,
    -- The heartbeat's Postgres session, as pg_stat_activity knows it; NULL behind PgBouncer.
    backend_pid   integer,
    backend_start timestamptz,
    -- When upkeep first missed that session.
    session_gone_at timestamptz
);

CREATE INDEX worker_alive ON worker (lease_until) WHERE status IN ('online', 'draining');

CREATE TABLE run (
    run_id             uuid PRIMARY KEY,
    thread_id          uuid NOT NULL REFERENCES thread ON DELETE CASCADE,
    assistant_id       uuid NOT NULL,
    graph_id           text NOT NULL,
    status             text NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'success', 'error', 'timeout', 'interrupted')),
    created_at         timestamptz NOT NULL,
    updated_at         timestamptz NOT NULL DEFAULT now(),
    -- When the run may be claimed. At most one unfinished run of a thread has it: the thread's head.
    -- It keeps its value while running, so that a run handed back returns to its old place in the queue.
    ready_at           timestamptz,
    priority           integer NOT NULL DEFAULT 0,
    multitask_strategy text NOT NULL DEFAULT 'enqueue'
        CHECK (multitask_strategy IN ('reject', 'enqueue', 'interrupt', 'rollback')),
    metadata           jsonb NOT NULL DEFAULT '{}',
    kwargs             json NOT NULL,
    worker_id          uuid,
    fence              bigint NOT NULL DEFAULT 0,
    attempt            integer NOT NULL DEFAULT 0,
    retries            integer NOT NULL DEFAULT 0,
    crashes            integer NOT NULL DEFAULT 0,
    -- What the run has made durable: 0 nothing, 1 the writes of its Command, 2 a checkpoint.
    progress           smallint NOT NULL DEFAULT 0,
    first_seq          bigint,
    started_at         timestamptz,
    finished_at        timestamptz,
    cancel_action      text CHECK (cancel_action IN ('interrupt', 'rollback')),
    error              jsonb,
    traceback          text,
    dead_letter        text,
    CONSTRAINT running_is_owned CHECK ((status = 'running') = (worker_id IS NOT NULL)),
    CONSTRAINT running_was_ready CHECK (status <> 'running' OR (ready_at IS NOT NULL AND fence > 0)),
    CONSTRAINT ended_is_stamped CHECK ((status IN ('pending', 'running')) = (finished_at IS NULL)),
    CONSTRAINT ended_is_not_ready CHECK (finished_at IS NULL OR ready_at IS NULL)
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);

-- The safety net: whatever the code believes, a thread has one running run.
CREATE UNIQUE INDEX run_one_running ON run (thread_id) WHERE status = 'running';
-- The queue. Runs that wait behind another run of their thread are not in it.
CREATE INDEX run_ready ON run (priority DESC, ready_at) WHERE status = 'pending' AND ready_at IS NOT NULL;
CREATE INDEX run_unfinished ON run (thread_id, created_at, run_id) WHERE status IN ('pending', 'running');
CREATE INDEX run_owned ON run (worker_id) WHERE status = 'running';
CREATE INDEX run_thread ON run (thread_id, created_at DESC);
CREATE INDEX run_recent ON run (created_at DESC);
CREATE INDEX run_finished ON run (finished_at) WHERE finished_at IS NOT NULL;

-- The log. `seq` is gapless from 1 per thread; only the owner of the thread's running run assigns it.
CREATE TABLE event (
    thread_id  uuid NOT NULL,
    seq        bigint NOT NULL,
    run_id     uuid NOT NULL,
    kind       text NOT NULL,
    namespace  text NOT NULL DEFAULT '',
    data       bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (thread_id, seq)
) WITH (autovacuum_vacuum_insert_scale_factor = 0.1);
