"""What the offline check has to say: what is damaged and where, and what is worth a note."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Kind(StrEnum):
    """What is damaged."""

    FORMAT = "format"
    LOG = "log"
    SEGMENT = "segment"
    POSTINGS = "postings"
    SNAPSHOT = "snapshot"
    STAGE = "stage"
    SINK = "sink"
    UNREADABLE = "unreadable"


class Finding(msgspec.Struct, frozen=True):
    """`offset` in bytes is where `path` stops being what it should be."""

    kind: Kind
    path: str
    offset: int
    reason: str


class Report(msgspec.Struct):
    """What was looked at, and what was found."""

    data_dir: str
    damage: list[Finding] = []
    notes: list[str] = []
    log_frames: int = 0
    segments: int = 0
    segment_records: int = 0
    postings: int = 0
    snapshots: int = 0

    def damaged(self, kind: Kind, path: str, offset: int, reason: str) -> None:
        """Committed bytes that are not what was written."""
        self.damage.append(Finding(kind, path, offset, reason))

    def unreadable(self, error: OSError, path: str) -> None:
        """A file, or something below `path`, that cannot be read."""
        self.damaged(Kind.UNREADABLE, error.filename or path, 0, error.strerror or str(error))

    def note(self, line: str) -> None:
        """What the next start cuts off, or nobody needs."""
        self.notes.append(line)
