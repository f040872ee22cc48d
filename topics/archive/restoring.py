"""Restoring: a data directory from an archive, as the service was at one of its moments.

The restored directory is a service of its own: it has a new id and new epochs. Every topic has a gap behind its last
record (reason `restored`), because the service may have given out seqs after the moment. The directory is made under
another name and gets its own once it is whole and on the disk.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

import msgspec

from topics.archive.borrowing import NoLoanError, borrow
from topics.archive.directory_copy import DirectoryCopy, fetched_ahead
from topics.archive.inspection import gap
from topics.core.clock import Clock, iso
from topics.core.location import LOCATION_LOST
from topics.core.shard_state import FoldedTopic
from topics.log import get_logger
from topics.storage import layout, service_id
from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    Base,
    FileRef,
    Generation,
    Piece,
    joined,
    new_bytes,
    open_archive,
    split_payload,
)
from topics.storage.borrowed import BorrowedNote, end_loan, read_borrowed
from topics.storage.filesystem import FileSystem, names_in
from topics.storage.frame import HEADER_LEN, FrameType, scan
from topics.storage.lock import DataDirLock, DataDirLocked, DataDirNotWritable
from topics.storage.segment import read_columns
from topics.storage.snapshot import decode_parts

_NO_OTHER: Final = "no older base gives this moment: put it back from a copy"
_NO_BASE: Final = "the archive was begun, but its first base is not complete"

log = get_logger()


class WantedMoment(NamedTuple):
    """The moment to restore: the last one, the last one at or before `ts_ms`, or the first one with a record."""

    ts_ms: int | None = None
    topic: str | None = None
    seq: int = 0


class NotThereError(OSError):
    """The archive has no such moment; the message says what it has."""


class Plan(NamedTuple):
    """A moment, and the way to it: the base and the pieces `base.first_piece`..`moment.number`. `damage` is why a newer
    base cannot be used.
    """

    generation: Generation
    base: Base
    snapshot: bytes
    moment: Piece
    damage: ArchiveDamagedError | None = None

    @property
    def pieces(self) -> range:
        return range(self.base.first_piece, self.moment.number + 1)

    def warn(self) -> None:
        """Say that a newer base cannot be used, if that is so."""
        if self.damage is not None:
            what = "a base cannot be used: an older one is tried, from which the moment is the same"
            log.warning(what, base=self.base.number, reason=str(self.damage))


class Restored(NamedTuple):
    """The result of a restore: the time of the moment, topics, bytes that were fetched, and segments that are borrowed,
    with their bytes.
    """

    taken_ms: int
    topics: int
    size_bytes: int
    borrowed_segments: int
    borrowed_bytes: int


def plan(archive: Archive, wanted: WantedMoment) -> Plan:
    """Find the way to a moment. Raise NotThereError, ArchiveDamagedError, OSError."""
    place, numbers = archive.store.place(""), archive.generations()
    if not numbers:
        raise NotThereError(f"{place}: there is no archive here")
    if wanted.topic is not None:
        return _plan_of_record(archive, numbers, wanted.topic, wanted.seq)
    earliest_ms = 0
    damage: ArchiveDamagedError | None = None
    for number in reversed(numbers):
        bases = archive.bases(number)
        last = archive.last_piece(number, bases[-1]) if bases else 0
        for base_no in reversed(bases):
            if wanted.ts_ms is None:
                return _way(archive, number, bases, range(last, base_no - 1, -1))
            try:
                earliest_ms, damage = _taken_ms(archive, number, base_no), None
            except ArchiveDamagedError as error:
                damage = error
                continue  # an older base may be of that time
            if earliest_ms <= wanted.ts_ms:
                until = _last_at(archive, number, base_no, last, wanted.ts_ms)
                return _way(archive, number, bases, range(until, base_no - 1, -1))
            last = base_no - 1
    if damage is not None:
        raise damage
    if wanted.ts_ms is None or not earliest_ms:
        raise NotThereError(f"{place}: {_NO_BASE}")
    raise NotThereError(f"{place}: {iso(wanted.ts_ms)} is before the first moment, which is of {iso(earliest_ms)}")


def _taken_ms(archive: Archive, generation: int, base_no: int) -> int:
    """Return the time of a base. The piece of its number has the same."""
    try:
        return archive.base(generation, base_no)[0].taken_ms
    except ArchiveDamagedError:
        return archive.piece(generation, base_no)[0].taken_ms


def _way(archive: Archive, number: int, bases: list[int], numbers: Iterable[int]) -> Plan:
    """Return the way to the first of these pieces that is a moment, from the newest whole base that reaches it."""
    generation, moment = archive.generation(number), _moment(archive, number, bases, numbers)
    assert moment is not None
    first: ArchiveDamagedError | None = None
    for base_no in reversed([base_no for base_no in bases if base_no <= moment.number]):
        try:
            base, body = archive.base(number, base_no)
            archive.require_undamaged(number, base)
        except ArchiveDamagedError as error:
            first = first or error
            continue
        found = Plan(generation, base, bytes(body), moment, first)
        if first is not None:
            pieces = fetched_ahead(partial(archive.piece, number), found.pieces)
            try:
                if gap(base, (piece for _, (piece, _) in pieces)):
                    break  # the damaged base was made behind a hole
            except ArchiveDamagedError:
                break  # all older bases need this piece, too
        return found
    raise ArchiveDamagedError(f"{first}; {_NO_OTHER}")


def _last_at(archive: Archive, generation: int, low: int, last: int, ts_ms: int) -> int:
    """Return the last piece of `low`..`last` that was taken at or before `ts_ms`, as piece `low` was. A damaged one is
    passed over before a whole one of that time, and behind a moment of `ts_ms` itself; else raise ArchiveDamagedError.
    """

    def taken_ms(number: int) -> int:
        return archive.piece(generation, number)[0].taken_ms

    with suppress(ArchiveDamagedError):
        return low + bisect_right(range(low + 1, last + 1), ts_ms, key=taken_ms)
    found, is_it, damage = low, _taken_ms(archive, generation, low) == ts_ms, None
    for number in range(low + 1, last + 1):
        try:
            piece, _ = archive.piece(generation, number)
        except ArchiveDamagedError as error:
            damage = error
            continue
        if piece.taken_ms > ts_ms:
            break
        found, is_it, damage = number, piece.taken_ms == ts_ms and piece.is_moment, None
    if damage is not None and not is_it:
        raise damage
    return found


def last_whole_ms(archive: Archive, until_ms: int | None) -> int | None:
    """Return the time of the last moment, or the last one up to `until_ms`, that a restore can get to as far as bases
    and pieces tell: these are read. None without one. Raise OSError, ArchiveDamagedError.
    """
    end_ms = math.inf if until_ms is None else until_ms
    for number in reversed(archive.generations()):
        bases = archive.bases(number)
        last = archive.last_piece(number, max(bases, default=0))
        for base_no in reversed(bases):
            with suppress(ArchiveDamagedError):
                archive.generation(number)
                base, _ = archive.base(number, base_no)
                if base.taken_ms > end_ms or any(ref in archive.damaged for ref in base.files):
                    continue
                for piece in reversed(_whole_pieces(archive, number, base, last, end_ms)):
                    if piece.number == base_no or (piece.is_moment and piece.number > base_no):
                        return piece.taken_ms
    return None


def _whole_pieces(archive: Archive, generation: int, base: Base, last: int, end_ms: float) -> list[Piece]:
    """Return the pieces from a base's first one on, up to `end_ms` and the first that is damaged or does not go on."""
    found: list[Piece] = []
    numbers = range(base.first_piece, last + 1)
    with suppress(ArchiveDamagedError):
        for _, (piece, _) in fetched_ahead(partial(archive.piece, generation), numbers):
            if piece.taken_ms > end_ms:
                break
            found.append(piece)
    lacks = gap(base, found)
    return found[: lacks - base.first_piece] if lacks else found


