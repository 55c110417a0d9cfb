-- Assistants: a graph with the configuration it runs with, and every version of it there has been.

CREATE TABLE assistant (
    assistant_id uuid PRIMARY KEY,
    graph_id     text NOT NULL,
    name         text NOT NULL,
    description  text,
    config       jsonb NOT NULL DEFAULT '{}',
    context      jsonb NOT NULL DEFAULT '{}',
    metadata     jsonb NOT NULL DEFAULT '{}',
    -- The version that runs use: the newest, or an older one somebody went back to.
    version      integer NOT NULL DEFAULT 1,
    -- The highest number ever given out. A change after going back gets the next one, never one that was used.
    last_version integer NOT NULL DEFAULT 1,
    created_at   timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT version_was_given_out CHECK (version BETWEEN 1 AND last_version)
);

CREATE INDEX assistant_metadata ON assistant USING gin (metadata jsonb_path_ops);
CREATE INDEX assistant_graph ON assistant (graph_id);
CREATE INDEX assistant_created ON assistant (created_at DESC, assistant_id DESC);

CREATE TABLE assistant_version (
    assistant_id uuid NOT NULL REFERENCES assistant ON DELETE CASCADE,
    version      integer NOT NULL,
    graph_id     text NOT NULL,
    name         text NOT NULL,
    description  text,
    config       jsonb NOT NULL,
    context      jsonb NOT NULL,
    metadata     jsonb NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (assistant_id, version)
);
