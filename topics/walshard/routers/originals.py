"""The records of topics that are copied, of this shard or another.

A topic of another shard is read as frontends read it, from that shard's arena, log files and segments, which are there
also while the shard is dead; nobody is asked. So forwarding needs no records in rings, and goes on where it was after a
crash of either side.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from topics.core.location import LOCATION_IN_RAM_LOG, LOCATION_LOST, LOW_WORD
from topics.core.names import owner_shard
from topics.core.segment_list import SegmentInfo, SegmentList
from topics.settings import Settings
from topics.shm.arena import ArenaReader
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.storage import layout
from topics.storage.copies import Original, read_original
from topics.storage.filesystem import FileSystem
from topics.storage.segment_store import LocalStore
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.cold_reads import ColdReads, NotReadYetError
from topics.walshard.routers.segment_originals import SegmentOriginals

_RUN_BYTES: Final = 1 << 18
_FILES_MAX: Final = 16
_ATTACH_TRIES: Final = 10


class UnknownError(Exception):
    """The answer cannot be known now: the shard has not recovered, or the topic has changed meanwhile. Ask again."""


class SourceSight(NamedTuple):
    """A topic that is copied, as it is now."""

    topic_id: int
    head_seq: int
    base_seq: int
    """Lowest seq that can be read."""
    ring_base_seq: int
    """Lowest seq in the ring; those below are in segments."""
    earliest_seq: int
    evict_floor: int
    evict_reason: int


class SourceLocations(NamedTuple):
    """Columns of consecutive records, as in the arena. Offsets of records in a segment are those in its `.data`."""

    offset_len: list[int]
    file_flags: list[int]
    segment: SegmentInfo | None = None


class Originals:
    """Reads topics of all shards. It keeps a few log files open."""

    def __init__(
        self,
        fs: FileSystem,
        settings: Settings,
        shared: SharedMemory,
        shard: int,
        catalog: Catalog,
        monotonic_ms: Callable[[], int],
    ) -> None:
        self._fs = fs
        cold = None
        if settings.cold_dir is not None:
            cold = ColdReads(LocalStore(fs, layout.topics_dir(settings.cold_dir)), monotonic_ms)
        self._segments = SegmentOriginals(fs, settings.data_dir, cold)
        self._shards = settings.wal_shards
        self._shard = shard
        self._catalog = catalog
        self._identity = shared.identity
        self._cells = [shared.control.cell(Role.WALSHARD, peer) for peer in range(self._shards)]
        self._arenas: list[ArenaReader | None] = [None] * self._shards
        self._directories = [
            (layout.group_dir(settings.data_dir, peer, self._shards), layout.ram_group_dir(shared.ram_dir, peer))
            for peer in range(self._shards)
        ]
        self._open: OrderedDict[tuple[int, int, int], int] = OrderedDict()

    def owner(self, name: str) -> int:
        return owner_shard(name, self._shards)

    def look(self, name: str) -> SourceSight | None:
        """Return a topic, None when there is none. Raises UnknownError while its shard has never recovered."""
        if self.owner(name) == self._shard:
            hosted = self._catalog.find(name)
            if hosted is None:
                return None
            topic = hosted.topic
            return SourceSight(
                topic.id,
                topic.head_seq,
                hosted.index.base_seq,
                hosted.ring.base_seq,
                topic.earliest_seq,
                topic.evict_floor,
                topic.evict_reason,
            )
        arena = self._arena(self.owner(name))
        found = arena.look_up(name)
        if found is None:
            return None
        slot, view = found
        segments = arena.segments(slot, view)
        if segments is None:
            raise UnknownError
        return SourceSight(
            view.topic_id,
            view.head_seq,
            segments[0].first_seq if segments else view.base_seq,
            view.base_seq,
            view.earliest_seq,
            view.evict_floor,
            view.evict_reason,
        )

    def locations(self, name: str, topic_id: int, first_seq: int, last_seq: int) -> SourceLocations:
        """Return the locations of records, deleted ones included: of the first ones, as far as they are in one place.
        Raises UnknownError when the index has changed meanwhile, OSError, ValueError.
        """
        if self.owner(name) == self._shard:
            hosted = self._catalog.find(name)
            if hosted is None or hosted.topic.id != topic_id:
                raise UnknownError
            if first_seq < hosted.ring.base_seq:
                return self._in_segment(
                    name, topic_id, hosted.index.segments, hosted.ring.base_seq, first_seq, last_seq
                )
            entries = hosted.ring.entries(first_seq, last_seq)
            return SourceLocations(entries[2::4].tolist(), entries[3::4].tolist())
        arena = self._arena(self.owner(name))
        found = arena.look_up(name)
        if found is None or found[1].topic_id != topic_id:
            raise UnknownError
        if first_seq < found[1].base_seq:
            segments = arena.segments(*found)
            if segments is None:
                raise UnknownError
            return self._in_segment(name, topic_id, SegmentList(segments), found[1].base_seq, first_seq, last_seq)
        columns = arena.locations(found[1], first_seq, last_seq)
        if columns is None:
            raise UnknownError
        return SourceLocations(columns.offset_len, columns.file_flags)

    def _in_segment(
        self, name: str, topic_id: int, segments: SegmentList, ring_base_seq: int, first_seq: int, last_seq: int
    ) -> SourceLocations:
        info = segments.at(first_seq)
        if info is None:  # between two segments there was nothing left
            next_seq = next((info.first_seq for info in segments if info.first_seq > first_seq), ring_base_seq)
            count = min(last_seq + 1, next_seq) - first_seq
            return SourceLocations([0] * count, [LOCATION_LOST << 32] * count)
        try:
            columns = self._segments.locations(topic_id, info, first_seq, min(last_seq, info.last_seq))
        except FileNotFoundError:
            self._raise_if_moved(name, topic_id, info)
            raise
        return SourceLocations(*columns, segment=info)

    def _raise_if_moved(self, name: str, topic_id: int, info: SegmentInfo) -> None:
        """Raise UnknownError when the topic has other segments by now than it had."""
        if self.owner(name) == self._shard:
            hosted = self._catalog.find(name)
            now = None if hosted is None or hosted.topic.id != topic_id else hosted.index.segments
        else:
            arena = self._arena(self.owner(name))
            found = arena.look_up(name)
            rows = None if found is None or found[1].topic_id != topic_id else arena.segments(*found)
            now = None if rows is None else SegmentList(rows)
        if now is None or now.at(info.first_seq) != info:
            raise UnknownError

    def read(self, name: str, topic_id: int, first_seq: int, locations: SourceLocations) -> Iterator[Original]:
        """Yield the records at `locations`, none of them lost. Raises OSError when one cannot be read, ValueError when
        it is not what its location says, UnknownError when it cannot be read yet or is not there any more.
        """
        if locations.segment is not None:
            try:
                yield from self._segments.read(topic_id, locations.segment, first_seq, locations.offset_len)
            except NotReadYetError:
                raise UnknownError from None
            except FileNotFoundError:
                self._raise_if_moved(name, topic_id, locations.segment)
                raise
            return
        for content, start, at, stop in self._runs(self.owner(name), locations):
            for row in range(at, stop):
                offset = (locations.offset_len[row] & LOW_WORD) - start
                yield read_original(
                    content[offset : offset + (locations.offset_len[row] >> 32)], topic_id, first_seq + row
                )

    def frames(self, name: str, locations: SourceLocations) -> tuple[bytearray, array[int]]:
        """Return the frames at `locations` one behind the other, and the place of each as in the index. None of them is
        lost or in a segment. Raises OSError, and ValueError when a file is too short; nothing else is checked.
        """
        buffer, rows = bytearray(), array("Q")
        for content, start, at, stop in self._runs(self.owner(name), locations):
            places = locations.offset_len[at:stop]
            if len(content) == sum([place >> 32 for place in places]):
                shift = start - len(buffer)
                rows.extend([place - shift for place in places])
                buffer += content
                continue
            for place in places:  # other frames lie between them
                offset = (place & LOW_WORD) - start
                rows.append(len(buffer) | place >> 32 << 32)
                buffer += content[offset : offset + (place >> 32)]
        return buffer, rows

    def _runs(self, shard: int, locations: SourceLocations) -> Iterator[tuple[memoryview, int, int, int]]:
        """Yield (bytes of a log file, their offset in it, first and last + 1 of the locations that are in them)."""
        offset_lens, file_flags, _ = locations
        at, count = 0, len(offset_lens)
        while at < count:
            word = file_flags[at]
            assert not word >> 32 & LOCATION_LOST
            start, end = offset_lens[at] & 0xFFFF_FFFF, (offset_lens[at] & 0xFFFF_FFFF) + (offset_lens[at] >> 32)
            stop = at + 1
            # Neighbours in a file are read with one call.
            while stop < count and _same_file(file_flags[stop], word) and end - start < _RUN_BYTES:
                offset, length = offset_lens[stop] & 0xFFFF_FFFF, offset_lens[stop] >> 32
                if not end <= offset <= end + 4096:
                    break
                end = offset + length
                stop += 1
            content = memoryview(self._pread((shard, word >> 32 & LOCATION_IN_RAM_LOG, word & 0xFFFF_FFFF), start, end))
            yield content, start, at, stop
            at = stop

    def _pread(self, key: tuple[int, int, int], start: int, end: int) -> bytes:
        fd = self._open.get(key)
        if fd is None:
            path = layout.log_path(self._directories[key[0]][key[1]], key[2])
            fd = self._open[key] = self._fs.open(path, os.O_RDONLY)
            if len(self._open) > _FILES_MAX:
                self._fs.close(self._open.popitem(last=False)[1])
        self._open.move_to_end(key)
        content = self._fs.pread(fd, end - start, start)
        if len(content) != end - start:
            raise ValueError(f"log file {key[2]} of shard {key[0]} ends before byte {end}")
        return content

    def _arena(self, shard: int) -> ArenaReader:
        for _ in range(_ATTACH_TRIES):
            generation = self._cells[shard].get("generation")
            if not generation:
                raise UnknownError
            arena = self._arenas[shard]
            if arena is not None and arena.generation == generation:
                return arena
            try:
                newer = ArenaReader(self._identity, shard, generation)
            except FileNotFoundError:
                continue  # replaced once more between the two lines
            if arena is not None:
                arena.close()
            # File numbers go on, but an fd of a file that a salvage replaced must not outlive it.
            for key in [key for key in self._open if key[0] == shard]:
                self._fs.close(self._open.pop(key))
            self._arenas[shard] = newer
        raise UnknownError


def _same_file(word: int, other: int) -> bool:
    return (word ^ other) & (0xFFFF_FFFF | LOCATION_IN_RAM_LOG << 32) == 0
