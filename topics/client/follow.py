"""Where a follower of topics stands, over every disconnect. Pure: the events of streams come in.

The session lives on the server. A lost stream is opened again with the id of the last frame that was taken whole
(Last-Event-ID); when the session itself is gone, because the service was restarted, a new one begins at `positions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from topics.api.answers import Record, TombstoneAnswer, WatchAnswer
from topics.client import calls
from topics.client.calls import Call
from topics.client.errors import GapError
from topics.client.walks import Item, Tombstones

HEARTBEAT_MS = 5_000
SILENCE_MAX_S = 3 * HEARTBEAT_MS / 1000
"""A stream without a byte for this long is dead, whatever TCP believes."""


class TopicGone(msgspec.Struct, frozen=True):
    """A topic that was followed was deleted; nothing more comes of it. If it was deleted while the service was away,
    nobody saw its end: then `head_seq` is how far it was followed.
    """

    head_seq: int


class _RecordFrame(msgspec.Struct):
    topic: str
    records: list[Record]
    to_seq: int


class _TombstoneFrame(TombstoneAnswer, frozen=True, kw_only=True):
    missed_estimate: int = 0  # which a frame does not say
    topic: str


class _EndFrame(msgspec.Struct):
    topic: str
    head_seq: int


class _ErrorFrame(msgspec.Struct):
    code: Any
    error: str = ""


_record_frame = msgspec.json.Decoder(_RecordFrame).decode
_tombstone_frame = msgspec.json.Decoder(_TombstoneFrame).decode
_end_frame = msgspec.json.Decoder(_EndFrame).decode
_error_frame = msgspec.json.Decoder(_ErrorFrame).decode


class Following:
    """`positions` are what to start from to see everything that was not yielded yet."""

    def __init__(self, positions: Mapping[str, int] | str, tombstones: Tombstones, options: dict[str, Any]) -> None:
        self.positions = {positions: 0} if isinstance(positions, str) else dict(positions)
        self._tombstones = tombstones
        self._options = {"heartbeat_ms": HEARTBEAT_MS, "include_tags": True} | options
        self._last_event_id: str | None = None
        self.wid: str | None = None
        self._began = False

    def ended(self) -> bool:
        """Every topic was deleted."""
        return not self.positions

    def session_call(self) -> Call[WatchAnswer]:
        """Of the first session all topics have to exist; later one may have been deleted while there was none."""
        return calls.watch(self.positions, self._options, lenient=self._began)

    def began(self, session: WatchAnswer) -> Iterator[tuple[str, TopicGone]]:
        """What this session cannot bring any more."""
        self.wid = session.wid
        self._last_event_id = None
        self._began = True
        for name in [name for name in self.positions if name not in session.topics]:
            yield name, TopicGone(self.positions.pop(name))

    @property
    def path(self) -> str:
        """Where the session's stream is."""
        return f"/v0/watch/{self.wid}"

    def headers(self) -> dict[str, str]:
        """Of the request for the session's stream."""
        headers = {"Accept": "text/event-stream"}
        return headers if self._last_event_id is None else headers | {"Last-Event-ID": self._last_event_id}

    def session_gone(self) -> None:
        """The stream was answered with 404."""
        self.wid = None

    def take(self, event: str, data: str, id: str) -> Iterator[tuple[str, Item | TopicGone]]:
        """What one frame brings. It is taken whole before its id counts: a disconnect inside it repeats nothing."""
        if event == "record":
            frame = _record_frame(data)
            for record in frame.records:
                self.positions[frame.topic] = record.seq
                yield frame.topic, record
            self.positions[frame.topic] = frame.to_seq
        elif event == "tombstone":
            gap = _tombstone_frame(data)
            if self._tombstones == "raise":
                raise GapError(gap.topic, gap)
            self.positions[gap.topic] = gap.gap_to
            yield gap.topic, gap
        elif event == "topic-deleted":
            end = _end_frame(data)
            del self.positions[end.topic]
            yield end.topic, TopicGone(end.head_seq)
        elif event == "error" and _error_frame(data).code == 410:
            self.wid = None
            return
        if id:
            self._last_event_id = id
