-- The sweep of old days looks for them in the order of days. The primary key begins with the tenant.
CREATE INDEX CONCURRENTLY IF NOT EXISTS tenant_spend_day ON tenant_spend (day);
