-- What a worker says about itself with each renewal, so that the fleet's rate is a sum and not a search.
ALTER TABLE worker ADD COLUMN claims_last_minute integer NOT NULL DEFAULT 0;
