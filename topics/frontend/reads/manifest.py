"""`/v0/topics/:t/segments` and the pins: the files of a topic's sealed records, for readers of the files themselves.

A request writes its pin first, then looks at the topic again. Segments that it lists then became superfluous after the
pin, if at all, and the compactor reads the pins before it removes superfluous segments (docs/decisions/0009-pins.md).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from topics.api import segment_answers as answers
from topics.core.clock import Clock
from topics.core.config import U64_MAX
from topics.core.errors import invalid, storage_unavailable
from topics.core.keys import KeyScope
from topics.core.segment_list import COLD, SEALED, SegmentInfo, SegmentKey
from topics.frontend.entry import limits
from topics.frontend.entry.responses import LIST_BYTES_MAX, reserve_room
from topics.frontend.entry.wire import count
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiRequest, JsonReply
from topics.frontend.shards.arenas import Slices
from topics.shm.durations import Route
from topics.storage import layout
from topics.storage.filesystem import FileSystem
from topics.storage.pins import PIN_PATTERN, Pin, PinFiles, new_pin_id, read_pin
from topics.storage.segment import ENTRY_LEN, CommittedFile, CorruptSegment, index_digest

SEGMENTS_MAX: Final = 2_048
"""Segments of one answer; a longer list goes on with `next_from_seq`."""
PIN_TTL_DEFAULT_MS: Final = 60_000
PIN_TTL_MAX_MS: Final = 3_600_000
_PIN_PATH: Final = f"{api.TOPIC_PATH}/pins/{{pin}}"
_SEGMENTS: Final = "The sealed segments of a topic, for readers of the files themselves"
_LISTED: Final = "The segments, and what else it takes to read them"
_TTL: Final = f"how long the files stay whatever happens, ms, at most {PIN_TTL_MAX_MS}"
_DIGESTS_KEPT: Final = 16_384
_TRIES: Final = 8


@dataclass(eq=False)
class ManifestRoutes:
    """The requests about segments and pins. `pins` are those of this frontend, `pins_dir` has those of all."""

    reader: TopicReader
    catching_up: CatchingUp
    fs: FileSystem
    pins: PinFiles
    pins_dir: str
    data_dir: str
    clock: Clock
    borrowed: Collection[str]
    """Names, in a cold tier, of files that are still in the archive that this service was restored from."""
    _digests: OrderedDict[SegmentKey, int] = field(default_factory=OrderedDict)

    @api.json_route("GET", f"{api.TOPIC_PATH}/segments", Route.OTHER, KeyScope.READ, "segments")
    @api.describe(_SEGMENTS, api.ok(_LISTED, answers.Manifest), "topic_not_found", "storage_unavailable")
    @api.takes(
        api.Query("from_seq", api.COUNT | {"default": 0}, "a cursor: only segments with records behind it"),
        api.Query("to_seq", api.COUNT, "only segments with records up to it"),
        api.Query("pin_ttl_ms", api.COUNT | {"default": 0}, f"{_TTL}; 0: no pin"),
    )
    async def list_segments(self, request: ApiRequest) -> JsonReply:
        name, query = request.topic, request.query
        from_seq, to_seq = count(query, "from_seq", 0), count(query, "to_seq", U64_MAX)
        ttl_ms = min(count(query, "pin_ttl_ms", 0), PIN_TTL_MAX_MS)
        await self.catching_up.wait_for(name)
        await reserve_room(request.scope, LIST_BYTES_MAX)
        pin_id = self._new_pin() if ttl_ms else ""
        ref, segments, listed, more = self._listed(self.reader.get(name), from_seq, to_seq, pin_id, ttl_ms)
        view = ref.view
        sealed = [info for info in segments if info.flags & SEALED]
        return JsonReply(
            {
                "topic": name,
                "epoch": f"{self.reader.epoch_of(view.topic_id):016x}",
                "head_seq": view.head_seq,
                "earliest_seq": view.earliest_seq,
                "evict_floor": view.evict_floor,
                "dedupe_node": ref.config.dedupe_node,
                "http_from_seq": max(view.earliest_seq, sealed[-1].last_seq + 1 if sealed else 1),
                "segments": await self._rows(view.topic_id, listed),
                "next_from_seq": listed[-1].last_seq if more else None,
                "pin": {"id": pin_id, "ttl_ms": ttl_ms} if pin_id else None,
            }
        )

    @api.json_route("PUT", _PIN_PATH, Route.OTHER, KeyScope.READ, "segments")
    @api.describe("Keep pinned files for longer", api.ok("Whether the pin still holds", answers.PinRenewed))
    @api.takes(api.Query("pin_ttl_ms", api.COUNT | {"default": PIN_TTL_DEFAULT_MS}, f"{_TTL}, from now on"))
    async def renew_pin(self, request: ApiRequest) -> JsonReply:
        """Extend a pin, also when its topic is deleted: the pinned files still exist."""
        name, pin_id = _path_params(request)
        ttl_ms = min(max(1, count(request.query, "pin_ttl_ms", PIN_TTL_DEFAULT_MS)), PIN_TTL_MAX_MS)
        now_ms = self.clock.monotonic_ms()
        pin = self._find_pin(name, pin_id, now_ms)
        if pin is not None:
            # A pin is never shortened: another reader may count on the time that it was promised.
            until_ms = max(pin.until_ms, now_ms + ttl_ms)
            self.pins.put(pin_id, Pin(name, pin.topic_id, pin.segments, until_ms))
        # If the old pin ended while the new one was written, the compactor may have removed files in between.
        held = pin is not None and self.clock.monotonic_ms() < pin.until_ms
        return JsonReply({"topic": name, "pin": pin_id, "held": held})

    @api.json_route("DELETE", _PIN_PATH, Route.OTHER, KeyScope.READ, "segments")
    @api.describe("End a pin before its time", api.ok("It is over", answers.PinEnded))
    async def end_pin(self, request: ApiRequest) -> JsonReply:
        name, pin_id = _path_params(request)
        pin = self._find_pin(name, pin_id, self.clock.monotonic_ms())
        if pin is not None:
            self.pins.put(pin_id, Pin(name, pin.topic_id, [], pin.until_ms, ended=True))
        return JsonReply({"topic": name, "pin": pin_id, "ended": pin is not None})

    def _find_pin(self, name: str, pin_id: str, now_ms: int) -> Pin | None:
        """Remove this frontend's pins that are over. Return the topic's pin with this id if it still holds."""
        pin = read_pin(self.fs, self.pins_dir, pin_id, now_ms)
        if pin is None or pin.topic != name:
            return None
        self.pins.held(now_ms)
        return pin

    def _new_pin(self) -> str:
        """Return the id of a pin to be written. `throttled` if all are in use."""
        most = limits.PINS.most_count
        if self.pins.held(self.clock.monotonic_ms()) >= most:
            self.pins.remove_ended()
        if self.pins.held(self.clock.monotonic_ms()) >= most:
            message = f"one frontend keeps {most} pins, which are all in use; end some, or wait until some are over"
            raise limits.PINS.refused(message, most, retry_after_ms=None)
        return new_pin_id()

    def _listed(
        self, ref: TopicRef, from_seq: int, to_seq: int, pin_id: str, ttl_ms: int
    ) -> tuple[TopicRef, tuple[SegmentInfo, ...], list[SegmentInfo], bool]:
        """Return the topic, its segments, and those to list (`_wanted`); with a pin all that are listed are pinned."""
        pinned: set[tuple[int, int]] | None = None
        for _ in range(_TRIES):
            ref, segments = self.reader.with_segments(ref)
            listed, more = _wanted(ref, segments, from_seq, to_seq)
            names = [(info.first_seq, info.version) for info in listed]
            # A segment that fell below the floor in the meantime is no longer listed; its pin does no harm.
            if not pin_id or (pinned is not None and pinned.issuperset(names)):
                return ref, segments, listed, more
            pinned = set(names)
            until_ms = self.clock.monotonic_ms() + ttl_ms
            self.pins.put(pin_id, Pin(ref.name, ref.view.topic_id, names, until_ms))
            ref = self.reader.refresh(ref)
        raise storage_unavailable(
            f"the segments of topic {ref.name!r} change faster than they can be pinned; ask again", topic=ref.name
        )

    async def _rows(self, topic_id: int, listed: list[SegmentInfo]) -> list[dict[str, Any]]:
        rows = []
        slices = Slices()
        for info in listed:
            digest = self._digests.get(info.key_in(topic_id))
            if digest is None:
                digest = self._digest(topic_id, info)
                await slices.yield_if_over()
            row = _row(topic_id, info, digest)
            if info.flags & COLD and row["data_path"].partition("/")[2] in self.borrowed:
                row["tier"] = "archive"
            rows.append(row)
        return rows

    def _digest(self, topic_id: int, info: SegmentInfo) -> int | None:
        """Return the digest of a segment's index; None if it cannot be read, which the reader of the file will see."""
        directory = layout.topic_dir(self.data_dir, topic_id)
        path = layout.segment_idx_path(directory, info.first_seq, info.version)
        try:
            digest = index_digest(CommittedFile(path, info.records * ENTRY_LEN))
        except (OSError, CorruptSegment):
            return None
        self._digests[info.key_in(topic_id)] = digest
        if len(self._digests) > _DIGESTS_KEPT:
            self._digests.popitem(last=False)
        return digest