def _moment(archive: Archive, generation: int, bases: list[int], numbers: Iterable[int]) -> Piece | None:
    """Return the first of these pieces that is a moment, as a base's own always is; None without one."""
    pieces = (archive.piece(generation, number)[0] for number in numbers)
    return next((piece for piece in pieces if piece.is_moment or piece.number in bases), None)


def _plan_of_record(archive: Archive, numbers: list[int], topic: str, seq: int) -> Plan:
    """Find the first moment with a record, in any generation. A directory that went back may have given its seq to
    another record (decision 23); times tell the two apart. A damaged generation is skipped if another one has the
    record. Raise NotThereError, also if there are two such records, and ArchiveDamagedError.
    """
    ways: list[tuple[Plan, int | None]] = []
    damaged: dict[int, ArchiveDamagedError] = {}
    for number in numbers:
        try:
            way = _first_with(archive, number, topic, seq)
        except ArchiveDamagedError as error:
            damaged[number] = error
            continue
        ways += [] if way is None else [way]
    place, known = archive.store.place(""), {ts: found for found, ts in reversed(ways) if ts is not None}
    if len(known) > 1:
        moments = " and ".join(f"--to-ts {iso(found.moment.taken_ms)}" for found in reversed(known.values()))
        why = "its service went back, or the topic was deleted and made again; the first moments with them are"
        raise NotThereError(f"{place}: topic {topic!r} has had {len(known)} records {seq}: {why} {moments}")
    if not ways:
        for damage in damaged.values():
            raise damage
        if not any(map(archive.bases, numbers)):
            raise NotThereError(f"{place}: {_NO_BASE}")
        raise NotThereError(f"{place}: topic {topic!r} has no record {seq}")
    for number, damage in damaged.items():
        what = "a generation cannot be read, and may have had another record of this seq"
        log.warning(what, generation=number, reason=str(damage))
    return next(iter(known.values()), ways[0][0])


