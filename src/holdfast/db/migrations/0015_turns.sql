-- Between tenants turns decide, and priority orders a tenant's own runs only. The index for that is `run_claim_order`, of
-- a migration of its own. The table that is locked comes last.

-- A run's priority is from -100 to 100, because a claim looks at each priority that a tenant uses. Crons that have another
-- would not be accepted any more when they are changed. Runs keep theirs. One by one, because Postgres cannot look into
-- JSON that holds a NUL character, which the input of a cron may: such a cron keeps its priority.
DO $$
DECLARE
    one uuid;
BEGIN
    FOR one IN SELECT cron_id FROM cron LOOP
        BEGIN
            UPDATE cron SET
                template = jsonb_set(template::jsonb, '{priority}',
                                     to_jsonb(greatest(-100, least(100, (template ->> 'priority')::numeric))))::json,
                payload = CASE WHEN payload ->> 'priority' IS NULL THEN payload ELSE
                    jsonb_set(payload::jsonb, '{priority}',
                              to_jsonb(greatest(-100, least(100, (payload ->> 'priority')::numeric))))::json END
            WHERE cron_id = one AND (template ->> 'priority')::numeric NOT BETWEEN -100 AND 100;
        EXCEPTION WHEN data_exception THEN
            NULL;
        END;
    END LOOP;
END
$$;

-- How many runs a tenant gets in each turn. Only the operator sets it.
ALTER TABLE tenant ADD COLUMN weight integer NOT NULL DEFAULT 1 CHECK (weight BETWEEN 1 AND 1000);
