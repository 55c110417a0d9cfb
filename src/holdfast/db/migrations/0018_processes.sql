-- How a worker is recognised by sessions of any role, and how the end of its process becomes known at once. All columns
-- are NULL in the rows of workers of earlier versions.

ALTER TABLE worker
    -- Drawn at random by each process, and part of the application_name of all its sessions. Postgres shows that name to
    -- every role, but `backend_start` to superusers and to the session's own role only.
    ADD COLUMN process text,
    -- The application_name of the heartbeat's session, as Postgres has it: a proxy may have changed it.
    ADD COLUMN session_name text,
    -- The server that took the last renewal. After a restart, or on a standby that was promoted, it is another one.
    ADD COLUMN server_start timestamptz,
    -- When the supervisor of the process saw it end without having resigned.
    ADD COLUMN ended_at timestamptz;
