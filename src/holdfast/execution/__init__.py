"""One attempt at a run: from the claimed row to the outcome. Start reading at `executor.py`."""
