"""The HTTP API: a module for each resource, and the layers around them."""
