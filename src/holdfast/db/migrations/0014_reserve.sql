-- How many cores the worker's process may use, and which: workers of one host that name the same share them. The doctor
-- warns of more workers than cores. NULL: not known, of a worker of an older version.
ALTER TABLE worker
    ADD COLUMN cores integer,
    ADD COLUMN cpus text;
