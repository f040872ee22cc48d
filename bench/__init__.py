"""Benchmarks against a real server: `python -m bench` (or `make bench`). Method and latest run: docs/benchmarks.md."""
