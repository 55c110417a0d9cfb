"""What is recorded outside Holdfast: marks of every step, and, by triggers, who owned a run, who wrote to it and when
it made progress.

Every process connects as a Postgres user of its own, so that `session_user` says who it is, whatever it believes.
"""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg
from psycopg.rows import DictRow, dict_row

RECORD = """
CREATE TABLE public.mark (
    number bigserial, at timestamptz NOT NULL DEFAULT clock_timestamp(), mark uuid PRIMARY KEY,
    run_id uuid NOT NULL, thread_id uuid NOT NULL, step integer NOT NULL, who text NOT NULL, owner text,
    durable_step integer
);
CREATE TABLE public.identity (worker_id uuid PRIMARY KEY, who text NOT NULL);
CREATE TABLE public.ownership (
    number bigserial, at timestamptz NOT NULL DEFAULT clock_timestamp(), run_id uuid NOT NULL, thread_id uuid NOT NULL,
    status text NOT NULL, fence bigint NOT NULL, who text
);
CREATE TABLE public.stale_write (
    at timestamptz NOT NULL DEFAULT clock_timestamp(), what text NOT NULL, run_id uuid NOT NULL, who text NOT NULL,
    owner text
);

CREATE TABLE public.progress (
    number bigserial, at timestamptz NOT NULL DEFAULT clock_timestamp(), run_id uuid NOT NULL, step integer NOT NULL
);

-- The functions run with the rights of their owner: the roles of the processes may do nothing in this schema.
CREATE FUNCTION public.note_identity() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.identity VALUES (NEW.worker_id, session_user);
    RETURN NULL;
END $$;
CREATE TRIGGER note_identity AFTER INSERT ON holdfast.worker FOR EACH ROW EXECUTE FUNCTION public.note_identity();

CREATE FUNCTION public.note_ownership() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.ownership (run_id, thread_id, status, fence, who)
    VALUES (NEW.run_id, NEW.thread_id, NEW.status, NEW.fence,
            (SELECT who FROM public.identity WHERE worker_id = NEW.worker_id));
    RETURN NULL;
END $$;
CREATE FUNCTION public.note_deletion() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO public.ownership (run_id, thread_id, status, fence)
    VALUES (OLD.run_id, OLD.thread_id, 'deleted', OLD.fence);
    RETURN NULL;
END $$;
CREATE TRIGGER note_deletion AFTER DELETE ON holdfast.run FOR EACH ROW EXECUTE FUNCTION public.note_deletion();
CREATE TRIGGER note_ownership AFTER UPDATE ON holdfast.run FOR EACH ROW
    WHEN ((OLD.status, OLD.fence) IS DISTINCT FROM (NEW.status, NEW.fence)) EXECUTE FUNCTION public.note_ownership();

-- A worker writes only to runs that are its own at that moment. Others write the end of runs that nobody has, and the
-- error of those that are given up.
CREATE FUNCTION public.note_event() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    holder text;
    state text;
BEGIN
    SELECT identity.who, run.status INTO holder, state
    FROM holdfast.run LEFT JOIN public.identity USING (worker_id) WHERE run.run_id = NEW.run_id;
    IF holder IS DISTINCT FROM session_user
       AND NOT (NEW.kind IN ('end', 'error') AND state IS DISTINCT FROM 'running') THEN
        INSERT INTO public.stale_write (what, run_id, who, owner)
        VALUES ('event ' || NEW.kind, NEW.run_id, session_user, holder);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_event AFTER INSERT ON holdfast.event FOR EACH ROW EXECUTE FUNCTION public.note_event();

CREATE FUNCTION public.note_checkpoint() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    holder text;
BEGIN
    SELECT identity.who INTO holder FROM holdfast.run LEFT JOIN public.identity USING (worker_id)
    WHERE run.run_id = (NEW.metadata ->> 'run_id')::uuid;
    IF holder IS DISTINCT FROM session_user THEN
        INSERT INTO public.stale_write (what, run_id, who, owner)
        VALUES ('checkpoint', (NEW.metadata ->> 'run_id')::uuid, session_user, holder);
    END IF;
    IF NEW.checkpoint_ns = '' THEN
        INSERT INTO public.progress (run_id, step)
        VALUES ((NEW.metadata ->> 'run_id')::uuid, (NEW.metadata ->> 'step')::integer);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER note_checkpoint AFTER INSERT ON holdfast.checkpoints FOR EACH ROW
    WHEN (NEW.metadata ? 'run_id') EXECUTE FUNCTION public.note_checkpoint();
"""


class Witness:
    """The record, from the side of whoever checks it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def begin(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(RECORD)

    def rows(self, statement: LiteralString, parameters: Any = None) -> list[DictRow]:
        with psycopg.connect(self._url, row_factory=dict_row, options="-c search_path=holdfast,public") as connection:
            return connection.execute(statement, parameters).fetchall()
