"""Removal of log files that are not needed any more.

The durable log: once a snapshot has all that is in a file, the compactor asks for its removal. The shard first checks,
a few topics at a time, that no location names the file any more. If one does, the files stay.

The RAM log has no snapshot: a shard that crashed reads it from its first file on. So before the shard removes the
oldest files, it writes what only they have again at the end of the log, in one group:

    APPEND         records that keep a mostly dead file alive, verbatim; the shard then moves their locations
    RAM_STATE      of every `ephemeral` topic: its floors, its clock, its unexpired keys
    SESSION        of every watch session
    ROUTER_CURSOR  of every `ephemeral` dest of routers

If the shard is killed before that group is whole, its next incarnation finds all files and perhaps some repeats, which
change nothing. If it is killed later, the next incarnation finds superfluous files, which the next trimming removes.

A trimming costs the bytes that it repeats and a look at every location in RAM. So it waits until enough was written
since the last one: at least a file, at least as much as was repeated, and at least a share of the live bytes.

A full /dev/shm takes no more bytes, so waiting for them would be for ever. Instead the shard empties and removes every
file, from the oldest, as soon as enough records were deleted or evicted (`RamTrim.relieve`). It repeats the live
records in room that new records may not take (`WalWriter.require_room`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from topics.core.control_bodies import RamStateFrameBody, encode_body
from topics.core.job import ConsumerState
from topics.core.location import ENTRY_WORDS, LOCATION_DELETED, LOCATION_IN_RAM_LOG, LOCATION_LOST, LOW_WORD
from topics.storage import layout
from topics.storage.filesystem import FileSystem, read_all
from topics.storage.frame import Bytes, FrameType
from topics.storage.topic_frames import check_header, control_frame
from topics.walshard.commit.archive_wait import ArchiveWait
from topics.walshard.commit.draft import Draft, LogWrite, Steps
from topics.walshard.commit.logs import Logs
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.tag_search import FrameTags

LIVE_SHARE: Final = 16
"""The log is trimmed again after 1/LIVE_SHARE of the live bytes was written."""
DEAD_FILES_MAX: Final = 4
"""Files by which the log may exceed twice the live bytes before live records are moved out of the oldest files."""
TOPICS_PER_STEP: Final = 2048
RELIEF_BYTES_MIN: Final = 64 * 1024
"""Dead bytes from which on a full /dev/shm is relieved; 1/LIVE_SHARE of the live bytes if that is more."""
_NOT_TRIMMED: Final = "the RAM log cannot be trimmed"
_RAM_NOT_REMOVED: Final = "files of the RAM log cannot be removed"
_NOT_REMOVED: Final = "log files cannot be removed"
_CHUNK_ENTRIES: Final = 1 << 16
_FEW_ENTRIES: Final = 1 << 10


class _Moved(NamedTuple):
    """Neighbouring entries of a ring. Those in `rows` are written again; their offsets count from the group's start."""

    hosted: Hosted
    first_seq: int
    entries: array[int]
    rows: list[int]


