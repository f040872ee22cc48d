"""One slice of delivery: what is sent at one moment."""

from __future__ import annotations

from typing import Final

from topics.frontend.live.channels import Connection
from topics.frontend.live.stream import Step

COST_BYTES: Final = 4096
"""What a connection is looked at for costs one unit, and one more for each of so many bytes written to it."""


class Slice:
    """One slice of work, and what it has sent."""

    __slots__ = ("frames", "now_ms", "records")

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.frames = 0
        self.records = 0

    def send(self, connection: Connection, step: Step) -> bool:
        """Writes it. False: more waits for its client now than may."""
        connection.stream = step.stream
        data = step.data
        if not data:
            return True
        connection.idle_since_ms = self.now_ms
        self.frames += step.frames
        self.records += step.records
        return connection.push.write(data)
