"""A worker process: its parts, its lease and heartbeat, the attempts it executes, its probes and its shutdown."""