def _first_with(archive: Archive, number: int, topic: str, seq: int) -> tuple[Plan, int | None] | None:
    """Return (the way to a generation's first moment with a record, its time or None if it is gone); or None."""
    bases, found = archive.bases(number), None
    skipped: ArchiveDamagedError | None = None
    later: set[int] = set()
    """Ids of the topic in the base behind, before whose moment it did not have the record."""
    last = archive.last_piece(number, bases[-1]) if bases else 0
    for base_no in reversed(bases):
        try:
            base, body = archive.base(number, base_no)
            topics = _topics(bytes(body), topic)
            # A topic that lacks the record in a base lacks it before, unless that was another topic of this name.
            is_same = found is None and not later.isdisjoint(topics)
            at, ts = (last + 1, None) if is_same else _piece_with(archive, number, base, topics, topic, seq, last)
            moment = _moment(archive, number, bases, range(at, last + 1)) if at else None
        except ArchiveDamagedError as error:
            skipped = skipped or error
            continue  # the base before it gives its moments, too
        if not at and skipped is not None:
            break  # the damaged base alone gives the moments behind the hole
        skipped, later, last = None, set(topics), base_no - 1  # all up to `last` was looked at
        if moment is not None:
            found = moment.number, ts
        if found is not None and found[0] > base_no:
            break  # else the service may have had the record before this base
    if skipped is not None:  # an earlier moment may have the record, even if a later one has been found
        raise ArchiveDamagedError(f"{skipped}; {_NO_OTHER}")
    return None if found is None else (_way(archive, number, bases, [found[0]]), found[1])


def _topics(snapshot: bytes, name: str) -> dict[int, FoldedTopic]:
    """Return the topics of this name in a snapshot, by id."""
    parts = decode_parts(snapshot) if snapshot else ()
    return {found.id: found for part in parts for found in part.decoded().topics if found.name == name}