@dataclass(eq=False)
class RamTrim:
    """Trims one shard's RAM log. It is used between groups: nothing is prepared, everything committed is applied.

    `room_bytes` returns the room that new records may take. `others` return the frames of watch sessions and of routers
    that have to be repeated.
    """

    _fs: FileSystem
    _directory: str
    _room_bytes: Callable[[], int]
    _file_bytes: int
    _logs: Logs
    _catalog: Catalog
    _tags: FrameTags
    _others: Sequence[Callable[[int], list[bytes]]]
    _written_before: int = 0
    _repeated_in_file: int = 0
    _repeated_bytes: int = 0
    _repeated_total: int = 0
    _files_to_relieve: int = 0
    _dead_bytes_begun: int = 0
    """`_dead_bytes` when the last relief began. That relief may have passed over records that died later."""
    _dead_bytes_kept: int | None = None
    """`_dead_bytes_begun` of the last completed relief, headers of live records included; None before the first."""

    def __post_init__(self) -> None:
        self._next_after_bytes = self._file_bytes

    @property
    def due(self) -> bool:
        """Return whether a trimming is worth its cost."""
        return self._files_to_relieve > 0 or self._written_bytes >= self._next_after_bytes

    def relieve(self) -> None:
        """If /dev/shm is nearly full and enough of the log is dead, make a trimming `due` for each of its files."""
        wal = self._logs.ram
        if wal is None or self._files_to_relieve:
            return
        if self._room_bytes() >= self._file_bytes:
            return
        live_bytes = self._live_bytes()
        kept = self._dead_bytes_kept
        if kept is None or self._dead_bytes - kept >= max(RELIEF_BYTES_MIN, live_bytes // LIVE_SHARE):
            self._files_to_relieve = len(layout.list_log_files(self._fs, self._directory))
            self._dead_bytes_begun = self._dead_bytes
            wal.end_file()

    def trim(self, now_ms: int) -> Steps[None]:
        """Repeat what is needed of the oldest files, then remove them. A failure is logged, and ends a relief."""
        try:
            draft = Draft(ram=[self._repeat_live(now_ms)])
        except OSError as error:
            self._logs.lasting.failed(_NOT_TRIMMED, error)  # each write makes a trimming due
        else:
            self._logs.lasting.over(_NOT_TRIMMED)
            yield draft
            if draft.committed:
                self._drop_files()
                return
        self._files_to_relieve = 0

    def _repeat_live(self, now_ms: int) -> LogWrite:
        """Return the write that repeats what is needed. Raise OSError when records cannot be read back."""
        self._next_after_bytes = self._written_bytes + 1  # if this trimming fails, the next write makes one due
        buffers: list[Bytes] = []
        moved = self._move_records(buffers)
        for hosted in self._topics():
            topic = hosted.topic
            if topic.config.durability != "ephemeral":
                continue
            state = RamStateFrameBody(
                topic.earliest_seq,
                topic.evict_floor,
                topic.evict_reason,
                topic.evict_run_seq,
                topic.last_write_ts,
                topic.idempotency.unexpired(now_ms, topic.config.idempotency_window_ms),
                ConsumerState(None if topic.queue is None else topic.queue.attributes()),
            )
            buffers.append(control_frame(FrameType.RAM_STATE, topic.id, now_ms, encode_body(state)))
        for frames_of in self._others:
            buffers += frames_of(now_ms)
        self._repeated_bytes = sum(map(len, buffers))

        def place(file_no: int, offset: int) -> None:
            self._repeated_in_file = file_no
            for hosted, first_seq, entries, rows in moved:
                for row in rows:
                    entries[row * ENTRY_WORDS + 2] += offset
                    entries[row * ENTRY_WORDS + 3] += file_no
                hosted.ring.replace_entries(first_seq, entries)
                hosted.publish()

        return LogWrite(buffers, place=place)

    def _drop_files(self) -> None:
        """Remove files that no location names. A failure is logged; the next trimming tries again."""
        wal = self._logs.ram
        assert wal is not None
        file_no = min([self._repeated_in_file, *self._files_in_use()])
        self._tags.forget_below(file_no, in_ram=True)
        try:
            wal.drop_files_below(file_no)
            self._logs.lasting.over(_RAM_NOT_REMOVED)
        except OSError as error:
            self._logs.lasting.failed(_RAM_NOT_REMOVED, error)
        self._written_before = wal.bytes_written
        self._repeated_total += self._repeated_bytes
        self._next_after_bytes = max(self._file_bytes, self._repeated_bytes, self._live_bytes() // LIVE_SHARE)
        if self._files_to_relieve:
            self._files_to_relieve -= 1
            if not self._files_to_relieve:
                self._dead_bytes_kept = self._dead_bytes_begun

    @property
    def _dead_bytes(self) -> int:
        """Bytes that this life wrote for clients, less the live bytes. Negative if a former life wrote live records."""
        written = 0 if self._logs.ram is None else self._logs.ram.bytes_written
        return written - self._repeated_total - self._live_bytes()

    @property
    def _written_bytes(self) -> int:
        return self._logs.ram.bytes_written - self._written_before if self._logs.ram is not None else 0

    def _topics(self) -> list[Hosted]:
        """Return topics that may have locations in the RAM log; durable ones have only those of deleted records."""
        topics = ((hosted, hosted.topic) for hosted in self._catalog)
        return [hosted for hosted, topic in topics if topic.config.durability == "ephemeral" or topic.had_ram_records]

    def _live_bytes(self) -> int:
        """Return the live bytes of topics that are `ephemeral` now."""
        topics = [hosted.topic for hosted in self._topics()]
        return sum(topic.live_bytes for topic in topics if topic.config.durability == "ephemeral")

    def _files_in_use(self) -> set[int]:
        """Return the files that locations name."""
        words: set[int] = set()
        for _, _, entries in self._entries(_CHUNK_ENTRIES):
            words.update(entries[3::4])
        return {word & LOW_WORD for word in words if word >> 32 & LOCATION_IN_RAM_LOG}

    # -- moving records

    def _move_records(self, buffers: list[Bytes]) -> list[_Moved]:
        """Add the frames of all records that locations name in the oldest files to `buffers`, if there are too many
        files or a relief is under way. Return their entries, changed for the new places.
        """
        numbers = layout.list_log_files(self._fs, self._directory)
        surplus = len(numbers) - 2 * self._live_bytes() // self._file_bytes - DEAD_FILES_MAX
        affordable = max(1, self._written_bytes // self._file_bytes)
        count = 1 if self._files_to_relieve else min(surplus, affordable)
        victims = numbers[: max(0, min(count, len(numbers) - 1))]
        if not victims:
            return []
        contents = {
            number: memoryview(read_all(self._fs, layout.log_path(self._directory, number))) for number in victims
        }
        moved: list[_Moved] = []
        length = 0
        for hosted, first_seq, entries in self._entries(_FEW_ENTRIES):
            words = {word for word in set(entries[3::4]) if word >> 32 & LOCATION_IN_RAM_LOG}
            words = {word for word in words if word & LOW_WORD in contents}
            if not words:
                continue
            offset_lens, file_words = entries[2::4], entries[3::4]
            rows = [row for row, word in enumerate(file_words) if word in words]
            for row in rows:
                word = file_words[row]
                content = contents[word & LOW_WORD]
                offset, record_len = offset_lens[row] & LOW_WORD, offset_lens[row] >> 32
                check_header(content, offset, hosted.topic, first_seq + row, word & LOW_WORD, offset)
                buffers.append(content[offset : offset + record_len])
                offset_lens[row] = record_len << 32 | length
                file_words[row] = word & ~LOW_WORD
                length += record_len
            entries[2::4], entries[3::4] = offset_lens, file_words
            moved.append(_Moved(hosted, first_seq, entries, rows))
        return moved

    def _entries(self, count_max: int) -> Iterator[tuple[Hosted, int, array[int]]]:
        """Yield all locations that may be in RAM, in runs of neighbours: topic, first seq, entries."""
        for hosted in self._topics():
            ring = hosted.ring
            last_seq = ring.next_seq - 1
            for first_seq in range(ring.base_seq, last_seq + 1, count_max):
                yield hosted, first_seq, hosted.ring.entries(first_seq, min(last_seq, first_seq + count_max - 1))


class LogTrim:
    """Removes files of one shard's durable log, but none that `archive` still needs. `poll` runs between groups."""

    def __init__(self, logs: Logs, catalog: Catalog, tags: FrameTags, archive: ArchiveWait | None) -> None:
        self._logs = logs
        self._archive = archive
        self._catalog = catalog
        self._tags = tags
        self._file_no = 0
        self._unchecked: Iterator[Hosted] | None = None

    def request(self, file_no: int) -> None:
        """Have the files numbered below `file_no` removed by the next calls of `poll`."""
        if self._archive is not None:
            file_no = self._archive.removable_below(file_no, self._logs.wal.file_no)
        if file_no > self._file_no:
            self._file_no = file_no
            self._unchecked = iter(list(self._catalog))

    @property
    def busy(self) -> bool:
        """Return whether `poll` has something to do."""
        return self._unchecked is not None

    def poll(self) -> None:
        """Check TOPICS_PER_STEP more topics; remove the files once all are checked."""
        if self._unchecked is None:
            return
        looked = 0
        for hosted in islice(self._unchecked, TOPICS_PER_STEP):
            looked += 1
            if self._catalog.find_id(hosted.topic.id) is not hosted:
                continue  # deleted meanwhile
            seq = _first_below(hosted, self._file_no)
            if seq is not None:
                self._give_up(f"record {seq} of topic {hosted.topic.name!r} is in one of them")
                return
        if looked < TOPICS_PER_STEP:
            self._unchecked = None
            self._drop()

    def _drop(self) -> None:
        self._tags.forget_below(self._file_no, in_ram=False)
        try:
            self._logs.wal.drop_files_below(self._file_no)
            self._logs.lasting.over(_NOT_REMOVED)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        """Stop until the next request."""
        self._logs.lasting.failed(_NOT_REMOVED, f"below {self._file_no}: {reason}")
        self._unchecked = None
        self._file_no = 0


def _first_below(hosted: Hosted, file_no: int) -> int | None:
    """Return the first seq whose record is in a durable log file below `file_no`, or None. Files ascend with seqs."""
    ring = hosted.ring
    elsewhere = LOCATION_IN_RAM_LOG | LOCATION_DELETED | LOCATION_LOST
    for first_seq in range(ring.base_seq, ring.next_seq, _FEW_ENTRIES):
        entries = ring.entries(first_seq, min(ring.next_seq - 1, first_seq + _FEW_ENTRIES - 1))
        for at, word in enumerate(entries[3::4]):
            if not word >> 32 & elsewhere:
                return first_seq + at if word & LOW_WORD < file_no else None
    return None
