-- How many cores the worker's process may use. Workers beyond their host's cores are its reserve. NULL: not known, of a
-- worker of an older version.
ALTER TABLE worker ADD COLUMN cores integer;