def _piece_with(
    archive: Archive, generation: int, base: Base, topics: dict[int, FoldedTopic], topic: str, seq: int, last: int
) -> tuple[int, int | None]:
    """Return (number of the first piece that has the record, `last` + 1 if none has, 0 if a hole comes before; the
    record's time). If one of the `topics` in the base's snapshot has the record, the number is the base's.
    """
    for known in topics.values():
        if known.head_seq >= seq:
            return base.number, _ts_in_segments(archive, base, known, seq)
    named = set(topics)
    ends = {start.shard: start.position for start in base.logs}
    left: dict[int, bytes] = {}
    for number in range(base.first_piece, last + 1):
        piece, payload = archive.piece(generation, number)
        for part, found_bytes in split_payload(piece, payload):
            end = ends[part.shard]
            behind = joined(end, part)
            if behind is None:
                return 0, None  # only the next base has what comes next
            ends[part.shard] = behind
            before = left.get(part.shard, b"") if behind.file_no == end.file_no else b""
            content = before + bytes(new_bytes(end, part, found_bytes))
            found = scan(content, 0, len(content))
            left[part.shard] = content[found.end :]  # a frame may go on in the next piece
            for frame_at, _, type_, _, topic_id, frame_seq, ts, node_len, tag_len, data_len in found.frames:
                if type_ == FrameType.TOPIC_CREATE:
                    body_at = frame_at + HEADER_LEN + node_len + tag_len
                    if msgspec.msgpack.decode(content[body_at : body_at + data_len])["name"] == topic:
                        named.add(topic_id)
                elif type_ == FrameType.APPEND and frame_seq >= seq and topic_id in named:
                    return max(number, base.number), ts if frame_seq == seq else None
    return last + 1, None


def _ts_in_segments(archive: Archive, base: Base, topic: FoldedTopic, seq: int) -> int | None:
    """Return the time of a record that a base has in a segment; None if the record is gone, or was lost."""
    for info in topic.segments:
        path = layout.segment_idx_path(layout.topic_dir("", topic.id), info.first_seq, info.version)
        refs = [ref for ref in base.files if ref.path == path]
        if refs and info.first_seq <= seq <= info.last_seq:
            entry = read_columns(archive.file(refs[0]), seq - info.first_seq, 1)
            return None if entry.flags[0] & LOCATION_LOST else entry.ts[0]
    return None


@contextmanager
def reserved(data_dir: str) -> Iterator[None]:
    """Keep other restores from making this directory inside the block. Raise OSError if it cannot be made."""
    data_dir = os.path.realpath(data_dir)
    making = f"{data_dir}.restoring"
    _check_free(data_dir)
    try:
        lock = DataDirLock.acquire(making)
    except DataDirLocked as other:
        raise OSError(errno.EBUSY, f"is made by another restore, process {other.pid}", data_dir) from other
    except DataDirNotWritable as error:
        _remove_if_bare(making)
        raise OSError(error.errno, error.reason, making) from error
    try:
        _check_free(data_dir)  # another restore may have ended just now
        yield
    finally:
        _remove_if_bare(making)
        lock.release()


def _remove_if_bare(making: str) -> None:
    """Remove the directory of a restore if it has nothing but its lock."""
    if os.path.isdir(making) and os.listdir(making) == [layout.LOCK_NAME]:
        shutil.rmtree(making, ignore_errors=True)


def _check_free(data_dir: str) -> None:
    if os.path.ismount(data_dir):
        raise OSError(errno.EBUSY, "has a file system of its own: name a directory in it", data_dir)
    if os.path.exists(data_dir) and os.listdir(data_dir):
        raise FileExistsError(errno.EEXIST, "is not empty: name a directory that does not exist", data_dir)


