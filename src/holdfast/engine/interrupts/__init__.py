"""Interrupts and their resumes: what a graph asks, and the one answer that counts."""
