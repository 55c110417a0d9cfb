"""Webhooks: which URLs are allowed, the outbox of deliveries, and signing and sending a delivery."""
