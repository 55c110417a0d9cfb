"""Runs that other runs have spawned."""
