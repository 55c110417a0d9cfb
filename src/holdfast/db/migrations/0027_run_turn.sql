-- `run_claim_order` is used in its place.
DROP INDEX IF EXISTS run_turn;
