-- Deliveries are claimed in turns between tenants, and between the hosts that they lead to: a receiver that does not
-- answer must not keep others from theirs. The expression is that of `RECEIVER` in resources/webhooks.py; it is cut off
-- because an index entry has a limit, and a URL has none.
CREATE INDEX CONCURRENTLY IF NOT EXISTS webhook_delivery_turns ON webhook_delivery (
    tenant_id,
    (CASE WHEN starts_with(url, '/') THEN '/' ELSE '@' || left(split_part(url, '/', 3), 300) END) COLLATE "C",
    next_attempt_at
) WHERE state = 'pending';
