-- What runs have used: tokens, money, steps. NULL is nothing. By model, with the sum of them under "*"; see
-- src/holdfast/engine/usage.py. The thread's is the sum of its runs', and stays when a run is rolled back or deleted.
ALTER TABLE run ADD COLUMN usage jsonb;
ALTER TABLE thread ADD COLUMN usage jsonb;
