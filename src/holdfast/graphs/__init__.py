"""The project's langgraph.json and its graphs: reading, loading, opening."""
