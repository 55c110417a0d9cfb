"""What one process at a time does for all: the leader and its duties."""
