"""A page of a source's records as copies for one dest: the frames to log, and their entries for the index.

The copies have a fixed order, whenever they are made: record by record, and of each record by router id.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import Final

from topics.core.location import LOW_WORD
from topics.core.routers import HOPS_MAX, FeedRouter, Router, with_origin
from topics.core.tags import Match
from topics.core.topic import Topic
from topics.storage.copies import Original, UnstampedCopies, lay_out_copy, tag_of
from topics.storage.frame import LOCATION_HAS_TAG, Bytes, stamp

PAGE_RECORDS: Final = 512
PAGE_BYTES: Final = 1 << 20


class CopyPage:
    """Unstamped copies of consecutive source records up to `source_seq`.

    `full` says that the dest has no room for the copies of the next record; `no_room_for` is their (number, bytes).
    `oversize` is the number of copies of the next record if not even an empty dest could hold them.
    """

    def __init__(self, source_seq: int) -> None:
        self.source_seq = source_seq
        self.offset_len = array("Q")
        """Entries as in the index, with offsets from the first frame."""
        self.record_flags = bytearray()
        self.copies_by_router: dict[int, int] = {}
        self.full = False
        self.no_room_for = 0, 0
        self.oversize = 0
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self.offset_len)

    @property
    def size_bytes(self) -> int:
        return len(self._buffer)

    def add(self, frame: Bytes, location_flags: int, router_id: int) -> None:
        """Add one copy, an unstamped frame."""
        self.offset_len.append(len(self._buffer) | len(frame) << 32)
        self.record_flags.append(location_flags)
        self._buffer += frame
        self.copies_by_router[router_id] = self.copies_by_router.get(router_id, 0) + 1

    def stamped(self, topic_id: int, first_seq: int, ts: int) -> bytearray:
        """Return the complete frames: contiguous seqs from `first_seq`, one commit time."""
        stamp(self._buffer, self.offset_len, topic_id, first_seq, ts, 0)
        return self._buffer

    @classmethod
    def unchanged(cls, source_seq: int, copies: UnstampedCopies, router: Router) -> CopyPage:
        """Return a page of the records behind `source_seq` that pass `router`, unchanged. `copies` are of all records
        behind it, and the page takes them over.
        """
        page = cls(source_seq + len(copies.rows))
        match = router.spec.match
        if match is None:
            page._buffer, page.offset_len, page.record_flags = copies
            page.copies_by_router[router.id] = len(copies.rows)
            return page
        view = memoryview(copies.frames)
        for row, flags in zip(copies.rows, copies.location_flags, strict=True):
            start = row & LOW_WORD
            if flags & LOCATION_HAS_TAG and match.covers(tag_of(view, start)):
                page.add(view[start : start + (row >> 32)], flags, router.id)
        return page


def pass_unchanged(routers: list[FeedRouter], source_seq: int, repeats_to_seq: int) -> bool:
    """Return whether these routers copy records behind `source_seq` unchanged, or not at all."""
    if len(routers) != 1 or source_seq < repeats_to_seq:
        return False
    router = routers[0].router
    spec = router.spec
    unchanged = spec.preserve_node and spec.preserve_tag and spec.guarantee == "at_least_once"
    return unchanged and not router.counts_hops and source_seq >= routers[0].from_seq


def copy_page(
    originals: Iterable[Original],
    routers: list[FeedRouter],
    source: str,
    source_topic_id: int,
    source_seq: int,
    topic: Topic,
    repeats_to_seq: int,
) -> CopyPage:
    """Return the copies of the records behind `source_seq`, as far as `topic` has room for them. Records up to
    `repeats_to_seq` may have been copied before a crash that lost the copies: those go around a cycle only once.
    """
    page = CopyPage(source_seq)
    room_records, room_bytes = topic.room()
    matching = [(one, one.router.spec.match) for one in routers]
    for original in originals:
        seq = page.source_seq + 1
        hops = max(original.hops, HOPS_MAX - 2) if seq <= repeats_to_seq else original.hops
        copies = list(_copies_of(original, hops, matching, source, source_topic_id, seq))
        size_bytes = sum([len(frame) for frame, _, _ in copies])
        if len(copies) > room_records or size_bytes > room_bytes:
            if not topic.config.can_hold(len(copies), size_bytes):  # not even an empty dest could
                page.oversize = len(copies)
            else:
                page.full = True
                page.no_room_for = len(copies), size_bytes
            break
        room_records -= len(copies)
        room_bytes -= size_bytes
        for copy in copies:
            page.add(*copy)
        page.source_seq = seq
    return page


def _copies_of(
    original: Original,
    former_hops: int,
    matching: list[tuple[FeedRouter, Match | None]],
    source: str,
    source_topic_id: int,
    source_seq: int,
) -> Iterator[tuple[bytes, int, int]]:
    """Yield (unstamped frame, location flags, router id) for each router that lets the record pass."""
    for one, match in matching:
        router = one.router
        spec = router.spec
        hops = former_hops + router.counts_hops
        if source_seq <= one.from_seq or hops >= HOPS_MAX:
            continue
        if match is not None and not (original.tag and match.covers(original.tag)):
            continue
        payload: Bytes = original.payload
        has_meta = original.has_meta
        if spec.guarantee == "exactly_once":
            payload = with_origin(bytes(payload), has_meta, router.name, source, source_topic_id, source_seq)
            has_meta = True
        node = original.node if spec.preserve_node else b""
        tag = original.tag if spec.preserve_tag else b""
        yield *lay_out_copy(node, tag, payload, has_meta, hops), router.id
