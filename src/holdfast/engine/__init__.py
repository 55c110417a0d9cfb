"""The life of a run, in SQL: created, claimed, ended, cancelled, taken over. `states.py` has the table of moves."""
