"""One slice of delivery: at one moment, with one sight of each topic."""

from __future__ import annotations

from typing import Final

from topics.frontend.channels import Connection
from topics.frontend.push import HIGH_WATER_BYTES
from topics.frontend.snapshot import Snapshot
from topics.frontend.stream import Step

COST_BYTES: Final = 4096
"""What a connection is looked at for costs one unit, and one more for each of so many bytes written to it."""


class Slice:
    """One slice of work, and what it has sent."""

    __slots__ = ("frames", "full", "now_ms", "records", "snapshot")

    def __init__(self, now_ms: int, snapshot: Snapshot) -> None:
        self.now_ms = now_ms
        self.snapshot = snapshot
        self.frames = 0
        self.full: list[Connection] = []
        """Who has more waiting for it now than it may."""
        self.records = 0

    def send(self, connection: Connection, step: Step) -> int:
        """Writes it; what that cost."""
        connection.stream = step.stream
        data = step.data
        if not data:
            return 1
        push = connection.push
        push.write(data)
        if push.buffered_bytes > HIGH_WATER_BYTES:
            self.full.append(connection)
        connection.idle_since_ms = self.now_ms
        self.frames += step.frames
        self.records += step.records
        return 1 + len(data) // COST_BYTES
