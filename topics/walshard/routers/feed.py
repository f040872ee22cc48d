"""One dest of routers: what it copies from, how far it is, and how a page of its source becomes frames of its own.

All routers into a dest are one feed, because the order of its copies must be the same whenever they are made: each
record of the source in turn, for each router in the order of ids.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Final

from topics.core.config import U64_MAX
from topics.core.floors import EvictReason
from topics.core.location import ENTRY_WORDS
from topics.core.routers import HOPS_MAX, FeedBody, FeedRouter, Router, encode_router, with_origin
from topics.core.tags import Match
from topics.core.topic import Topic
from topics.storage import frame
from topics.storage.copies import Original, make_copy
from topics.storage.frame import FrameType
from topics.walshard.hosted import Hosted

PAGE_RECORDS: Final = 1024
PAGE_BYTES: Final = 1 << 20


class Hindrance(Enum):
    """Why a dest did not get all that its source has, the last time that it was to."""

    NONE = 0
    """It did, or has no room for it."""
    SOURCE = 1
    """The source could not be looked at, or read, at this moment; at the next one it may."""
    UNREADABLE = 2
    """The source's bytes cannot be read, and nobody knows whether they ever will."""
    LASTING = 3
    """Anything else, as a log that cannot be written."""


class Page:
    """Copies of consecutive source records up to `source_seq`, as frames and as index entries relative to the first
    frame. `full`: the dest has no room for the next one, whose (records, bytes) are `no_room_for`. `oversize`: so many
    copies the next one would have, and the dest could never hold them, however empty.
    """

    __slots__ = ("copies_by_router", "entries", "frames", "full", "no_room_for", "oversize", "size_bytes", "source_seq")

    def __init__(self, source_seq: int) -> None:
        self.source_seq = source_seq
        self.frames: list[frame.Bytes] = []
        self.entries = array("Q")
        self.size_bytes = 0
        self.copies_by_router: dict[int, int] = {}
        self.full = False
        self.no_room_for = 0, 0
        self.oversize = 0

    def __len__(self) -> int:
        return len(self.frames)

    def placed(self, file_no: int, offset: int, location_flags: int) -> array[int]:
        """The entries of frames that lie at `offset` of file `file_no`."""
        entries = array("Q", self.entries)
        entries[2::4] = array("Q", [word + offset for word in entries[2::4]])
        entries[3::4] = array("Q", [word | file_no | location_flags << 32 for word in entries[3::4]])
        return entries


