"""Makes durable what the runs of a worker write: many runs in one commit, with their fences checked in the same
transaction. Start reading at `journal.py`."""
