"""Benchmarks against a real server: `python -m bench` (or `make bench`). History: docs/benchmarks.md."""
