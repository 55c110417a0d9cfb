"""Data that is not a run: assistants, the store, checkpoints, tenants, API keys."""
