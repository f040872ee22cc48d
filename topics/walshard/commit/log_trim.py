"""Removal of log files that are not needed any more.

Files of the durable log are superfluous once snapshots have what is in them: the compactor asks for their removal. No
location may name such a file any more. This is checked in steps, so that a hundred thousand topics hold up nobody.
Files that are still needed stay.

The RAM log has no snapshot: a shard that crashed reads it from its first file on. So before its oldest files are
removed, what only they have is written again at its end, in one group:

    APPEND       records that keep a mostly dead file alive, verbatim; their locations follow
    RAM_STATE    for every `ephemeral` topic that ever had records there: its floors, its clock, its unexpired keys
    SESSION      every watch session
    ROUTER_CURSOR  of every `ephemeral` dest of routers

After a kill before that group is whole, the next incarnation finds all files and perhaps some repeats, which change
nothing. After a later one it finds files that nobody needs, which the next trimming removes.

A trimming costs what it repeats and a look at every location in RAM. So it waits for bytes written since the last one:
at least a file, at least as much as was repeated, and at least a share of the live bytes.

A full /dev/shm takes no more bytes, so there is nothing to wait for. There every file goes, from the oldest, as soon as
enough records were deleted or evicted (`RamTrim.relieve`). The live records of a file are repeated in room that new
records must not take (`WalWriter.require_room`), and which a shard that was killed needs for its next index.
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
from topics.log import get_logger
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

log = get_logger()

LIVE_SHARE: Final = 16
"""The log is trimmed again after 1/LIVE_SHARE of the live bytes was written."""
DEAD_FILES_MAX: Final = 4
"""Live records are moved out of the oldest files once the log is so many files longer than twice the live bytes."""
TOPICS_PER_STEP: Final = 2048
RELIEF_BYTES_MIN: Final = 64 * 1024
"""The least dead bytes for which a full /dev/shm is relieved; 1/LIVE_SHARE of the live ones, if that is more."""
_CHUNK_ENTRIES: Final = 1 << 16
_FEW_ENTRIES: Final = 1 << 10


class _Moved(NamedTuple):
    """Entries of neighbours in a ring, of which `rows` are written again; the place of the group is to be added."""

    hosted: Hosted
    first_seq: int
    entries: array[int]
    rows: list[int]


@dataclass(eq=False)
class RamTrim:
    """Trims one shard's RAM log. Used between groups: nothing is prepared, everything committed is applied.

    `room_bytes` returns the room that new records may take. `others` return the frames to repeat of what is no topic:
    watch sessions and routers.
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
    """Bytes that were dead when the last relief began: it may pass over what died later."""
    _dead_bytes_kept: int | None = None
    """The same of the last relief that was completed, frame headers of live records among them; None before one."""

    def __post_init__(self) -> None:
        self._next_after_bytes = self._file_bytes

    @property
    def due(self) -> bool:
        """Return whether a trimming is worth its cost."""
        return self._files_to_relieve > 0 or self._written_bytes >= self._next_after_bytes

    def relieve(self) -> None:
        """If /dev/shm is nearly full and enough of the log is dead, have its files moved one by one (`due`)."""
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
        """Shorten the log to what is needed of it. Where that fails, the next sweep tries to relieve again."""
        try:
            draft = Draft(ram=[self._repeat_live(now_ms)])
        except OSError as error:
            log.error("the RAM log cannot be trimmed", error=str(error))
        else:
            yield draft
            if draft.committed:
                self._drop_files()
                return
        self._files_to_relieve = 0

    def _repeat_live(self, now_ms: int) -> LogWrite:
        """Return the write that repeats what is needed. Raise OSError when records cannot be read back."""
        self._next_after_bytes = self._written_bytes + 1  # if this fails, after the next write
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
        except OSError as error:
            log.warning("files of the RAM log cannot be removed", error=str(error))
        self._written_before = wal.bytes_written
        self._repeated_total += self._repeated_bytes
        self._next_after_bytes = max(self._file_bytes, self._repeated_bytes, self._live_bytes() // LIVE_SHARE)
        if self._files_to_relieve:
            self._files_to_relieve -= 1
            if not self._files_to_relieve:
                self._dead_bytes_kept = self._dead_bytes_begun

    @property
    def _dead_bytes(self) -> int:
        """Bytes that were written for clients and are not live; negative where a former life wrote some of those."""
        written = 0 if self._logs.ram is None else self._logs.ram.bytes_written
        return written - self._repeated_total - self._live_bytes()

    @property
    def _written_bytes(self) -> int:
        return self._logs.ram.bytes_written - self._written_before if self._logs.ram is not None else 0

    def _topics(self) -> list[Hosted]:
        """Return topics that ever had records there; those durable by now only have locations of deleted ones."""
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
        """Add the frames of live records in the oldest files, if there are too many files."""
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
    """Removes files of one shard's durable log, but none that `archive` waits for. `poll` between groups."""

    def __init__(self, logs: Logs, catalog: Catalog, tags: FrameTags, archive: ArchiveWait | None) -> None:
        self._logs = logs
        self._archive = archive
        self._catalog = catalog
        self._tags = tags
        self._file_no = 0
        self._unchecked: Iterator[Hosted] | None = None

    def request(self, file_no: int) -> None:
        """Have files numbered below removed in the next steps."""
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
        """Take the next step."""
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
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        """Stop until the next request."""
        log.error("log files cannot be removed", below=self._file_no, reason=reason)
        self._unchecked = None
        self._file_no = 0


def _first_below(hosted: Hosted, file_no: int) -> int | None:
    """Return the first seq whose record is in a durable log file before that one, None without any: files ascend."""
    ring = hosted.ring
    elsewhere = LOCATION_IN_RAM_LOG | LOCATION_DELETED | LOCATION_LOST
    for first_seq in range(ring.base_seq, ring.next_seq, _FEW_ENTRIES):
        entries = ring.entries(first_seq, min(ring.next_seq - 1, first_seq + _FEW_ENTRIES - 1))
        for at, word in enumerate(entries[3::4]):
            if not word >> 32 & elsewhere:
                return first_seq + at if word & LOW_WORD < file_no else None
    return None
