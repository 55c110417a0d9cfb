-- Crons: runs that come back by the clock.

CREATE TABLE cron (
    cron_id          uuid PRIMARY KEY,
    assistant_id     uuid NOT NULL REFERENCES assistant ON DELETE CASCADE,
    -- NULL: every firing has a thread of its own.
    thread_id        uuid REFERENCES thread ON DELETE CASCADE,
    -- Whose runs they are; empty without authentication.
    user_id          text NOT NULL DEFAULT '',
    schedule         text NOT NULL,
    -- IANA name; NULL is UTC.
    timezone         text,
    end_time         timestamptz,
    -- The firing that has not been yet; NULL when there is none any more. Moving it on and creating the run is one
    -- transaction, so that a due time fires once.
    next_run_date    timestamptz,
    enabled          boolean NOT NULL DEFAULT true,
    on_run_completed text CHECK (on_run_completed IN ('delete', 'keep')),
    metadata         jsonb NOT NULL DEFAULT '{}',
    -- What the client asked for, as it is shown.
    payload          json NOT NULL,
    -- The same as the engine takes it: kwargs, multitask_strategy, priority, after_seconds.
    template         json NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT now(),
    updated_at       timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT own_threads_have_an_end CHECK ((thread_id IS NULL) = (on_run_completed IS NOT NULL))
);

CREATE INDEX cron_due ON cron (next_run_date) WHERE enabled AND next_run_date IS NOT NULL;
CREATE INDEX cron_thread ON cron (thread_id) WHERE thread_id IS NOT NULL;
CREATE INDEX cron_assistant ON cron (assistant_id);
CREATE INDEX cron_metadata ON cron USING gin (metadata jsonb_path_ops);
CREATE INDEX cron_created ON cron (created_at DESC, cron_id DESC);
