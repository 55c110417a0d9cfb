"""A worker process: its parts put together, the heartbeat that keeps its lease, its health, its shutdown."""
