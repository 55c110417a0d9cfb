"""Webhooks: which addresses are allowed, the stored deliveries, signing and sending one."""
