-- Webhooks of tenants: each tenant's deliveries are signed with secrets of its own, and the project's own routes can be
-- called.

-- Earlier versions wrote here what the network said, with addresses that callers must not see.
UPDATE webhook_delivery SET last_error = 'The try failed, for a reason that is in the server''s log.'
WHERE last_error IS NOT NULL AND last_status IS NULL AND last_error NOT LIKE 'No answer within %';

-- A tenant's signing secret is computed from the operator's secret and one of these, so that neither alone gives it away:
-- not a copy of the database, and not the operator's secret, which receivers of earlier versions were given. Newest
-- first; the second is there while receivers change from one to the next. `gen_random_uuid` is cryptographically strong.
ALTER TABLE tenant ADD COLUMN webhook_salts bytea[] NOT NULL
    DEFAULT ARRAY[uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())]
    CHECK (cardinality(webhook_salts) BETWEEN 1 AND 2);
