"""Holdfast beside the other servers that run LangGraph graphs, and beside the graph without any server."""
