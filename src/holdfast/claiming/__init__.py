"""When and how a worker claims runs."""
