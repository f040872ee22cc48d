"""The position of a follower of topics, across disconnects. Pure: the events of streams come in.

The session lives on the server. A lost stream is opened again with the id of the last frame that was taken whole
(Last-Event-ID). When the session itself is gone, because the service restarted, a new one begins at `positions`.
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
"""A stream without a byte for this long is taken for dead, even if TCP reports nothing."""


class TopicGone(msgspec.Struct, frozen=True):
    """The end of a followed topic, which was deleted: no more records of it follow.

    `head_seq` is its last seq, or how far it was followed if it was deleted while the service could not be reached.
    """

    head_seq: int


class _RecordFrame(msgspec.Struct):
    topic: str
    records: list[Record]
    to_seq: int


class _TombstoneFrame(TombstoneAnswer, frozen=True, kw_only=True):
    missed_estimate: int = 0  # frames do not have it
    topic: str


class _EndFrame(msgspec.Struct):
    topic: str
    head_seq: int


_record_frame = msgspec.json.Decoder(_RecordFrame).decode
_tombstone_frame = msgspec.json.Decoder(_TombstoneFrame).decode
_end_frame = msgspec.json.Decoder(_EndFrame).decode


class Following:
    """A follower's session and its `positions`: the seqs behind which a new session finds all that was not yielded."""

    def __init__(self, positions: Mapping[str, int] | str, tombstones: Tombstones, options: dict[str, Any]) -> None:
        self.positions = {positions: 0} if isinstance(positions, str) else dict(positions)
        self._tombstones = tombstones
        self._options = {"heartbeat_ms": HEARTBEAT_MS, "include_tags": True} | options
        self._last_event_id: str | None = None
        self.wid: str | None = None
        self._began = False

    def ended(self) -> bool:
        """Return whether every topic was deleted."""
        return not self.positions

    def session_call(self) -> Call[WatchAnswer]:
        """Return the call for a session. In the first one all topics have to exist; a later one leaves out those that
        were deleted between the two.
        """
        return calls.watch(self.positions, self._options, lenient=self._began)

    def begin(self, session: WatchAnswer) -> Iterator[tuple[str, TopicGone]]:
        """Take over a new session; yield the topics that it has not."""
        self.wid = session.wid
        self._last_event_id = None
        self._began = True
        for name in [name for name in self.positions if name not in session.topics]:
            yield name, TopicGone(self.positions.pop(name))

    @property
    def path(self) -> str:
        """The path of the session's stream."""
        return f"/v0/watch/{self.wid}"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request for the session's stream."""
        headers = {"Accept": "text/event-stream"}
        return headers if self._last_event_id is None else headers | {"Last-Event-ID": self._last_event_id}

    def forget_session(self) -> None:
        """Forget a session that the service no longer knows (404)."""
        self.wid = None

    def take(self, event: str, data: str, id: str) -> Iterator[tuple[str, Item | TopicGone]]:
        """Yield the items of one frame. Its id counts after the last of them: nothing is repeated or left out when the
        stream breaks in between.
        """
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
        elif event == "error" and msgspec.json.decode(data)["code"] == 410:
            self.wid = None
            return
        if id:
            self._last_event_id = id
