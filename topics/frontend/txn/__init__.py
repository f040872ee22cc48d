"""Commits over several topics: stages, and the coordinator of their batches."""
