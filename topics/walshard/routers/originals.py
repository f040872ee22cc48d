"""The records that routers copy, from topics of this shard or another.

A shard reads them as frontends do: from the arena, the log files and the segments of the source's shard. These exist
even while that shard is dead, so nobody is asked. No record goes through a ring, and copying goes on after a crash of
either side where it was.

Records are in segments if a checkpoint came before the copying: writers were faster, or a router had to wait.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeVar

from topics.core.location import FILE_BITS, LOCATION_IN_RAM_LOG, LOCATION_LOST, LOW_WORD
from topics.core.names import owner_shard
from topics.core.segment_list import COLD, SegmentInfo, SegmentList
from topics.settings import Settings
from topics.shm.arena import ArenaReader, TopicView, announced_arena
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.storage import layout
from topics.storage.borrowed import open_cold
from topics.storage.copies import Original, UnstampedCopies, as_copies, each_copy, segment_as_copies
from topics.storage.filesystem import FileSystem, opened
from topics.storage.segment import ENTRY_LEN, entries_of_idx
from topics.walshard.routers.cold_reads import ColdReads, UnknownError

_RUN_BYTES: Final = 1 << 18
_FILES_MAX: Final = 16
LEARNED_AT_ONCE: Final = 256
"""New topics of a shard whose names one step learns, at some 12 µs each."""

KEPT_BYTES: Final = 1 << 21
"""Size up to which a page is kept for the next dest of the same source."""

T = TypeVar("T")


class SourceLocations(NamedTuple):
    """Location columns of consecutive records, as in the arena. With `segment` the offsets are those in its `.data`."""

    offset_len: list[int]
    file_flags: list[int]
    segment: SegmentInfo | None = None

    def part(self, start: int, stop: int) -> SourceLocations:
        """Return the locations numbered start..stop-1, counted from 0."""
        return SourceLocations(self.offset_len[start:stop], self.file_flags[start:stop], self.segment)


class Originals:
    """Reads topics of all shards. It keeps a few log files open. A shard's topics are unknown while many of them are
    new: after a start, or when thousands were made. `learn_some` must be called until it has learned their names.
    """

    def __init__(
        self, fs: FileSystem, settings: Settings, shared: SharedMemory, monotonic_ms: Callable[[], int]
    ) -> None:
        self._fs = fs
        source = open_cold(fs, settings.data_dir, settings.cold_place, settings.cold_read_timeout_ms)
        cold = None if source is None else ColdReads(source, monotonic_ms)
        self._segments = SegmentOriginals(fs, settings.data_dir, cold)
        self._shards = settings.wal_shards
        self._identity = shared.identity
        self._cells = [shared.control.cell(Role.WALSHARD, peer) for peer in range(self._shards)]
        self._arenas: list[ArenaReader | None] = [None] * self._shards
        self.unlearned: dict[int, ArenaReader] = {}
        """Arenas with many new topics, by shard."""
        self._directories = [
            (layout.group_dir(settings.data_dir, peer, self._shards), layout.ram_group_dir(shared.ram_dir, peer))
            for peer in range(self._shards)
        ]
        self._open: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self._last: tuple[tuple[int, int, SourceLocations], UnstampedCopies] | None = None
        """The last page, with its topic id, first seq and locations."""

    def learn_some(self) -> bool:
        """Learn some new topics of a shard in `unlearned`, which must have one. True if that shard's are known now."""
        shard = next(iter(self.unlearned))
        arena = self.unlearned.pop(shard)
        if arena.learn(LEARNED_AT_ONCE) or arena.unlearned <= LEARNED_AT_ONCE:
            return True
        self.unlearned[shard] = arena  # behind the others
        return False

    def look(self, name: str) -> TopicView | None:
        """Return a topic or None; its `base_seq` is the lowest readable seq. Raise UnknownError while its shard has not
        recovered, or the shard's topics are unknown.
        """
        arena = self._arena_of(name)
        found = arena.look_up(name)
        if found is None:
            return None
        slot, view = found
        segments = _require(arena.segments(slot, view))
        return view._replace(base_seq=segments[0].first_seq) if segments else view

    def locations(self, name: str, topic_id: int, first_seq: int, last_seq: int) -> SourceLocations:
        """Return locations from `first_seq` on, deleted records included, up to `last_seq` or the end of one place (a
        segment, or the arena). Raise UnknownError when the index has changed meanwhile, OSError, ValueError.
        """
        arena, slot, view = self._find(name, topic_id)
        if first_seq >= view.base_seq:
            columns = _require(arena.locations(view, first_seq, last_seq))
            return SourceLocations(columns.offset_len, columns.file_flags)
        segments = SegmentList(_require(arena.segments(slot, view)))
        info = segments.at(first_seq)
        if info is None:  # no record was left here when the segments were made
            next_seq = next((info.first_seq for info in segments if info.first_seq > first_seq), view.base_seq)
            count = min(last_seq + 1, next_seq) - first_seq
            return SourceLocations([0] * count, [LOCATION_LOST << 32] * count)
        with self._explained(name, topic_id, info):
            in_segment = self._segments.locations(topic_id, info, first_seq, min(last_seq, info.last_seq))
        return SourceLocations(*in_segment, segment=info)

    def _find(self, name: str, topic_id: int) -> tuple[ArenaReader, int, TopicView]:
        """Return a topic's arena, slot and view. Raise UnknownError when another topic has the name, or none has."""
        arena = self._arena_of(name)
        slot, view = _require(arena.look_up(name))
        if view.topic_id != topic_id:
            raise UnknownError
        return arena, slot, view

    @contextmanager
    def _explained(self, name: str, topic_id: int, info: SegmentInfo) -> Iterator[None]:
        """Turn FileNotFoundError into UnknownError if the topic does not have this segment any more."""
        try:
            yield
        except FileNotFoundError:
            arena, slot, view = self._find(name, topic_id)
            if SegmentList(_require(arena.segments(slot, view))).at(info.first_seq) != info:
                raise UnknownError from None
            raise

    def read(self, name: str, topic_id: int, first_seq: int, locations: SourceLocations) -> Iterator[Original]:
        """Yield the records at `locations`, up to the first that cannot be read. Each is read when it is wanted, or a
        little before. If the very first cannot be read, raise like `copies`.
        """
        at, most = 0, 1
        while at < len(locations.offset_len):
            try:
                frames, rows, _ = self._read_copies(name, topic_id, first_seq + at, locations.part(at, at + most))
            except (OSError, ValueError):
                if most > 1:
                    most = 1
                    continue
                if at:
                    return
                raise
            yield from each_copy(frames, rows)
            at, most = at + most, 2 * most

    def copies(self, name: str, topic_id: int, first_seq: int, locations: SourceLocations) -> UnstampedCopies:
        """Return unstamped copies of the records at `locations`, of which none may be lost. The last page is kept,
        since the dests of a source copy it one after the other. Raise OSError if a record cannot be read, ValueError if
        it is not what its location says, UnknownError if it cannot be read yet or is gone.
        """
        key = topic_id, first_seq, locations
        if self._last is not None and self._last[0] == key:
            frames, rows, location_flags = self._last[1]
        else:
            frames, rows, location_flags = page = self._read_copies(name, *key)
            self._last = (key, page) if len(frames) <= KEPT_BYTES else None
        return UnstampedCopies(frames[:], rows[:], location_flags[:])

    def _read_copies(self, name: str, topic_id: int, first_seq: int, locations: SourceLocations) -> UnstampedCopies:
        if locations.segment is not None:
            with self._explained(name, topic_id, locations.segment):
                return self._segments.copies(topic_id, locations.segment, first_seq, locations.offset_len)
        frames, rows = bytearray(), array("Q")
        for content, start, at, stop in self._runs(owner_shard(name, self._shards), locations):
            places = locations.offset_len[at:stop]
            if len(content) == sum([place >> 32 for place in places]):
                shift = start - len(frames)
                rows.extend([place - shift for place in places])
                frames += content
                continue
            for place in places:  # frames of other topics lie between them
                offset = (place & LOW_WORD) - start
                rows.append(len(frames) | place >> 32 << 32)
                frames += content[offset : offset + (place >> 32)]
        return as_copies(frames, rows, topic_id, first_seq)

    def _runs(self, shard: int, locations: SourceLocations) -> Iterator[tuple[memoryview, int, int, int]]:
        """Yield (bytes of a log file, their offset in it, number of the first location in them, of the one behind)."""
        offset_lens, file_flags, _ = locations
        at, count = 0, len(offset_lens)
        while at < count:
            word = file_flags[at]
            assert not word >> 32 & LOCATION_LOST
            start, end = offset_lens[at] & LOW_WORD, (offset_lens[at] & LOW_WORD) + (offset_lens[at] >> 32)
            stop = at + 1
            # One read covers neighbours in a file.
            while stop < count and not (file_flags[stop] ^ word) & FILE_BITS and end - start < _RUN_BYTES:
                offset, length = offset_lens[stop] & LOW_WORD, offset_lens[stop] >> 32
                if not end <= offset <= end + 4096:
                    break
                end = offset + length
                stop += 1
            content = memoryview(self._pread((shard, word >> 32 & LOCATION_IN_RAM_LOG, word & LOW_WORD), start, end))
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

    def _arena_of(self, name: str) -> ArenaReader:
        shard = owner_shard(name, self._shards)
        cell, arena = self._cells[shard], self._arenas[shard]
        if not (generation := cell.get("generation")):
            raise UnknownError
        if arena is None or arena.generation != generation:
            try:
                newer = announced_arena(self._identity, shard, lambda: cell.get("generation"))
            except RuntimeError:
                raise UnknownError from None
            if arena is not None:
                arena.close()
            # The shard has restarted. File numbers go on, but it may have replaced a damaged file that is open here.
            for key in [key for key in self._open if key[0] == shard]:
                self._fs.close(self._open.pop(key))
            self._last = None  # after a restart a seq may have another record
            self._arenas[shard] = arena = newer
            self.unlearned.pop(shard, None)
        if arena.unlearned > LEARNED_AT_ONCE:
            self.unlearned[shard] = arena
            raise UnknownError
        return arena


