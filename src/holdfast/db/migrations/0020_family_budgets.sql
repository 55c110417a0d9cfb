-- A budget is one pot for a run, its children and theirs, and the runs that answer what any of them asks.

-- Opened when a run with a budget gets its first child or answer. It counts what all of them have used.
CREATE TABLE budget_pot (
    -- The run whose budget it is. Not a reference: nobody waits for a lock on that run in order to count.
    pot_id       uuid PRIMARY KEY,
    -- As a run's kwargs have them: max_cost_usd, max_tokens, max_seconds, max_steps.
    limits       jsonb NOT NULL,
    cost_usd     numeric NOT NULL DEFAULT 0,
    total_tokens bigint NOT NULL DEFAULT 0,
    steps        bigint NOT NULL DEFAULT 0
);

-- The pots that the run draws on, if it shares any: its ancestors', those of the runs whose questions it answers, its own.
ALTER TABLE run ADD COLUMN pots uuid[];

-- A pot is there for as long as a run that draws on it, and not only for as long as the run whose budget it was: that one
-- may be deleted while its children still spend. The lock lets the last two runs be deleted at the same time.
CREATE FUNCTION forget_pots() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM 1 FROM budget_pot WHERE pot_id = ANY(OLD.pots) ORDER BY pot_id FOR UPDATE;
    DELETE FROM budget_pot
    WHERE pot_id = ANY(OLD.pots) AND NOT EXISTS (SELECT 1 FROM run WHERE run.pots @> ARRAY[budget_pot.pot_id]);
    RETURN NULL;
END $$;

CREATE TRIGGER pots_were_left AFTER DELETE ON run FOR EACH ROW
    WHEN (OLD.pots IS NOT NULL) EXECUTE FUNCTION forget_pots();

CREATE FUNCTION is_overspent(pots uuid[]) RETURNS boolean LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT EXISTS (
        SELECT 1 FROM budget_pot
        WHERE pot_id = ANY(pots)
          AND (CASE WHEN jsonb_typeof(limits -> 'max_cost_usd') = 'number'
               THEN cost_usd > (limits -> 'max_cost_usd')::numeric ELSE false END
            OR CASE WHEN jsonb_typeof(limits -> 'max_tokens') = 'number'
               THEN total_tokens > (limits -> 'max_tokens')::numeric ELSE false END))
$$;

-- A parent that waits for its children goes on, too, when they have used up the pot: it ends with the error that says so.
CREATE OR REPLACE FUNCTION wake_parent(parent uuid) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE run SET ready_at = now(), updated_at = now()
    WHERE run_id = parent AND status = 'pending' AND ready_at = '9999-01-01 00:00:00+00'
      AND (NOT EXISTS (SELECT 1 FROM child WHERE parent_run_id = parent AND awaited > 0 AND child.status IS NULL)
           OR EXISTS (SELECT 1 FROM child WHERE parent_run_id = parent AND awaited = 2
                        AND child.status IS NOT NULL AND child.status <> 'success')
           OR pots IS NOT NULL AND is_overspent(pots));
END $$;

-- Nobody is left to pay for the children.
CREATE TRIGGER parent_spent_its_budget AFTER UPDATE OF status ON run FOR EACH ROW
    WHEN (OLD.children > 0 AND OLD.finished_at IS NULL AND NEW.finished_at IS NOT NULL
          AND NEW.status = 'error' AND NEW.error ->> 'error' = 'BudgetExceeded')
    EXECUTE FUNCTION children_were_abandoned();
