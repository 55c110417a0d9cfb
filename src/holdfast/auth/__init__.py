"""Authenticates callers and decides what they may do: by the custom auth of langgraph.json, or by API keys."""
