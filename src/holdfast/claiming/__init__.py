"""Claiming: when a worker claims runs, how many, and what it does with runs that it cannot claim or execute."""
