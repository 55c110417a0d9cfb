-- Webhooks: what is to be told to somebody else when a run ends. Written with the end itself, so neither is without the
-- other. Not tied to the thread: a stateless run's is gone long before a receiver may be back.

-- Whom to tell. The kwargs say it too, but Postgres cannot read into those that hold a NUL character.
ALTER TABLE run ADD COLUMN webhook text;

CREATE TABLE webhook_delivery (
    delivery_id     uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    run_id          uuid NOT NULL,
    thread_id       uuid NOT NULL,
    url             text NOT NULL,
    -- The run's row as it was when it ended, and what its thread held then.
    run             json NOT NULL,
    "values"        jsonb,
    state           text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'delivered', 'failed')),
    -- How often it was tried since `retry_since`; also tells the tries apart.
    attempts        integer NOT NULL DEFAULT 0,
    -- When it is to be tried. While somebody is sending it: when that counts as lost.
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    sending         boolean NOT NULL DEFAULT false,
    -- What the time for retries counts from: the run's end, or the last redelivery by hand.
    retry_since     timestamptz NOT NULL DEFAULT now(),
    last_status     integer,
    last_error      text,
    created_at      timestamptz NOT NULL DEFAULT now(),
    delivered_at    timestamptz,
    -- When nothing more was to be done about it.
    settled_at      timestamptz,
    CONSTRAINT delivered_is_stamped CHECK (state <> 'delivered' OR delivered_at IS NOT NULL),
    CONSTRAINT settled_is_stamped CHECK ((state = 'pending') = (settled_at IS NULL))
);

CREATE INDEX webhook_delivery_due ON webhook_delivery (next_attempt_at) WHERE state = 'pending';
CREATE INDEX webhook_delivery_run ON webhook_delivery (run_id);
CREATE INDEX webhook_delivery_recent ON webhook_delivery (created_at DESC, delivery_id DESC);
CREATE INDEX webhook_delivery_settled ON webhook_delivery (settled_at) WHERE settled_at IS NOT NULL;
