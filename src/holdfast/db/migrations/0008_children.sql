-- Child runs: created once for a key of their parent run, each on a thread of its own. docs/children.md has the story.
--
-- The end of a child is noticed by triggers, and not by whoever ends it. There are many ways for a run to end, and
-- processes of an older version, which know nothing of children, end runs too. A thread that is nobody's child, and a
-- run that has none, cost the triggers one comparison.

-- Whose child the thread's runs are, and how many generations are above them.
ALTER TABLE thread ADD COLUMN parent_run_id uuid, ADD COLUMN depth integer NOT NULL DEFAULT 0;
ALTER TABLE run
    -- Not a reference: the children of a run that was rolled back are still to be found, and cancelled.
    ADD COLUMN parent_run_id uuid,
    ADD COLUMN depth integer NOT NULL DEFAULT 0,
    -- How many it has created.
    ADD COLUMN children integer NOT NULL DEFAULT 0;

CREATE INDEX run_parent ON run (parent_run_id) WHERE parent_run_id IS NOT NULL;

-- Whoever changes a row of this table holds the lock of the parent's run. That is what makes "is any of them left?" and
-- "then I wait" one step for everybody.
CREATE TABLE child (
    parent_run_id uuid NOT NULL,
    key           text NOT NULL,
    run_id        uuid NOT NULL,
    thread_id     uuid NOT NULL,
    assistant_id  uuid NOT NULL,
    graph_id      text NOT NULL,
    -- Of the assistant and the input, so that a key is not used for two things.
    digest        text NOT NULL,
    -- What the parent waits for: 0 not for this one, 1 for its end, 2 for its end or the first failure of such.
    awaited       smallint NOT NULL DEFAULT 0,
    -- How it ended; NULL until then. What it left is kept here, where nobody can change or delete it any more.
    status        text,
    error         jsonb,
    "values"      jsonb,
    created_at    timestamptz NOT NULL DEFAULT now(),
    ended_at      timestamptz,
    PRIMARY KEY (parent_run_id, key),
    CONSTRAINT child_ended_is_stamped CHECK ((status IS NULL) = (ended_at IS NULL))
);

CREATE UNIQUE INDEX child_thread ON child (thread_id);

-- Runs that were cancelled, timed out or deleted, and whose children are to be cancelled. Written with that end.
CREATE TABLE abandoned (
    run_id       uuid PRIMARY KEY,
    abandoned_at timestamptz NOT NULL DEFAULT now()
);

-- A parent that waits is ready in the year 9999: it stays the head of its thread, out of the reach of a claim. Not at
-- 'infinity', with which Postgres before 17 cannot reckon and which drivers cannot read: an older version does both.
CREATE INDEX run_waiting ON run (started_at) WHERE status = 'pending' AND ready_at = '9999-01-01 00:00:00+00';

CREATE FUNCTION wake_parent(parent uuid) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE run SET ready_at = now(), updated_at = now()
    WHERE run_id = parent AND status = 'pending' AND ready_at = '9999-01-01 00:00:00+00'
      AND (NOT EXISTS (SELECT 1 FROM child WHERE parent_run_id = parent AND awaited > 0 AND child.status IS NULL)
           OR EXISTS (SELECT 1 FROM child WHERE parent_run_id = parent AND awaited = 2
                        AND child.status IS NOT NULL AND child.status <> 'success'));
END $$;

-- The first statement waits for the parent's lock; those after it see what whoever had it has left. One statement would
-- look with a snapshot from before the lock, and of the last two children, ending together, each would see the other
-- unfinished. What ended first counts: what happens in the thread afterwards is nothing to the parent.
CREATE FUNCTION end_child(parent uuid, thread uuid, how text, why jsonb, what jsonb) RETURNS void
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM 1 FROM run WHERE run_id = parent FOR NO KEY UPDATE;
    UPDATE child SET status = how, error = why, "values" = what, ended_at = now()
    WHERE child.thread_id = thread AND status IS NULL;
    PERFORM wake_parent(parent);
END $$;

-- A child has ended when its thread comes to rest, unless it rests because somebody has to answer: then its last run
-- was a success, and the thread is `interrupted`. A run that never began says nothing about that.
CREATE FUNCTION child_came_to_rest() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    ended record;
BEGIN
    SELECT run.status, run.error INTO ended FROM run WHERE run.thread_id = NEW.thread_id AND run.fence > 0
    ORDER BY run.finished_at DESC NULLS LAST, run.created_at DESC LIMIT 1;
    IF NOT FOUND THEN
        SELECT CASE WHEN EXISTS (SELECT 1 FROM run WHERE run.thread_id = NEW.thread_id)
                    THEN 'interrupted' ELSE 'rolled_back' END AS status, NULL::jsonb AS error INTO ended;
    END IF;
    IF NEW.status = 'interrupted' AND ended.status = 'success' THEN
        RETURN NULL;
    END IF;
    PERFORM end_child(NEW.parent_run_id, NEW.thread_id, ended.status, ended.error,
                      CASE WHEN ended.status = 'success' THEN NEW."values" END);
    RETURN NULL;
END $$;

CREATE TRIGGER child_came_to_rest AFTER UPDATE OF status ON thread FOR EACH ROW
    WHEN (NEW.parent_run_id IS NOT NULL AND NEW.status <> 'busy' AND OLD.status IS DISTINCT FROM NEW.status)
    EXECUTE FUNCTION child_came_to_rest();

-- Threads are deleted in bulk, too; those whose child has ended need no lock.
CREATE FUNCTION child_was_deleted() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM child WHERE child.thread_id = OLD.thread_id AND child.status IS NULL) THEN
        PERFORM end_child(OLD.parent_run_id, OLD.thread_id, 'deleted', NULL, NULL);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER child_was_deleted AFTER DELETE ON thread FOR EACH ROW
    WHEN (OLD.parent_run_id IS NOT NULL) EXECUTE FUNCTION child_was_deleted();

CREATE FUNCTION children_were_abandoned() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF OLD.finished_at IS NULL THEN
        INSERT INTO abandoned (run_id) VALUES (OLD.run_id) ON CONFLICT DO NOTHING;
    END IF;
    IF TG_OP = 'DELETE' THEN
        DELETE FROM child WHERE child.parent_run_id = OLD.run_id;
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER parent_was_stopped AFTER UPDATE OF status ON run FOR EACH ROW
    WHEN (OLD.children > 0 AND OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL
          AND (NEW.status IN ('interrupted', 'timeout') OR NEW.cancel_action IS NOT NULL))
    EXECUTE FUNCTION children_were_abandoned();

CREATE TRIGGER parent_was_deleted AFTER DELETE ON run FOR EACH ROW
    WHEN (OLD.children > 0) EXECUTE FUNCTION children_were_abandoned();
