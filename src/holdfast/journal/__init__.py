"""Everything that the runs of a worker make durable, committed in groups, with the fences checked in the same
transaction."""
