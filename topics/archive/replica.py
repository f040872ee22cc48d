"""A replica: a data directory that is kept as another service's archive says, moment by moment.

The logs are those of the leader, byte for byte. With each base of the archive the directory gets the base's segments
and snapshot, and the logs before it go: a follower cuts nothing itself. The shards of the follower read all of that,
and write none of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from itertools import groupby
from typing import Final

import msgspec

from topics.archive.directory_copy import DirectoryCopy, MissingBytesError
from topics.archive.objects import Archive, ArchiveDamagedError, Base, FileRef, Piece, read_whole
from topics.archive.restoring import NotThereError, fetched_ahead, fetched_files
from topics.archive.taking_over import take_over
from topics.core.clock import Clock
from topics.storage import layout, service_id
from topics.storage.filesystem import FileSystem, make_dirs, names_in
from topics.storage.follow_note import FollowNote, write_note
from topics.storage.logfile import WalPosition
from topics.storage.upgrade import write_mark

_COPIED: Final = (layout.WAL_NAME, layout.TOPICS_NAME, layout.TXN_NAME)


class BeginAnewError(Exception):
    """The directory cannot go on from where it is: the archive has another history, or a hole; the message says it."""


class OtherShardsError(Exception):
    """The leader has another number of shards; the message says what to set."""


class Replica:
    """Keeps one directory. Owns its logs, snapshots, segments, files of transactions, and its note.

    Methods raise OSError, ArchiveDamagedError, NotThereError (repeat later; `begin` again), BeginAnewError,
    OtherShardsError.
    """

    def __init__(self, archive: Archive, fs: FileSystem, data_dir: str, shards: int, clock: Clock) -> None:
        self._archive = archive
        self._fs = fs
        self._data_dir = data_dir
        self._shards = shards
        self._clock = clock
        self._copy = DirectoryCopy(fs, data_dir, shards, archive.store.place(""))
        self.note = FollowNote("")
        self._ends: dict[int, WalPosition] = {}
        """The ends of what is laid out, which may be behind the last moment."""
        self._laid_piece = 0
        self._has_hole = False
        self._files: dict[str, str] = {}
        """Names of the base's objects, by their paths in the directory."""
        self._starts: dict[int, WalPosition] = {}
        """Places in the logs where the base's snapshot ends, by shard."""
        self.looked_ms = 0
        """Wall time of the last look that left nothing of the archive behind, 0 for none."""
        self.taken_over_by = ""
        """The machine that took over from the leader."""

    def begin(self, note: FollowNote) -> bool:
        """Go on where the directory is, or copy the newest base and the first moment behind it: then True."""
        self.note = note
        self._has_hole, self.taken_over_by = False, ""
        if note.piece:
            self._ends, self._laid_piece = dict(enumerate(note.ends)), note.piece
            self._files, self._starts = {}, {}
            return False
        self._copy_base()
        return True

    @property
    def ends(self) -> list[WalPosition]:
        """The ends of the logs at the last moment, by shard."""
        return self.note.ends

    # -- moments

    def step(self) -> bool:
        """Take the pieces that are new in the archive, up to the last moment. True if there was one."""
        looked_ms, generation, before = self._clock.now_ms(), self.note.generation, self._laid_piece
        last = self._archive.last_piece(generation, self._laid_piece)
        wanted = range(self._laid_piece + 1, last + 1)
        for _, (piece, payload) in fetched_ahead(lambda number: self._archive.piece(generation, number), wanted):
            if piece.taken_over_by:
                self.taken_over_by = piece.taken_over_by
                break
            try:
                self._lay_out(piece, payload)
            except MissingBytesError:
                self._has_hole = True  # the next base is behind it
                break
        else:
            self.looked_ms = looked_ms
        return self._laid_piece > before

    def _lay_out(self, piece: Piece, payload: memoryview) -> None:
        self._copy.lay_out(piece, payload, self._ends)
        for file in piece.txn:
            if file.piece == piece.number:
                self._copy.replace(file.path, bytes(payload[file.offset : file.offset + file.size_bytes]))
        self._laid_piece = piece.number
        if piece.is_moment:
            self._take(piece)

    def _take(self, piece: Piece) -> None:
        """Make the directory that of a moment, all bytes of which are laid out."""
        for end in piece.ends:
            if self._ends[end.shard] != end.position:
                raise MissingBytesError(
                    f"{self._archive.store.place('')}: piece {piece.number} ends log {end.shard} at {end.position}, the"
                    f" pieces have it up to {self._ends[end.shard]}"
                )
            start = self.note.ends[end.shard]
            if start != end.position:
                self._copy.forget_segments(end.shard, start, end.position)
                self._copy.sync_log(end.shard, start, end.position)
        wanted = {file.path for file in piece.txn}
        for path in self._txn_paths():
            if path not in wanted:
                self._fs.unlink(os.path.join(self._data_dir, path))
        is_whole = piece.number >= self.note.base
        self.note = msgspec.structs.replace(
            self.note,
            piece=piece.number,
            ends=[self._ends[shard] for shard in sorted(self._ends)],
            taken_ms=piece.taken_ms,
            has_end=piece.has_end,
            leader_url=piece.leader_url,
        )
        if is_whole:
            write_note(self._fs, self._data_dir, self.note)

    def _txn_paths(self) -> Iterator[str]:
        for directory in (layout.stages_dir(self._data_dir), layout.sinks_dir(self._data_dir)):
            for name in names_in(self._fs, directory):
                yield os.path.relpath(os.path.join(directory, name), self._data_dir)

    # -- bases

    def _copy_base(self) -> None:
        """Copy the newest base into an empty directory, and the moment that it is named by."""
        for name in _COPIED:  # of a try before
            shutil.rmtree(os.path.join(self._data_dir, name), ignore_errors=True)
        for number in layout.list_snapshots(self._fs, self._data_dir):
            self._fs.unlink(layout.snapshot_path(self._data_dir, number))
        generation = self._archive.generation(self._newest_generation())
        if generation.shards != self._shards:
            raise OtherShardsError(
                f"the service that is followed has {generation.shards} shards, this one {self._shards}: set"
                f" TOPICS_WAL_SHARDS={generation.shards}"
            )
        number = self._archive.bases(generation.number)[-1]
        base, snapshot = self._archive.base(generation.number, number)
        for start in base.logs:
            make_dirs(self._fs, self._copy.log_directory(start.shard))
            self._copy.begin_log(start)
        for ref, content in fetched_files(self._archive, base.files):
            self._copy.write(ref.path, content)
        if snapshot:
            self._copy.save_snapshot(bytes(snapshot))
        service_id.set_epoch_mask(self._fs, self._data_dir, generation.epoch_mask, self._clock.now_ms())
        write_mark(self._fs, self._data_dir)
        self._fs.sync_all(self._data_dir)
        self._ends = {start.shard: start.position for start in base.logs}
        ends = [self._ends[shard] for shard in sorted(self._ends)]
        self._laid_piece = base.first_piece - 1
        self.note = FollowNote(self.note.url, generation.number, base.number, self._laid_piece, ends)
        self._note_base(base)
        self.step()
        if self.note.piece < base.number:
            raise ArchiveDamagedError(f"{self._archive.store.place('')}: base {base.number} has no moment")

    def _newest_generation(self) -> int:
        """Return the newest generation that can be followed."""
        for number in reversed(self._archive.generations()):
            if self._archive.bases(number):
                return number
        raise NotThereError(
            f"{self._archive.store.place('')}: has no base yet; the service that is to be followed needs"
            f" TOPICS_ARCHIVE_URL={self.note.url}"
        )

    def look_for_base(self) -> bool:
        """Take over the newest base of the archive, if it is a new one. True if the shards have to load it."""
        newest = self._newest_generation()
        if newest != self.note.generation:
            raise BeginAnewError(f"the archive goes on with generation {newest}, this is {self.note.generation}")
        number = self._archive.bases(newest)[-1]
        if number > self.note.piece:
            is_gone = self._archive.last_piece(newest, self._laid_piece) < number
            if self._has_hole or is_gone:
                raise BeginAnewError(f"pieces between {self._laid_piece} and base {number} are not in the archive")
            return False
        if number <= self.note.base:
            return False
        base, snapshot = self._archive.base(newest, number)
        self._update_files(base)
        if snapshot:
            self._copy.save_snapshot(bytes(snapshot))
        self.note = msgspec.structs.replace(self.note, base=number)
        write_note(self._fs, self._data_dir, self.note)
        self._note_base(base)
        return True

    def _note_base(self, base: Base) -> None:
        self._files = {ref.path: ref.name for ref in base.files}
        self._starts = {start.shard: start.position for start in base.logs}

    def _update_files(self, base: Base) -> None:
        """Fetch segments that are new, or have grown, and deletions of the others."""
        fetched: list[FileRef] = []
        for _, group in groupby(base.files, lambda ref: os.path.splitext(ref.path)[0]):
            refs = list(group)
            changed = [ref for ref in refs if self._files.get(ref.path) != ref.name]
            if len(changed) == 1 and changed[0].path.endswith(".idx"):
                self._mark(changed[0])
            elif changed:
                fetched += refs
        for ref, content in fetched_files(self._archive, fetched):
            self._copy.replace(ref.path, content)

    def _mark(self, ref: FileRef) -> None:
        """Mark deletions in a segment whose data are here."""
        idx = read_whole(self._archive.store, ref.name)
        self._archive.check_file(ref, idx)
        self._copy.mark_deleted(ref.path.removesuffix(".idx") + ".data", idx)
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
        self._starts = {}

    # -- promotion

    def promote(self, by: str) -> None:
        """Take over from the leader: close its generation, take all that it has shipped, and note that this service
        leads from now on. `by` tells people who it is. Raise BeginAnewError if another service has taken over already.
        """
        if not self.note.fence_id:
            self.note = msgspec.structs.replace(self.note, fence_id=secrets.token_hex(8))
            write_note(self._fs, self._data_dir, self.note)
        if not take_over(self._archive, self.note.generation, self._clock, by, self.note.fence_id):
            raise BeginAnewError("another service has taken over already")
        while not self.taken_over_by:
            self.step()
            if self._has_hole:
                raise BeginAnewError("the archive has a hole before its end: the newest base is behind it")
        self.note = msgspec.structs.replace(self.note, promoted_id=self.note.fence_id)
        write_note(self._fs, self._data_dir, self.note)


def begin_anew(fs: FileSystem, data_dir: str, url: str) -> FollowNote:
    """Have the next start copy everything again; return the note that says so."""
    note = FollowNote(url)
    write_note(fs, data_dir, note)
    return note
