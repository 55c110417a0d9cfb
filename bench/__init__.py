"""Benchmarks: the figures Holdfast promises, measured by one command. `python -m bench --help`."""
