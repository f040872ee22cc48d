"""A persistent event engine: named append-only logs over HTTP and SSE. `docs/architecture.md` is the map."""

__version__ = "0.2.0"
DISTRIBUTION = "topicsd"
"""The name to install; another package is called `topics` on the index."""
