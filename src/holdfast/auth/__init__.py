"""Who may do what: the custom auth of langgraph.json (`langgraph_sdk.Auth`)."""
