-- Dead letters that somebody has dealt with, graphs that nobody has, and the answers to requests with a key.

-- `dead_letter` is the reason of a letter that is open. Once it is settled the reason moves to `settled_letter`, so that
-- whoever deletes finished runs has one thing to ask: `dead_letter IS NULL`.
ALTER TABLE run
    ADD COLUMN settled_letter    text,
    ADD COLUMN letter_settled_at timestamptz,
    ADD COLUMN letter_outcome    text,
    -- The run that a letter was retried as, and the other way round. Either may be gone by now.
    ADD COLUMN retried_by        uuid,
    ADD COLUMN retry_of          uuid,
    -- Where a retry began: at the letter's `start`, or at its last `checkpoint`, whose history is then its own.
    ADD COLUMN retry_from        text,
    ADD CONSTRAINT letter_is_open_or_settled CHECK (dead_letter IS NULL OR settled_letter IS NULL) NOT VALID,
    ADD CONSTRAINT letter_outcome_is_known CHECK (letter_outcome IN ('retried', 'discarded', 'expired')) NOT VALID;

CREATE INDEX run_dead_letter ON run (finished_at, run_id) WHERE dead_letter IS NOT NULL;
CREATE INDEX run_dead_letter_thread ON run (thread_id) WHERE dead_letter IS NOT NULL;

-- Graphs that runs wait for and no worker has. `seen_at`: when upkeep last found it so.
CREATE TABLE graph_absence (
    graph_id      text PRIMARY KEY,
    missing_since timestamptz NOT NULL DEFAULT now(),
    seen_at       timestamptz NOT NULL DEFAULT now()
);

-- Written with what the request created.
CREATE TABLE idempotency_key (
    -- Whose key it is.
    scope       text NOT NULL,
    key         text NOT NULL,
    -- Of method, path and body.
    fingerprint bytea NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('whole', 'stream', 'wait')),
    status      smallint NOT NULL,
    headers     json NOT NULL,
    -- The answer, or the run whose stream or result it was.
    body        bytea,
    run_id      uuid,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (scope, key),
    CONSTRAINT has_an_answer CHECK (CASE kind WHEN 'whole' THEN body IS NOT NULL ELSE run_id IS NOT NULL END)
);

CREATE INDEX idempotency_key_created ON idempotency_key (created_at);
