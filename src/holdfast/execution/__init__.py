"""Executes one attempt at a run, from the claimed run to its outcome. Start reading at `executor.py`."""
