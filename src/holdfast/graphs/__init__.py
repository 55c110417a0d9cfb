"""Reads the project's langgraph.json, loads its graphs and opens them."""
