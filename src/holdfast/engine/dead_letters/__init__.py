"""Runs that Holdfast has given up, and their retries."""