def _wanted(
    ref: TopicRef, segments: tuple[SegmentInfo, ...], from_seq: int, to_seq: int
) -> tuple[list[SegmentInfo], bool]:
    """Return the sealed segments with live records of from_seq + 1..to_seq. True: one answer cannot hold them all."""
    first_seq = max(from_seq + 1, ref.view.earliest_seq)
    found = [
        info for info in segments if info.flags & SEALED and info.last_seq >= first_seq and info.first_seq <= to_seq
    ]
    return found[:SEGMENTS_MAX], len(found) > SEGMENTS_MAX


def _row(topic_id: int, info: SegmentInfo, digest: int | None) -> dict[str, Any]:
    directory = layout.topic_dir("", topic_id)
    members = ("first_seq", "last_seq", "records", "first_ts", "last_ts", "data_bytes", "version")
    return {
        **{name: getattr(info, name) for name in members},
        "tier": "cold" if info.flags & COLD else "hot",
        "data_path": layout.segment_data_path(directory, info.first_seq, info.version),
        "idx_path": layout.segment_idx_path(directory, info.first_seq, info.version),
        "idx_xxh3": None if digest is None else f"{digest:016x}",
    }


def _path_params(request: ApiRequest) -> tuple[str, str]:
    pin_id: str = request.scope["path_params"]["pin"]
    if re.fullmatch(PIN_PATTERN, pin_id) is None:
        raise invalid("a pin's id is pin_ and 22 characters, as GET …/segments gave it", field="pin")
    return request.topic, pin_id
