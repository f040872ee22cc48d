"""First bytes of the idempotency keys that the service gives to writes itself. None begins UTF-8: no client's has one.

They are in logs: one that is given up is not given to anything else.
"""

from __future__ import annotations

from enum import Enum, unique


@unique
class KeyMark(bytes, Enum):
    """Who has given a key."""

    PIN = b"\xff"
    """A transaction: of a stage that it publishes (`idempotency.py`)."""
    CARRIED = b"\xfe"
    """A frontend: of a record that it brings to the dead letters, or back (`frontend/queues/dead_letters.py`)."""
    PRODUCER = b"\xfd"
    """A producer: what its writes are numbered with (`producers.py`)."""
