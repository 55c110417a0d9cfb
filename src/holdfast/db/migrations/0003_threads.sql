-- Threads that are not kept for ever.

ALTER TABLE thread
    ADD COLUMN ttl_minutes  double precision CHECK (ttl_minutes > 0),
    ADD COLUMN ttl_strategy text CHECK (ttl_strategy IN ('delete', 'keep_latest')),
    -- When to look at the thread. The time to live counts from the last activity (`updated_at`), and whatever
    -- happens in a thread does not care about this column: upkeep moves it on when it comes too early.
    ADD COLUMN expires_at   timestamptz,
    ADD CONSTRAINT ttl_is_whole CHECK ((ttl_minutes IS NULL) = (ttl_strategy IS NULL));

CREATE INDEX thread_expires ON thread (expires_at) WHERE expires_at IS NOT NULL;