class Feed:
    """State of one dest; `feeds.py` and `copy_log.py` change it when the log says so."""

    def __init__(self, hosted: Hosted, body: FeedBody) -> None:
        self.hosted = hosted
        self.source = body.source
        self.source_topic_id = body.source_topic_id
        self.source_seq = body.source_seq
        self.routers = body.routers
        self.revision = body.revision
        self.logged_source_seq = body.source_seq
        """Up to where the durable log holds what was copied."""
        self.full = body.full
        """The dest, or the service, has had no room for what comes next, and it has not caught up since: what the
        source evicts is lost, what it deletes is left out. The log says so before either counts, and no copy is derived
        meanwhile: so those behind the last cursor are the same whatever was deleted since.
        """
        self.no_room_for = 0, 0, 0
        """Behind which seq of the source comes what last had no room, and the (records, bytes) that its copies take."""
        self.leaving_out = False
        """The last record was more than the dest may ever hold; the log says it of the first of several."""
        self.unlogged_bytes = 0
        self.marks: deque[tuple[int, int]] = deque()
        """(source_seq, head_seq behind its copies) of pages that are not in the log, oldest first."""
        self.released_seq = 0
        """The source keeps nothing up to there for this dest: what of it is not copied yet is read from segments."""
        self.held = False
        """The source keeps what the log of this dest does not hold yet."""
        self.asked_ms: int | None = None
        """When that was first missing."""
        self.told: tuple[int, int] | None = None
        """(source_topic_id, hold_seq) that the source was told last."""
        self.source_head_seq = 0
        self.source_evict_floor = 0
        self.rederive_seq: int | None = None
        """Where the source was when this life of the shard saw it first: no copy from before is of what follows."""
        self.seen_source_seq = 0
        """How far the life before had come, and the `forwarded_total` of each router by id then; 0 if it is unknown."""
        self.seen_totals: dict[int, int] = {}
        self.unreadable = ""
        """Why the source could not be read, as the service's log has it; empty when it could."""
        self.hindrance = Hindrance.NONE
        self.unreadable_ms: int | None = None
        """Since when that has been the hindrance (monotonic ms)."""
        self.retry_ms = 0
        self.backoff_ms = 0
        self._matches: dict[int, Match | None] = {}

    @property
    def topic(self) -> Topic:
        return self.hosted.topic

    @property
    def unlogged_seq(self) -> int:
        """The first copy that is not in the log, U64_MAX when all are."""
        return self.hosted.ring.unlogged_seq

    @property
    def hold_seq(self) -> int:
        """What the source is to keep: what is copied and not logged, and what is yet to be copied. What does not fit
        into the dest it keeps no longer than it would anyway.
        """
        if self.unlogged_seq != U64_MAX:
            return self.logged_source_seq + 1
        if not self.full:
            return max(self.logged_source_seq, self.released_seq) + 1
        kept_seq = min(self.source_evict_floor, self.source_head_seq + 1)
        return max(self.source_seq + 1, self.released_seq + 1, kept_seq)

    def has_no_room(self) -> bool:
        """Whether what comes next is known not to fit into the dest: it need not be read to say so."""
        source_seq, records, size_bytes = self.no_room_for
        if not records or source_seq != self.source_seq or can_never_hold(self.topic, records, size_bytes):
            return False
        room_records, room_bytes = room(self.topic)
        return records > room_records or size_bytes > room_bytes

    def uncopied(self) -> int:
        """How many seqs of the dest stand for what the source had, should it never be read again: a copy that readers
        may have seen and that is not here has its own, what no life has come to one for each record.
        """
        copies = 0
        if self.source_seq < self.seen_source_seq:
            missing = [self.seen_totals.get(one.router.id, 0) - one.forwarded_total for one in self.routers]
            copies = sum(count for count in missing if count > 0)
        return copies + max(0, self.source_head_seq - max(self.source_seq, self.seen_source_seq))

    def body(self, trimmed: int = 0, trim_reason: EvictReason = EvictReason.NONE) -> FeedBody:
        """The feed as it is now, the cursor that belongs to the dest's head."""
        routers = [FeedRouter(one.router, one.from_seq, one.forwarded_total) for one in self.routers]
        reason = 0 if trim_reason == EvictReason.SOURCE_TRIM else int(trim_reason)
        return FeedBody(
            self.source, self.source_topic_id, self.source_seq, routers, self.revision, trimmed, reason, self.full
        )

    def cursor_frame(self, body: FeedBody, head_seq: int, ts: int) -> bytes:
        """ROUTER_CURSOR: the end of a write, or a write of its own."""
        data = encode_router(body)
        return frame.encode(FrameType.ROUTER_CURSOR, 0, self.topic.id, head_seq, ts, b"", b"", data)

    def copied(self, page: Page, file_no: int, offset: int, location_flags: int) -> None:
        """A page was written there: it is in the dest, and the cursor behind it."""
        self.topic.restored(page.placed(file_no, offset, location_flags))
        self.topic.evict_over_cap()
        self.leaving_out = False
        self.source_seq = page.source_seq
        for one in self.routers:
            one.forwarded_total += page.copies_by_router.get(one.router.id, 0)

    def registered(self) -> list[Router]:
        return [one.router for one in self.routers]

    def copy(self, originals: Iterable[Original], type_: FrameType) -> Page:
        """The copies that the records behind `source_seq` get, as far as there is room for them."""
        topic = self.topic
        page = Page(self.source_seq)
        room_records, room_bytes = room(topic)
        topic_id, head_seq, last_ts = topic.id, topic.head_seq, topic.last_write_ts
        offset = 0
        for original in originals:
            ts = max(last_ts, original.ts)
            seq = page.source_seq + 1
            copies = list(self._copies_of(original, seq, type_, topic_id, head_seq + 1, ts))
            size_bytes = sum([len(made) for made, _, _ in copies])
            if len(copies) > room_records or size_bytes > room_bytes:
                if can_never_hold(topic, len(copies), size_bytes):
                    page.oversize = len(copies)
                else:
                    page.full = True
                    page.no_room_for = len(copies), size_bytes
                break
            room_records -= len(copies)
            room_bytes -= size_bytes
            for made, location_flags, router_id in copies:
                head_seq += 1
                page.frames.append(made)
                page.entries.extend((head_seq, ts, offset | len(made) << 32, location_flags << 32))
                page.copies_by_router[router_id] = page.copies_by_router.get(router_id, 0) + 1
                offset += len(made)
            if copies:
                last_ts = ts
            page.source_seq = seq
        page.size_bytes = offset
        assert len(page.entries) == ENTRY_WORDS * len(page.frames)
        return page

    def _copies_of(
        self, original: Original, source_seq: int, type_: FrameType, topic_id: int, first_seq: int, ts: int
    ) -> Iterator[tuple[bytes, int, int]]:
        """(frame, location flags, router id) for each router that lets the record pass."""
        seq = first_seq
        for one in self.routers:
            router = one.router
            spec = router.spec
            hops = original.hops + router.counts_hops
            if source_seq <= one.from_seq or hops >= HOPS_MAX or not self._passes(router, original):
                continue
            payload: frame.Bytes = original.payload
            has_meta = original.has_meta
            if spec.guarantee == "exactly_once":
                payload = with_origin(
                    bytes(payload), has_meta, router.name, self.source, self.source_topic_id, source_seq
                )
                has_meta = True
            made, location_flags = make_copy(
                type_,
                topic_id,
                seq,
                ts,
                original.node if spec.preserve_node else b"",
                original.tag if spec.preserve_tag else b"",
                payload,
                has_meta,
                hops,
            )
            yield made, location_flags, router.id
            seq += 1

    def _passes(self, router: Router, original: Original) -> bool:
        if router.spec.filter is None:
            return True
        match = self._matches.get(router.id)
        if match is None:
            match = self._matches[router.id] = router.spec.match
            assert match is not None
        if not original.tag:
            return False
        return original.tag == match.tag if match.op == "eq" else original.tag.startswith(match.tag)

    def forget_matches(self) -> None:
        """The routers have changed."""
        self._matches.clear()


def room(topic: Topic) -> tuple[int, int]:
    """What a `reject` topic can take; any other makes room."""
    config = topic.config
    if config.discard != "reject":
        return U64_MAX, U64_MAX
    return (
        config.cap_records - topic.records if config.cap_records else U64_MAX,
        config.cap_bytes - topic.live_bytes if config.cap_bytes else U64_MAX,
    )


def can_never_hold(topic: Topic, records: int, size_bytes: int) -> bool:
    """What a writer would be told with `record_too_large`: a `reject` topic is too small for it even when empty."""
    config = topic.config
    return bool(
        (config.cap_records and records > config.cap_records) or (config.cap_bytes and size_bytes > config.cap_bytes)
    )