def _require(found: T | None) -> T:
    if found is None:
        raise UnknownError
    return found


class SegmentOriginals:
    """Reads segments of topics of any shard. `cold` is None without a cold directory."""

    def __init__(self, fs: FileSystem, data_dir: str, cold: ColdReads | None) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._cold = cold

    def locations(self, topic_id: int, info: SegmentInfo, first_seq: int, last_seq: int) -> tuple[list[int], list[int]]:
        """Return the columns (offset | len_bytes << 32 in `.data`) and (flags << 32) of these records of the segment. A
        record without a frame counts as lost: it was deleted before the segment had it, or a rewrite dropped it.

        Raise FileNotFoundError if the segment does not exist any more, OSError, ValueError.
        """
        path = layout.segment_idx_path(layout.topic_dir(self._data_dir, topic_id), info.first_seq, info.version)
        start = (first_seq - info.first_seq) * ENTRY_LEN
        entries = entries_of_idx(self._pread(path, start, start + (last_seq - first_seq + 1) * ENTRY_LEN), first_seq)
        offset_lens, words = entries[2::4].tolist(), entries[3::4].tolist()
        lost = LOCATION_LOST << 32
        return offset_lens, [
            word if offset_len >> 32 else word | lost for offset_len, word in zip(offset_lens, words, strict=True)
        ]

    def copies(self, topic_id: int, info: SegmentInfo, first_seq: int, offset_lens: list[int]) -> UnstampedCopies:
        """Return unstamped copies of the records at these places, at least one. Raise UnknownError while a cold segment
        is being read, FileNotFoundError, OSError, and ValueError when a record is not what its location says.
        """
        start = offset_lens[0] & LOW_WORD
        end = (offset_lens[-1] & LOW_WORD) + (offset_lens[-1] >> 32)
        name = layout.object_name(*info.key_in(topic_id))
        path = layout.segment_data_path(layout.topic_dir(self._data_dir, topic_id), info.first_seq, info.version)
        if not start < end <= info.data_bytes:
            raise ValueError(f"{path}: records from {first_seq} on are said to lie at {start}..{end}")
        try:
            # The data of a cold segment stay here for a while, too, and need no waiting.
            content = memoryview(self._pread(path, start, end))
        except FileNotFoundError:
            if not info.flags & COLD:
                raise
            if self._cold is None:
                raise ValueError(
                    f"{path} is in the cold tier, and neither TOPICS_COLD_DIR nor TOPICS_COLD_URL is set"
                ) from None
            content = self._cold.get(name, start, end, info.data_bytes)
        try:
            return segment_as_copies(content, [place - start for place in offset_lens], first_seq)
        except ValueError as error:
            if self._cold is not None:
                self._cold.forget(name, start)
            raise ValueError(f"{path}: {error}") from error

    def _pread(self, path: str, start: int, end: int) -> bytes:
        with opened(self._fs, path, os.O_RDONLY) as fd:
            content = self._fs.pread(fd, end - start, start)
        if len(content) != end - start:
            raise ValueError(f"{path} ends before byte {end}")
        return content
