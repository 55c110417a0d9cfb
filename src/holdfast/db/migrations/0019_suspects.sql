-- Runs that were on a worker when it died, and have made no progress since: one of them may have killed it.

ALTER TABLE run
    -- Workers that died while they executed the run, since it last made progress. `crashes` counts all of them.
    ADD COLUMN crashes_in_a_row integer NOT NULL DEFAULT 0;

ALTER TABLE worker
    -- The runs that are known to have brought the worker down, if it could say so. NULL: not known, each of its runs
    -- may have.
    ADD COLUMN blamed uuid[];
