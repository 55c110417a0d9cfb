-- Deliveries to the project's own routes, which only web processes look for. Empty where there are none.
CREATE INDEX CONCURRENTLY IF NOT EXISTS webhook_delivery_due_relative ON webhook_delivery (next_attempt_at)
    WHERE state = 'pending' AND starts_with(url, '/');
