"""Who calls, and what the caller may do: custom auth of langgraph.json, or API keys."""
