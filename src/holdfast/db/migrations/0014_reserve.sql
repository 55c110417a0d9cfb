-- How many cores the worker's process may use, and which: workers of one host that name the same share them, and those
-- beyond their number are a reserve. NULL: not known, of a worker of an older version.
ALTER TABLE worker
    ADD COLUMN cores integer,
    ADD COLUMN cpus text;
