"""The shipper: it brings an archive up to date with a data directory.

One shipper at a time ships for a service. It keeps nothing of its own: the last piece and the last base say how far it
is, so it may be killed at any time and another one goes on.

A moment is shipped as one or more pieces with the bytes of all logs since the moment before. A base makes the pieces
before it superfluous for later moments. Its files are read before the moment by which it is named. So the base's
indexes have no deletion that the moment's logs lack. Deletions that the indexes lack are in the logs behind the
snapshot. Pieces may be shipped while the files are copied (`base_files.py`).
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from topics.archive.base_files import BaseFiles
from topics.archive.inspection import prove
from topics.archive.ownership import (
    OtherShipperError,
    TakenOverError,
    close_former,
    newest_generation,
    require_own,
    require_there,
)
from topics.core.clock import Clock
from topics.log import get_logger
from topics.storage.archive_objects import (
    Archive,
    ArchiveDamagedError,
    Base,
    FileRef,
    Generation,
    LogEnd,
    LogStart,
    Piece,
    PieceDraft,
    TxnFile,
    base_name,
    encode,
    generation_name,
    piece_name,
    read_whole,
)
from topics.storage.filesystem import said
from topics.storage.logfile import WalPosition
from topics.storage.origin import LogPlace, Origin, OriginGoneError, TxnState
from topics.storage.service_id import NO_MASKS, ArchiveNote, EpochMasks, keep_archive_note
from topics.storage.snapshot import load_snapshot

PIECE_BYTES: Final = 4 << 20
"""The most bytes of logs in a piece. Files of transactions come on top."""
BASE_TRIES: Final = 20
PIECE_ENDS_MAX: Final = 4096
"""Pieces whose ends a shipper remembers. It reads older pieces again."""

_BASE_DAMAGED: Final = "the newest base cannot be read, so another one is made at once"
_PIECE_DAMAGED: Final = "a piece that the newest moments need is damaged: a base is made once a snapshot is behind it"

log = get_logger()


class NoMomentError(Exception):
    """No moment can be taken now: a shard recovers, or transactions follow each other too fast. Try again later."""


class OldSnapshotError(OriginGoneError):
    """Only a base of a later snapshot is of use."""


class Shipped(NamedTuple):
    """The end of the archive: its last piece, the bytes and objects that were put, and the time of the last moment."""

    piece: int
    size_bytes: int
    objects: int
    taken_ms: int


class Shipper:
    """Ships one directory. Owns the end of the archive's newest generation.

    Methods raise OSError (the archive or the directory cannot be used now: repeat), RefusedLog, OtherShipperError,
    ArchiveDamagedError, NoMomentError. After any error, `begin` again.
    """

    def __init__(
        self,
        archive: Archive,
        origin: Origin,
        service_id: str,
        clock: Clock,
        told: Callable[[int, int], None] = lambda _done, _total: None,
        epoch_masks: EpochMasks = NO_MASKS,
        leader_url: str = "",
        notes_place: bool = False,
    ) -> None:
        """`told` hears how many bytes of how many were looked at for a base. `epoch_masks` are those of the directory.
        `leader_url` is where followers reach the service. `notes_place`: note that the service has its archive here, so
        that it begins no new one here if everything is gone one day.
        """
        self._archive = archive
        self._store = archive.store
        self._origin = origin
        self._service_id = service_id
        self._clock = clock
        self._told = told
        self._epoch_masks = epoch_masks
        self._leader_url = leader_url
        self._notes_place = notes_place
        self._nonce = secrets.token_hex(8)
        self._generation: Generation | None = None
        self.is_own = False
        """True once `begin` has found that this service may ship here."""
        self.last_base: Base | None = None
        """The newest base; without one nothing can be restored."""
        self._damaged: Base | None = None
        """The newest base that was found to be damaged, or to need a damaged piece."""
        self._whole_behind: list[WalPosition] = []
        """A base whose snapshot ends here or behind needs no piece that was found to be damaged; none without one."""
        self._files: dict[str, FileRef] = {}
        """Files of the newest base, by their paths."""
        self._number = 0
        self._ends: list[LogEnd] = []
        """The ends of the logs as they were shipped, by shard; none before the first piece."""
        self._piece_ends: dict[int, list[LogEnd]] = {}
        """The ends of the logs in pieces that this shipper put, by number, as far as the last base needs them."""
        self._txn: dict[str, TxnFile] = {}
        self._taken_ms = 0
        self._has_part = True
        """True if the archive does not end with a moment: with a part of one, or a piece behind a hole, or no piece."""
        self._bytes = self._objects = 0

    def begin(self) -> None:
        """Find the end of the archive, and go on there. Begin a new generation if the last one is closed, the directory
        went back, or its logs are others now.
        """
        try:
            self._begin()
        except TakenOverError as error:
            self._note_place(error.leader_url)
            raise
        self._note_place()

    def _begin(self) -> None:
        numbers = self._archive.generations()  # once: a generation that begins later makes what follows fail
        require_there(self._archive, numbers, self._origin.fs, self._origin.data_dir)
        newest = newest_generation(self._archive, numbers, self._service_id)
        is_open = False
        if newest is not None:
            last = self._load(newest)
            require_own(self._archive, newest, last, self._service_id)
            if last is None:
                close_former(self._archive, newest.number - 1, self._clock, self._service_id)
            is_open = last is None or not last.taken_over_by
        self.is_own = True
        logs, _ = self._moment(None)  # after the look at the archive, so that it is not older
        if not is_open or not self._goes_on(logs):
            number = max(numbers, default=0) + 1
            self._new_generation(number, logs, _former_ids(newest, self._service_id))
            close_former(self._archive, number - 1, self._clock, self._service_id)

    def _note_place(self, leader_url: str = "") -> None:
        if self._notes_place:
            note = ArchiveNote(self._store.place(""), leader_url)
            try:
                keep_archive_note(self._origin.fs, self._origin.data_dir, note)
            except OSError as error:  # shipping does not need the note
                log.warning("where the archive is cannot be noted, which the next start repeats", reason=said(error))

    @property
    def is_based(self) -> bool:
        """True if a restore can get from the last base to the end of the archive. Else a base has to come first."""
        return self.last_base is not None and not self._has_part

    @property
    def lacks_base(self) -> bool:
        """True if a base is to be made at once."""
        return not self.is_based or self.last_base is self._damaged

    def look_at_base(self) -> None:
        """Find out whether the newest base, and all pieces that the moments from then on need, can still be read.
        Another thread may call this. Raise OSError.
        """
        base, generation, what = self.last_base, self._generation, _BASE_DAMAGED
        if base is None or generation is None:
            return
        try:
            self._archive.base(generation.number, base.number)
            what = _PIECE_DAMAGED
            prove(self._archive, generation.number, base, self._number)
        except ArchiveDamagedError as damage:
            self._archive.has_generation(generation.number)  # raises OSError if the store is away
            if what == _PIECE_DAMAGED:
                self._whole_behind = self._ends_of_damage(generation.number, base.first_piece)
            self._damaged = base
            if base is self.last_base:  # else a newer one may have let this one be pruned
                log.error(what, reason=str(damage))

    @property
    def ends(self) -> list[WalPosition]:
        """The ends of the logs as they were shipped, by shard."""
        return [end.position for end in self._ends]

    def require_end(self) -> None:
        """Raise OtherShipperError if there is a piece behind the last one: somebody may have taken over."""
        if self._generation is not None and self._archive.has_piece(self._generation.number, self._number + 1):
            name = piece_name(self._generation.number, self._number + 1)
            raise OtherShipperError(f"{self._store.place(name)}: somebody else made this object")

    def ship(self, is_sign: bool = False) -> Shipped:
        """Ship the present moment, or only its bytes if it would not be `is_based`. With `is_sign` (of life) ship a
        piece even if nothing is new.

        Raise OriginGoneError if logs were removed before they were shipped, or none was shipped: then `begin_base`.
        """
        logs, txn = self._moment(self._txn if self.is_based else None)
        if not self._ends:
            raise OriginGoneError("nothing is shipped yet")
        try:
            return self._ship(logs, txn if self.is_based else None, self._ends, is_sign)
        except OriginGoneError:
            self._has_part = True  # there is a hole before what comes next
            raise

    def base(self) -> Shipped:
        """Ship a snapshot with its segments, and the moment by which this base is named."""
        for _ in range(BASE_TRIES):
            try:
                files = self.begin_base()
                files.copy()
                return self.end_base(files)
            except OriginGoneError as gone:
                last = gone  # a newer snapshot has other files
        raise OSError(
            errno.EIO,
            f"segments are removed faster than they are copied ({last}); try again when fewer records are written",
        )

    def begin_base(self) -> BaseFiles:
        """Return the files that the newest snapshot needs. The caller copies them, perhaps in another thread, and
        passes them to `end_base`. If the log's unshipped bytes are gone, it goes on at the snapshot.

        Raise OriginGoneError if logs behind the snapshot were removed: begin again. Raise OldSnapshotError if the base
        would need a piece that is damaged.
        """
        assert self._generation is not None
        snapshot = load_snapshot(self._origin.fs, self._origin.data_dir)
        logs, _ = self._moment(None)
        starts = [self._origin.start(log, snapshot) for log in logs]
        if any(start.position < end for start, end in zip(starts, self._whole_behind, strict=False)):
            raise OldSnapshotError("a base of the newest snapshot would need a damaged piece")
        self._go_on(logs, starts)
        return BaseFiles(self._store, self._origin, self._generation.number, snapshot, starts, self._files, self._told)

    def end_base(self, files: BaseFiles) -> Shipped:
        """Ship the present moment, and a base that it names. All `files` are copied already."""
        assert self._generation is not None
        self._bytes += files.put_bytes
        self._objects += files.put_objects
        had_txn, self._txn = bool(self._txn), {}  # so that no restore from this base needs pieces before it
        logs, txn = self._moment(self._txn)
        self._go_on(logs, files.starts)
        needs_base = self._has_part
        # The last piece may list files, or have the number of a base that is damaged, or has what is deleted since.
        last = self.last_base if self.last_base is not None and self.last_base.number == self._number else None
        differs = last is not None and (last.logs, self._files) != (files.starts, files.refs)
        is_sign = had_txn or self.lacks_base or differs
        self._ship(logs, txn, self._ends, is_sign=is_sign, needs_base=needs_base)
        if last is not None and last.number == self._number:
            return self._shipped()  # nothing has happened since
        if not self._archive.has_piece(self._generation.number, self._number):
            # This shipper stood still while another service took over, and pruned what this one had put.
            name = piece_name(self._generation.number, self._number)
            raise ArchiveDamagedError(f"{self._store.place(name)}: is missing")
        first_piece = min(self._piece_of(start) for start in files.starts)
        refs = list(files.refs.values())
        base = Base(self._number, self._taken_ms, first_piece, files.starts, refs, len(files.body))
        self._create(base_name(self._generation.number, base.number), encode(base, [files.body]))
        if needs_base and self._archive.last_piece(self._generation.number, base.number) != base.number:
            # A service that took over before this base was there did not count its moment: nobody may count on it.
            raise OtherShipperError(
                f"{self._store.place('')}: somebody else put a piece while base {base.number} was made"
            )
        self.last_base, self._files, self._has_part = base, files.refs, False
        self._piece_ends = {number: ends for number, ends in self._piece_ends.items() if number >= first_piece}
        return self._shipped()

    # -- the end of the archive

    def _load(self, generation: Generation) -> Piece | None:
        """Go on at the end of a generation; return its last piece."""
        self._forget()
        self._generation = generation
        known = max(self._archive.bases(generation.number), default=0)
        if known:
            try:
                self.last_base, _ = self._archive.base(generation.number, known)
                self._files = {ref.path: ref for ref in self.last_base.files}
            except ArchiveDamagedError as damage:
                log.error(_BASE_DAMAGED, reason=str(damage))
        self._number = self._archive.last_piece(generation.number, known)
        if not self._number:
            return None
        last, _ = self._archive.piece(generation.number, self._number)
        self._ends = last.ends
        self._txn = {file.path: file for file in last.txn}
        self._taken_ms = last.taken_ms
        self._has_part = self.last_base is None or (not last.is_moment and self._number != known)
        return last

    def _forget(self) -> None:
        self._generation, self.last_base = None, None
        self._files, self._ends, self._txn, self._piece_ends = {}, [], {}, {}
        self._number = self._taken_ms = 0
        self._whole_behind = []
        self._has_part = True

    def _goes_on(self, logs: list[LogPlace]) -> bool:
        """True if the logs begin with all bytes that were shipped."""
        assert self._generation is not None
        if self._generation.log_ids != [log.log_id for log in logs]:
            return False
        for log, shipped in zip(logs, self._ends, strict=False):
            if log.end < shipped.position:
                return False
            if not shipped.position.offset:
                continue
            last_bytes = self._origin.bytes_before(log, shipped.position)
            if last_bytes is not None and last_bytes != shipped.last_bytes:
                return False
        return True

    def _new_generation(self, number: int, logs: list[LogPlace], former_ids: list[str]) -> None:
        self._forget()
        own_id, log_ids = self._service_id, [log.log_id for log in logs]
        now_ms = self._clock.now_ms()
        own, former = self._epoch_masks
        generation = Generation(number, own_id, now_ms, log_ids, self._nonce, own, former_ids, former)
        self._create(generation_name(number), encode(generation))
        self._generation = generation

    # -- a moment

    def _moment(self, known: Mapping[str, TxnFile] | None) -> tuple[list[LogPlace], TxnState]:
        try:
            found = self._origin.moment(known)
        except OriginGoneError as gone:
            raise NoMomentError(str(gone)) from gone
        if found is None:
            raise NoMomentError("a shard recovers, or transactions follow each other too fast to be copied; try again")
        return found

    def _ship(
        self,
        logs: list[LogPlace],
        txn: TxnState | None,
        starts: Sequence[LogEnd],
        is_sign: bool = False,
        needs_base: bool = False,
    ) -> Shipped:
        """Put all bytes of the logs from `starts` to this moment. Without `txn` the last piece is no moment, so it
        cannot be restored. If it `needs_base`, only the base of its number makes it one.
        """
        assert self._generation is not None
        if self._generation.log_ids != [log.log_id for log in logs]:
            raise NoMomentError("the logs were made anew for another count of shards; begin again")
        if self._is_shipped(logs, txn) and not is_sign:
            return self._shipped()
        self._taken_ms = max(self._taken_ms, self._clock.now_ms())
        draft = PieceDraft(starts)
        for log in logs:
            for file_no, offset, content in self._origin.log_bytes(log, draft.ends[log.shard].position, PIECE_BYTES):
                if draft.size_bytes + len(content) > PIECE_BYTES:
                    self._put_piece(draft)
                    draft = PieceDraft(draft.ends)
                draft.add(log.shard, log.log_id, file_no, offset, content)
        self._put_piece(draft, txn, needs_base)
        return self._shipped()

    def _is_shipped(self, logs: list[LogPlace], txn: TxnState | None) -> bool:
        if [log.end for log in logs] != self.ends:
            return False
        if txn is None:
            return True
        digests = {path: file.digest for path, (file, _) in txn.items()}
        return {path: file.digest for path, file in self._txn.items()} == digests

    def _shipped(self) -> Shipped:
        return Shipped(self._number, self._bytes, self._objects, self._taken_ms)

    def _put_piece(self, draft: PieceDraft, txn: TxnState | None = None, needs_base: bool = False) -> None:
        assert self._generation is not None
        is_moment = txn is not None and not needs_base
        number, payload = self._number + 1, draft.payload
        if txn is not None:
            self._txn = self._txn_files(number, draft.size_bytes, txn)
            payload = payload + [txn[path][1] for path, file in self._txn.items() if file.piece == number]
        piece = Piece(
            number,
            self._taken_ms,
            self._nonce,
            draft.parts,
            draft.ends,
            is_moment,
            self._origin.ends.has_end,
            list(self._txn.values()),
            leader_url=self._leader_url,
        )
        self._create(piece_name(self._generation.number, number), encode(piece, payload))
        self._number, self._ends, self._has_part = number, draft.ends, not is_moment
        self._piece_ends[number] = draft.ends
        if len(self._piece_ends) > PIECE_ENDS_MAX:
            del self._piece_ends[next(iter(self._piece_ends))]

    def _txn_files(self, number: int, at: int, txn: TxnState) -> dict[str, TxnFile]:
        """Return where the bytes of each file are: in this piece, or in an earlier one since the last base."""
        found: dict[str, TxnFile] = {}
        for path, (file, _) in sorted(txn.items()):
            known = self._txn.get(path)
            if known is None or known.digest != file.digest:
                known = TxnFile(path, number, at, file.size_bytes, file.digest)
                at += file.size_bytes
            found[path] = known
        return found

    def _create(self, name: str, content: bytes) -> None:
        if not self._store.create(name, content) and read_whole(self._store, name) != content:
            raise OtherShipperError(
                f"{self._store.place(name)}: somebody else made this object: two services, or two backups, use one"
                " archive at a time; end one of them"
            )
        self._bytes += len(content)
        self._objects += 1

    # -- a base

    def _go_on(self, logs: list[LogPlace], starts: list[LogStart]) -> None:
        """Go on with each log where the archive ends, or at the snapshot if the log begins later by now."""
        ends = []
        for log, start in zip(logs, starts, strict=True):
            shipped = self._ends[log.shard] if self._ends else None
            if shipped is None or self._origin.bytes_before(log, shipped.position) is None:
                last_bytes = self._origin.bytes_before(log, start.position) or b""
                shipped = LogEnd(log.shard, log.log_id, start.position, last_bytes)
            ends.append(shipped)
        self._has_part |= ends != self._ends  # there is a hole before what comes next
        self._ends = ends

    def _piece_of(self, start: LogStart) -> int:
        """Return the first piece that has bytes behind this place of a log; the last piece if none has."""
        assert self._generation is not None
        number = self._generation.number
        low, high = 0 if self.last_base is None else self.last_base.first_piece - 1, self._number
        while high - low > 1:
            middle = (low + high) // 2
            ends = self._piece_ends.get(middle)
            if ends is None:
                is_pruned = self.last_base is None and not self._archive.has_piece(number, middle)
                ends = [] if is_pruned else self._ends_of(number, middle)
            is_behind = any(end.shard == start.shard and end.position > start.position for end in ends)
            low, high = (low, middle) if is_behind else (middle, high)
        return high

    def _ends_of_damage(self, generation: int, first: int) -> list[WalPosition]:
        """Return the ends of the logs in the last damaged piece from `first` on."""
        number = self._number
        with suppress(ArchiveDamagedError):
            while number > first:
                self._archive.piece(generation, number)
                number -= 1
        return [end.position for end in self._ends_of(generation, number)]

    def _ends_of(self, generation: int, number: int) -> list[LogEnd]:
        """Return the ends of the logs in a piece. If that is damaged, the next whole one tells where it goes on."""
        for whole in range(number, self._number + 1):
            with suppress(ArchiveDamagedError):
                piece, _ = self._archive.piece(generation, whole)
                parts = piece.parts if whole > number else []
                firsts = {part.shard: WalPosition(part.file_no, part.offset) for part in reversed(parts)}
                return [LogEnd(end.shard, end.log_id, firsts.get(end.shard, end.position)) for end in piece.ends]
        return self._ends


def _former_ids(newest: Generation | None, service_id: str) -> list[str]:
    """Return the ids of the services that shipped here before this one, for a generation that it begins."""
    if newest is None:
        return []
    return newest.former_ids + [newest.service_id] * (newest.service_id != service_id)
