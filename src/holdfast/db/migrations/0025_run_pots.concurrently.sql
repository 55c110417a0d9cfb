-- Which runs draw on a pot: asked when one of them is deleted. Has an entry only for runs that share a budget.
CREATE INDEX CONCURRENTLY IF NOT EXISTS run_pots ON run USING gin (pots) WHERE pots IS NOT NULL;