class Restore:
    """One restore. Owns the directory that it makes, `<data dir>.restoring`, until that gets its name."""

    def __init__(
        self,
        archive: Archive,
        plan: Plan,
        fs: FileSystem,
        data_dir: str,
        told: Callable[[int, int], None],
        lender: str | None = None,
    ) -> None:
        """`told` hears how many objects of how many were fetched. `lender` is the place of the archive if data may
        stay there; None: everything is fetched.
        """
        self._archive = archive
        self._plan = plan
        self._fs = fs
        self._data_dir = os.path.realpath(data_dir)
        self._making = f"{self._data_dir}.restoring"
        self._copy = DirectoryCopy(fs, self._making, plan.generation.shards, archive.store.place(""))
        self._told = told
        self._lender = lender
        self._borrowed: dict[str, FileRef] = {}
        """Data that stay in the archive, by their paths."""
        self._objects = self._bytes = 0

    def run(self, clock: Clock) -> Restored:
        """Make the directory. Raise ArchiveDamagedError, OSError (FileExistsError if there is something in it)."""
        with reserved(self._data_dir):
            return self._run(clock)

    def _run(self, clock: Clock) -> Restored:
        left = self._give_up()  # left by a restore that was killed, or lost the archive
        if left is not None:
            what = "the loan of a restore before cannot be ended, and holds back every pruning: delete it"
            log.warning(what, loan=open_archive(self._fs, left.place).place(left.loan))
        shutil.rmtree(layout.meta_dir(self._making), ignore_errors=True)
        try:
            topics = self._make(clock.now_ms())
            if os.path.isdir(self._data_dir):
                os.rmdir(self._data_dir)
            self._fs.rename(self._making, self._data_dir)
        except BaseException:
            self._give_up()
            raise
        self._fs.fsync_dir(os.path.dirname(self._data_dir))
        borrowed_bytes = sum(ref.size_bytes for ref in self._borrowed.values())
        return Restored(self._plan.moment.taken_ms, topics, self._bytes, len(self._borrowed), borrowed_bytes)

    def _give_up(self) -> BorrowedNote | None:
        """Remove all that was made but the lock, and end the loan. If the loan cannot be ended now, return its note.
        The note stays then, and the next try ends it.
        """
        note, kept = None, {layout.LOCK_NAME}
        try:
            note = read_borrowed(self._fs, self._making)
            if note is not None:
                end_loan(self._fs, self._making, note, open_archive(self._fs, note.place))
                note = None
        except OSError:
            kept.add(layout.META_NAME)
        for name in {*names_in(self._fs, self._making)} - kept:
            shutil.rmtree(os.path.join(self._making, name), ignore_errors=True)
        return note

    def _make(self, now_ms: int) -> int:
        if self._lender is not None:
            self._borrow(self._lender)
        self._fetch_segments()
        self._fetch_pieces()
        if self._plan.snapshot:
            self._copy.save_snapshot(self._plan.snapshot, self._borrowed)
        topics = self._copy.end_history(self._plan.moment.has_end, now_ms)
        service_id.make_restored(self._fs, self._making, self._plan.generation.epoch_masks, now_ms)
        self._fs.sync_all(self._making)
        return topics

    def _borrow(self, place: str) -> None:
        """Have the archive keep the files of sealed segments, and note which data stay there."""
        base, generation = self._plan.base, self._plan.generation.number
        who = f"{os.uname().nodename}:{self._data_dir}"
        try:
            self._borrowed = borrow(self._archive, generation, base, self._fs, self._making, place, who)
        except NoLoanError as error:
            way_out = "nothing keeps the archive from being pruned then: restore with --copy"
            raise OSError(error.errno, f"{error.strerror}; {way_out}", error.filename) from error

    def _fetch_segments(self) -> None:
        wanted = (ref for ref in self._plan.base.files if ref.path not in self._borrowed)
        for ref, content in fetched_ahead(self._archive.file, wanted):
            self._copy.write(ref.path, content)
            self._fetched(len(content))

    def _fetch_pieces(self) -> None:
        """Write the logs from the pieces, and the files of transactions."""
        plan, wanted = self._plan, {(file.piece, file.path): file for file in self._plan.moment.txn}
        ends = [start.position for start in plan.base.logs]
        for start in plan.base.logs:
            self._copy.begin_log(start)
        for number, (piece, payload) in fetched_ahead(
            lambda no: self._archive.piece(plan.generation.number, no), plan.pieces
        ):
            self._copy.lay_out(piece, payload, ends)
            for file in piece.txn:
                if (number, file.path) in wanted:
                    self._copy.write(file.path, payload[file.offset : file.offset + file.size_bytes])
            self._fetched(len(payload))
        for start in plan.base.logs:
            self._copy.forget_segments(start.shard, start.position, ends[start.shard])

    def _fetched(self, size_bytes: int) -> None:
        self._objects += 1
        self._bytes += size_bytes
        total = len(self._plan.base.files) - len(self._borrowed) + len(self._plan.pieces)
        self._told(self._objects, total)
