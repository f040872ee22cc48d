"""A replica: a data directory that is kept as another service's archive says, moment by moment.

The logs are those of the leader, byte for byte. Data of sealed segments come later than the rest of the first base
(`borrowing.py`). With each base of the archive the directory gets the base's segments and snapshot, and the logs before
it go: a follower cuts nothing itself. The shards of the follower read all of that, and write none of it.

A replica may be ahead of the archive, with bytes that the leader itself has told. If the leader's machine fails and
loses them, the archive goes on with others, and may never get as far as the replica is. So each piece is compared with
what was told.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from topics.archive.borrowing import Homecoming
from topics.archive.directory_copy import DirectoryCopy, MissingBytesError, fetched_ahead
from topics.archive.ownership import followed_generation
from topics.archive.restoring import WantedMoment, plan
from topics.core.clock import Clock
from topics.storage import layout, service_id
from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    Base,
    FileRef,
    LogEnd,
    LogStart,
    Piece,
    joined,
    split_payload,
)
from topics.storage.filesystem import FileSystem, names_in, read_all
from topics.storage.follow_note import FollowNote, write_note
from topics.storage.frame import scan
from topics.storage.logfile import WalPosition
from topics.storage.upgrade import write_mark
from topics.terminal import plural

_COPIED: Final = (layout.WAL_NAME, layout.TOPICS_NAME, layout.TXN_NAME)


class BeginAnewError(Exception):
    """The directory cannot go on from where it is: the archive has another history or a hole. The message says it."""


class OtherShardsError(Exception):
    """The leader has another number of shards; the message says what to set."""


class Replica:
    """Keeps one directory. Owns its logs, snapshots, segments, files of transactions, and its note.

    Methods raise OSError, ArchiveDamagedError (repeat them later), BeginAnewError, OtherShardsError.
    """

    def __init__(self, archive: Archive, fs: FileSystem, data_dir: str, shards: int, clock: Clock) -> None:
        self.archive = archive
        self._fs = fs
        self._data_dir = data_dir
        self._shards = shards
        self._clock = clock
        self._copy = DirectoryCopy(fs, data_dir, shards, archive.store.place(""))
        self.homecoming = Homecoming(archive, fs, data_dir, self._copy, clock)
        self.note = FollowNote("")
        self.laid_ends: list[LogEnd] = []
        """Ends of the bytes that are laid out, by shard, perhaps behind the moment. The leader goes on from there."""
        self._moment: list[LogEnd] = []
        """The ends of the last moment. The note may have an earlier one."""
        self._told: set[int] = set()
        """The shards whose last bytes the leader has told, and the archive does not have yet."""
        self._txn: dict[str, int] = {}
        """Digests of the files of transactions, by path."""
        self.laid_piece = 0
        """The last piece that is laid out."""
        self.has_hole = False
        """True if the next piece of the archive does not go on here. The next base is behind this hole.
        The leader may tell what is missing.
        """
        self._damaged_looks = 0
        """Looks in a row that met damage in the next piece, or in one whose files it needs. One may be by chance."""
        self.is_over = False
        """True if the generation is closed, and all of it is here."""
        self._seen = self._seen_behind = 0
        """The last pieces that were seen in the archive, of this generation and of the next one."""
        self.has_grown = False
        """True if the last step saw more pieces there than the one before: a sign of the leader's life."""
        self._files: dict[str, str] = {}
        """Names of the base's objects, by their paths in the directory."""
        self._starts: list[LogStart] = []
        """Places in the logs where the base's snapshot ends."""
        self.looked_ms = 0
        """Wall time of which the state is, at least; 0 if that is not known."""
        self._looks_ms = 0, 0
        """Wall times of two looks that took all there was: of the last one, and of the last one without the moment that
        is here. 0 for none.
        """

    def begin(self, note: FollowNote) -> bool:
        """Go on where the directory's note says. If it has no piece, copy the newest base and return True."""
        self.note = note
        self.has_hole = self.is_over = False
        self._seen = self._seen_behind = 0
        if note.piece:
            if not note.archived:
                raise BeginAnewError("its note is one of an earlier build: it lacks the ends that the archive has")
            self.laid_ends, self.laid_piece = list(note.ends), note.piece
            self._moment, self._told = note.ends, set(note.told)
            self._txn = {path: self._digest(path) for path in self._txn_paths()}
            self._files, self._starts = {}, []
            self.homecoming.go_on()
            return False
        self._copy_base()
        return True

    @property
    def is_damaged(self) -> bool:
        """True if the next piece, or one whose files it needs, is damaged, and not by chance."""
        return self._damaged_looks > 1

    @property
    def ends(self) -> list[WalPosition]:
        """The ends of the logs at the last moment, by shard."""
        return [end.position for end in self._moment]

    @property
    def archived_ends(self) -> list[WalPosition]:
        """The ends of the logs at the last moment of the archive that is here, by shard."""
        return [end.position for end in self.note.archived]

    # -- moments

    def step(self) -> None:
        """Lay out the new pieces of the archive."""
        looked_ms, generation = self._clock.now_ms(), self.note.generation
        last = self.archive.last_piece(generation, self.laid_piece)
        self.has_grown, self._seen = last > self._seen, last
        wanted, moments = range(self.laid_piece + 1, last + 1), 0
        try:
            for _, (piece, payload) in fetched_ahead(lambda number: self.archive.piece(generation, number), wanted):
                if piece.taken_over_by:
                    self.is_over = True
                    break
                self._lay_out(piece, payload)
                moments += piece.is_moment
            else:
                self._has_looked(looked_ms, moments)
        except MissingBytesError:
            self.has_hole = True
        except ArchiveDamagedError:
            self._damaged_looks += 1
            raise
        self._damaged_looks = 0
        if wanted:
            self.end_at_base()
        behind = self.archive.last_piece(generation + 1, self._seen_behind) if self.is_over else 0
        self.has_grown |= behind > self._seen_behind
        self._seen_behind = behind

    def _has_looked(self, now_ms: int, moments: int) -> None:
        """Note of when the state is after a look that took all there was, with so many moments. A leader that gives
        signs of life begins a moment after it has put the one before. A look that did not find that one was earlier.
        Without signs nobody can tell a leader that has nothing to ship from one that cannot: then the look counts.
        """
        if not self.note.leader_url:
            self.looked_ms = now_ms
        last_ms, absent_ms = (min(look_ms, now_ms) for look_ms in self._looks_ms)  # the clock may have been put back
        if moments and self.note.leader_url:
            self.looked_ms = max(self.looked_ms, absent_ms if moments == 1 else last_ms)
        self._looks_ms = now_ms, last_ms if moments else absent_ms

    def take_tail(self, piece: Piece, payload: memoryview, asked_ms: int) -> bool:
        """Lay out what the leader itself has told. False, without an effect, if a file of a transaction has changed:
        only the archive brings these files.
        """
        if {file.path: file.digest for file in piece.txn} != self._txn:
            return False
        before = list(self.laid_ends)
        self._copy_parts(piece, payload)
        self._told |= {end.shard for end in self.laid_ends if end != before[end.shard]}
        if piece.is_moment:
            self._go_to(list(self.laid_ends))
            self.note = msgspec.structs.replace(self.note, taken_ms=piece.taken_ms)
            self.looked_ms = asked_ms
        return True

    def newest_piece(self) -> Piece | None:
        """Return the last piece of the archive, None if it is laid out already. Another thread may call this."""
        generation, known = self.note.generation, self.laid_piece
        last = self.archive.last_piece(generation, known)
        return None if last == known else self.archive.piece(generation, last)[0]

    def skip_to(self, piece: Piece) -> bool:
        """Go on behind a piece without laying it out. False if the leader has not told all of it, or other bytes."""
        ahead = (end for end in piece.ends if end.position > self._moment[end.shard].position or not self._has_end(end))
        if not piece.is_moment or any(ahead):
            return False
        if piece.number > self.laid_piece:
            self._note_archived(piece)
            self._note_moment(piece)
            self.laid_piece, self.has_hole = piece.number, False
        return True

    def _has_end(self, end: LogEnd) -> bool:
        start = WalPosition(end.position.file_no, end.position.offset - len(end.last_bytes))
        return self._copy.read_log(end.shard, start, len(end.last_bytes)) == end.last_bytes

    def _lay_out(self, piece: Piece, payload: memoryview) -> None:
        if self._told:
            self._prove(piece, payload)
        self._copy_parts(piece, payload)
        self._note_archived(piece)
        # Moments before the base's are none here: the files of transactions that they need may be pruned.
        if piece.number == self.note.base or (piece.is_moment and piece.number > self.note.base):
            self._end_moment(piece, payload)
        self.laid_piece, self.has_hole = piece.number, False  # last: until then it can be laid out again

    def _end_moment(self, piece: Piece, payload: memoryview) -> None:
        """Bring the directory to a moment, all bytes of which are laid out."""
        if not self._is_behind(piece):
            self._go_to(piece.ends)
            self._take_txn(piece, payload)
        self._note_moment(piece)

    def _copy_parts(self, piece: Piece, payload: memoryview) -> None:
        positions = [end.position for end in self.laid_ends]
        self._copy.lay_out(piece, payload, positions)
        for end in piece.ends:
            if self.laid_ends[end.shard].position < end.position:
                self.laid_ends[end.shard] = end

    def _note_archived(self, piece: Piece) -> None:
        """Note which logs the archive has up to where the leader told them. Raise BeginAnewError for other bytes."""
        for end in piece.ends:
            if self.laid_ends[end.shard].position == end.position:
                if end.shard in self._told and self.laid_ends[end.shard].last_bytes != end.last_bytes:
                    raise self._diverged(end.shard)
                self.laid_ends[end.shard] = end
                self._told.discard(end.shard)

    def _prove(self, piece: Piece, payload: memoryview) -> None:
        """Compare a piece with what the leader has told, even if the archive has not got to its end: it may have other
        bytes, and never get there. Raise BeginAnewError if they differ.
        """
        for part, content in split_payload(piece, payload):
            shard, at = part.shard, WalPosition(part.file_no, part.offset)
            own, moment = self.laid_ends[shard].position, self.note.archived[shard].position
            if shard not in self._told or joined(own, part) is None:
                continue  # behind a hole nothing can be compared
            start = WalPosition(at.file_no, moment.offset if moment.file_no == at.file_no else 0)  # a frame begins here
            seen = self._copy.read_log(shard, start, at.offset - start.offset) + bytes(content)
            is_there = at.file_no == own.file_no and start.offset + len(seen) >= own.offset
            whole = own.offset - start.offset if is_there else scan(seen, 0, len(seen)).end
            if at >= own or not self._copy.has_frames(shard, start, seen[:whole]):
                raise self._diverged(shard)
            if is_there:
                self._told.discard(shard)

    def _diverged(self, shard: int) -> BeginAnewError:
        return BeginAnewError(
            f"the leader told bytes of log {shard} that the archive does not have: its machine failed, and lost them"
        )

    def _is_behind(self, piece: Piece) -> bool:
        """True for a moment before the one that is here, or before the start of the base's logs."""
        is_later = any(end.position > piece.ends[end.shard].position for end in self._moment)
        is_mixed = any(end.position < piece.ends[end.shard].position for end in self._moment)
        if is_later and is_mixed and self._told:
            raise BeginAnewError(f"what the leader told is no moment before or after that of piece {piece.number}")
        return is_later

    def _go_to(self, ends: list[LogEnd]) -> None:
        """Let the logs end at a moment that is laid out."""
        for former, end in zip(self._moment, ends, strict=True):
            if former.position != end.position:
                self._copy.forget_segments(end.shard, former.position, end.position)
        self._moment = ends

    def _take_txn(self, piece: Piece, payload: memoryview) -> None:
        """Bring the files of transactions to a moment."""
        for file in piece.txn:
            if self._txn.get(file.path) != file.digest:
                has = payload
                if file.piece != piece.number:
                    _, has = self.archive.piece(self.note.generation, file.piece)
                self._copy.replace(file.path, has[file.offset : file.offset + file.size_bytes])
        self._txn = {file.path: file.digest for file in piece.txn}
        for path in list(self._txn_paths()):
            if path not in self._txn:
                self._fs.unlink(os.path.join(self._data_dir, path))

    def _note_moment(self, piece: Piece) -> None:
        """Note the moment that is here; the archive has all up to `piece`."""
        self.sync()
        note = msgspec.structs.replace(
            self.note,
            piece=piece.number,
            archived=piece.ends,
            taken_ms=max(piece.taken_ms, self.note.taken_ms),
            has_end=piece.has_end,
            leader_url=piece.leader_url,
        )
        if piece.number >= note.base:
            write_note(self._fs, self._data_dir, note)
        self.note = note

    def sync(self) -> None:
        """Sync the logs of the moment that is here, and put it into the note that is written next."""
        for former, end in zip(self.note.ends, self._moment, strict=True):
            if former.position != end.position:
                self._copy.sync_log(end.shard, former.position, end.position)
        self.note = msgspec.structs.replace(self.note, ends=self._moment, told=sorted(self._told))

    def keep_note(self, **changes: str | int) -> None:
        """Write the note with these changes. They count only once they are written, so a failed step is repeated."""
        note = msgspec.structs.replace(self.note, **changes)
        write_note(self._fs, self._data_dir, note)
        self.note = note

    def require_archive(self) -> None:
        """Raise OSError if the leader's archive is gone as a whole: then what is missing there was not pruned."""
        if not self.archive.generations():
            reason = "has no archive now, and this service follows it: mount its disk or restore it"
            raise FileNotFoundError(errno.ENOENT, reason, self.archive.store.place(""))

    def _digest(self, path: str) -> int:
        return xxh3_64_intdigest(read_all(self._fs, os.path.join(self._data_dir, path)))

    def _txn_paths(self) -> Iterator[str]:
        for directory in (layout.stages_dir(self._data_dir), layout.sinks_dir(self._data_dir)):
            for name in names_in(self._fs, directory):
                yield os.path.relpath(os.path.join(directory, name), self._data_dir)

    # -- bases

    def _copy_base(self) -> None:
        """Copy the newest base that is whole, and all moments behind it, in place of what an earlier try has copied."""
        self._newest_generation()  # raises if there is none
        self.archive.look_again()
        found = plan(self.archive, WantedMoment())
        found.warn()
        generation, base, snapshot = found.generation, found.base, found.snapshot
        if generation.shards != self._shards:
            raise OtherShardsError(
                f"the service that is followed has {plural(generation.shards, 'shard')}, this one {self._shards}: set"
                f" TOPICS_WAL_SHARDS={generation.shards}"
            )
        for name in _COPIED:  # left by an earlier try
            shutil.rmtree(os.path.join(self._data_dir, name), ignore_errors=True)
        for old in layout.list_snapshots(self._fs, self._data_dir):
            self._fs.unlink(layout.snapshot_path(self._data_dir, old))
        self.homecoming.begin(generation.number, base, self.note.url)
        borrowed = self.homecoming.missing
        for start in base.logs:
            self._copy.begin_log(start)
        copied = (ref for ref in base.files if ref.path not in borrowed)
        for ref, content in fetched_ahead(self.archive.file, copied):
            self._copy.write(ref.path, content)
        if snapshot:
            self._copy.save_snapshot(snapshot, borrowed)
        service_id.set_epoch_masks(self._fs, self._data_dir, generation.epoch_masks, self._clock.now_ms())
        write_mark(self._fs, self._data_dir)
        self._fs.sync_all(self._data_dir)
        ids = generation.log_ids
        ends = [LogEnd(start.shard, ids[start.shard], start.position) for start in base.logs]
        self.laid_ends, self._moment, self._told, self._txn = list(ends), ends, set(), {}
        self.laid_piece = base.first_piece - 1
        fence_id = self.note.fence_id if self.note.generation <= generation.number else ""
        places = generation.number, base.number, self.laid_piece
        self.note = FollowNote(self.note.url, *places, ends, ends, fence_id=fence_id)
        self._note_base(base)
        try:
            self.step()
        except (OSError, ArchiveDamagedError):
            if self.note.piece < base.number:
                raise  # else the rest comes once the service has started with what is here
        if self.note.piece < base.number:
            raise ArchiveDamagedError(f"{self.archive.store.place('')}: base {base.number} has no moment")

    def _newest_generation(self) -> int:
        """Return the newest generation that can be followed."""
        if number := followed_generation(self.archive):
            return number
        raise OSError(
            f"{self.archive.store.place('')}: has no base yet; the service that is to be followed needs"
            f" TOPICS_ARCHIVE_URL={self.note.url}"
        )

    def look_for_base(self) -> bool:
        """Take over the newest base of the archive, if it is a new one. True if the shards have to load it."""
        newest = self._newest_generation()
        if newest != self.note.generation:
            raise self.anew(f"the archive goes on with generation {newest}, this is {self.note.generation}")
        number = self.archive.bases(newest)[-1]
        if number > self.note.piece:
            is_damaged = self.is_damaged and number > self.laid_piece
            if self.has_hole or is_damaged or self.archive.last_piece(newest, self.laid_piece) < number:
                raise self.anew(f"pieces between {self.laid_piece} and base {number} are missing or damaged")
            if number != self.laid_piece:
                return False
            self._end_moment(*self.archive.piece(newest, number))  # its base makes it a moment
        if number <= self.note.base:
            return False
        if not self._files:  # this process has just begun
            with suppress(ArchiveDamagedError):  # the former base is pruned: everything is fetched again
                self._files = _names(self.archive.base(newest, self.note.base)[0])
        base, snapshot = self.archive.base(newest, number)
        self._update_files(base)
        if snapshot:
            self._copy.save_snapshot(bytes(snapshot), self.homecoming.missing)
        self.homecoming.keep_only(_names(base))  # last: the former snapshot needs the others
        self.keep_note(base=number)
        self._note_base(base)
        return True

    def end_at_base(self) -> None:
        """Go to the last moment that is laid out, if it is one only by its base, which may come after its piece."""
        generation = self.note.generation
        for number in range(self.laid_piece, max(self.note.piece, self.note.base - 1), -1):
            if self.archive.has_base(generation, number):  # a list may be old
                self._end_moment(*self.archive.piece(generation, number))
                break

    def anew(self, reason: str) -> BeginAnewError:
        """Return the error to raise. Raise ArchiveDamagedError if the archive's last moment cannot be copied: what is
        here is better than nothing.
        """
        self.archive.look_again()
        while True:
            found = plan(self.archive, WantedMoment())
            number, base = found.generation.number, found.base
            paths = {ref.path for ref in base.files}
            # All older bases need these pieces, too. They come first: files are much more.
            pieces = range(base.first_piece, base.number + 1)
            deque(fetched_ahead(partial(self.archive.piece, number), pieces), 0)
            # Data of sealed segments, which have tags, come later, if anything can be borrowed.
            copied = (ref for ref in base.files if ref.path.removesuffix(".data") + ".tags" not in paths)
            with suppress(ArchiveDamagedError):  # the next plan takes another base, or raises
                deque(fetched_ahead(self.archive.file, copied), 0)
                return BeginAnewError(reason)

    def _note_base(self, base: Base) -> None:
        self._files = _names(base)
        self._starts = base.logs

    def _update_files(self, base: Base) -> None:
        """Fetch segments that are new or have grown, and deletions of the others, without data that come later."""
        missing = self.homecoming.missing
        fetched: list[FileRef] = []
        for _, group in groupby(base.files, lambda ref: os.path.splitext(ref.path)[0]):
            refs = [ref for ref in group if ref.path not in missing]
            changed = [ref for ref in refs if self._files.get(ref.path) != ref.name]
            if len(changed) == 1 and changed[0].path.endswith(".idx"):
                self._mark(changed[0])
            elif changed:
                fetched += refs
        for ref, content in fetched_ahead(self.archive.file, fetched):
            self._copy.replace(ref.path, content)

    def _mark(self, ref: FileRef) -> None:
        """Take over the deletions that a newer index of a segment has."""
        idx = self._copy.merged(ref.path, self.archive.file(ref))
        data_path = ref.path.removesuffix(".idx") + ".data"
        if data_path not in self.homecoming.missing:
            self._copy.mark_deleted(data_path, idx)
        self._copy.replace(ref.path, idx)

    def remove_leftovers(self) -> None:
        """Remove the files of former bases. All shards have loaded the present one."""
        if not self._starts:
            return
        self._copy.remove_logs_before(self._starts)
        for topic_id in layout.discover_topics(self._fs, self._data_dir):
            directory = layout.topic_dir(self._data_dir, topic_id)
            for name in names_in(self._fs, directory):
                path = os.path.join(directory, name)
                if os.path.relpath(path, self._data_dir) not in self._files:
                    self._fs.unlink(path)
        self._starts = []


def _names(base: Base) -> dict[str, str]:
    return {ref.path: ref.name for ref in base.files}


def begin_anew(fs: FileSystem, data_dir: str, url: str, former: FollowNote | None = None) -> FollowNote:
    """Have the next start copy everything again, and go on with a promotion that was under way; return the note that
    says so.
    """
    note = FollowNote(url)
    if former is not None and former.fence_id:
        note = FollowNote(url, former.generation, fence_id=former.fence_id)
    write_note(fs, data_dir, note)
    return note
