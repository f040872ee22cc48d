"""The objects of an archive, and the store that has them. docs/storage-format.md ("Archive") says what each object is
and how it is laid out.

Every object is created once and never written over. So two services that ship into one generation cannot both succeed:
the second one finds the number of its piece taken.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from struct import Struct
from typing import Final, Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit

import msgspec
from xxhash import xxh3_64_intdigest

from topics.storage.bucket_store import BucketStore
from topics.storage.filesystem import FileSystem
from topics.storage.frame import CHECKSUM, CHECKSUM_LEN, Bytes
from topics.storage.logfile import WalPosition
from topics.storage.segment_store import MOUNT, WHOLE_OBJECT_MS, LocalStore, SegmentStore
from topics.storage.service_id import EpochMasks

MAGIC: Final = b"topicARC"
VERSION: Final = 1
_PREFIX: Final = Struct("<8sII")
_GENERATIONS: Final = "generations"
_LOANS: Final = "loans"
_OVER: Final = ".over"
_LOAN: Final = re.compile(rf"{_LOANS}/\d{{8}}-(\d{{12}})-[0-9a-f]{{16}}")


class ArchiveDamagedError(Exception):
    """The archive is damaged or incomplete; the message names the object and says what is wrong with it."""


class ArchiveStore(SegmentStore, Protocol):
    """The calls of an archive's store."""

    def create(self, name: str, content: Bytes) -> bool:
        """Make the object durably. Return False, and leave it alone, if there is one already."""


def open_archive(fs: FileSystem, place: str, timeout_ms: int = WHOLE_OBJECT_MS, *, new: bool = True) -> ArchiveStore:
    """Return the store below `<place>/archive`; `place` is a directory, as such or by file://, or a bucket's URL.
    `timeout_ms` bounds a request to a bucket, `LocalStore` explains `new`.
    """
    if place.startswith("file://"):
        place = unquote(urlsplit(place).path)
    if "://" in place:
        return BucketStore(f"{place.rstrip('/')}/archive", timeout_ms)
    return LocalStore(fs, os.path.join(os.path.abspath(place), "archive"), new=new, way_out=MOUNT)


class FileRef(msgspec.Struct, frozen=True):
    """A file of the data directory: `path` in there, `name` of the object, its length and XXH3-64."""

    path: str
    name: str
    size_bytes: int
    digest: int


class LogEnd(msgspec.Struct, frozen=True):
    """The place up to which a log was shipped. `last_bytes` are the bytes just before `position`. They are the checksum
    of a frame, so they tell whether another log has the same history up to there.
    """

    shard: int
    log_id: int
    position: WalPosition
    last_bytes: bytes = b""


class LogPart(msgspec.Struct, frozen=True):
    """Bytes of a log file; parts lie in the payload one after the other."""

    shard: int
    file_no: int
    offset: int
    size_bytes: int


class TxnFile(msgspec.Struct, frozen=True):
    """The file of a stage or a sink at one moment: its bytes are in the payload of piece `piece`, from `offset` on."""

    path: str
    piece: int
    offset: int
    size_bytes: int
    digest: int


class LogStart(msgspec.Struct, frozen=True):
    """The place from which a restored log goes on, and the frame with which its first file begins."""

    shard: int
    position: WalPosition
    file_start: bytes


class Generation(msgspec.Struct, frozen=True):
    """One unbroken history of one service. `shards` and `log_ids` (by shard) never change within it."""

    number: int
    service_id: str
    begun_ms: int
    log_ids: list[int]
    nonce: str
    epoch_mask: int = 0
    """Mask that turns topic ids into epochs (`storage/service_id.py`)."""
    former_ids: list[str] = []
    """Ids of the services that this one took over from: it may prune their generations."""
    former_mask: int | None = None
    """Mask of the service that this one was restored from, or took over from."""

    @property
    def shards(self) -> int:
        return len(self.log_ids)

    @property
    def epoch_masks(self) -> EpochMasks:
        return EpochMasks(self.epoch_mask, self.former_mask)


class Piece(msgspec.Struct, frozen=True):
    """The next bytes of the logs. `ends` are the ends of all logs behind this piece, by shard; in a generation they
    never go back. Without `has_end` the logs may lack the last writes.

    A piece that `is_moment` completes a moment: a state of all logs and transactions that the service had at
    `taken_ms` and that a restore can make again. Other pieces are parts of a later moment, or follow bytes that the
    service removed before they were shipped, or are a moment only together with the base of the same number.
    """

    number: int
    taken_ms: int
    nonce: str
    parts: list[LogPart]
    ends: list[LogEnd]
    is_moment: bool = False
    has_end: bool = True
    txn: list[TxnFile] = []
    taken_over_by: str = ""
    """The machine that took over from the service; only the last piece of a generation has it."""
    taken_over_id: str = ""
    """The id of the service that goes on in this archive from this piece, if one does."""
    leader_url: str = ""
    """The address of the service, if it tells one. Such a service also ships moments while nothing changes."""


class Base(msgspec.Struct, frozen=True):
    """A snapshot (the payload is its body) and the segments that it lists. Together with the pieces from `first_piece`
    on it restores every moment from piece `number` on, but no earlier one: its indexes have the deletions up to piece
    `number`. `logs` say, by shard, where the snapshot ends. In `files` an index comes before its data.
    """

    number: int
    taken_ms: int
    first_piece: int
    logs: list[LogStart]
    files: list[FileRef]
    snapshot_bytes: int


class Removal(msgspec.Struct, frozen=True):
    """The names of objects that nobody needs any more. A pruning removes these objects, then this one. If it is killed,
    the next pruning goes on.
    """

    number: int
    names: list[str]


_Header = TypeVar("_Header", Generation, Piece, Base, Removal)
_DECODE: Final = {kind: msgspec.msgpack.Decoder(kind).decode for kind in (Generation, Piece, Base, Removal)}
"""Made before any thread runs: msgspec completes a type with its first decoder, and a thread that meets it before that
crashes the process.
"""


def generation_name(number: int) -> str:
    return f"{_GENERATIONS}/{number:08d}"


def piece_name(generation: int, number: int) -> str:
    return f"g{generation:08d}.pieces/{number:012d}"


def base_name(generation: int, number: int) -> str:
    return f"g{generation:08d}.bases/{number:012d}"


def file_name(generation: int, name: str) -> str:
    return f"g{generation:08d}.files/{name}"


def loan_name(generation: int, base: int) -> str:
    """Return a name for a new loan."""
    return f"{_LOANS}/{generation:08d}-{base:012d}-{secrets.token_hex(8)}"


def removal_name(generation: int, number: int) -> str:
    return f"g{generation:08d}.removals/{number:012d}"


def encode(header: msgspec.Struct, payload: Iterable[Bytes] = ()) -> bytes:
    """Lay out an object."""
    head = msgspec.msgpack.encode(header)
    content = b"".join((_PREFIX.pack(MAGIC, VERSION, len(head)), head, *payload))
    return content + CHECKSUM.pack(xxh3_64_intdigest(content))


def decode(content: bytes, kind: type[_Header], place: str) -> tuple[_Header, memoryview]:
    """Return (header, payload). Raise ArchiveDamagedError with `place` for anything but a whole object of this kind."""
    view = memoryview(content)
    if len(content) < _PREFIX.size + CHECKSUM.size:
        raise ArchiveDamagedError(f"{place}: has only {len(content)} bytes")
    magic, version, head_len = _PREFIX.unpack_from(content)
    if magic != MAGIC:
        raise ArchiveDamagedError(f"{place}: begins with {magic!r} instead of {MAGIC!r}")
    end = len(content) - CHECKSUM.size
    if CHECKSUM.unpack_from(content, end)[0] != xxh3_64_intdigest(view[:end]):
        raise ArchiveDamagedError(f"{place}: checksum does not match")
    if version != VERSION:
        raise ArchiveDamagedError(
            f"{place}: version {version} is unknown (this release reads {VERSION}); use the release that wrote it"
        )
    body_at = _PREFIX.size + head_len
    try:
        return cast("_Header", _DECODE[kind](view[_PREFIX.size : body_at])), view[body_at:end]
    except msgspec.DecodeError as error:
        raise ArchiveDamagedError(f"{place}: its header does not decode: {error}") from error


class PieceDraft:
    """The bytes of logs that a piece will have. `ends` are the ends of all logs behind these bytes, by shard."""

    def __init__(self, starts: Sequence[LogEnd]) -> None:
        self.ends = list(starts)
        self.parts: list[LogPart] = []
        self.payload: list[bytes] = []
        self.size_bytes = 0

    def add(self, shard: int, log_id: int, file_no: int, offset: int, content: bytes) -> None:
        """Append the next bytes of a log."""
        self.parts.append(LogPart(shard, file_no, offset, len(content)))
        self.payload.append(content)
        self.size_bytes += len(content)
        last_bytes = (self.ends[shard].last_bytes + content)[-CHECKSUM_LEN:]
        self.ends[shard] = LogEnd(shard, log_id, WalPosition(file_no, offset + len(content)), last_bytes)


def read_whole(store: ArchiveStore, name: str) -> bytes:
    """Read an object. Raise ArchiveDamagedError if it is missing, cut short, or in a bad place of its disk, OSError if
    the store fails.
    """
    size = None
    try:
        size = store.len(name)
        return store.read_range(name, 0, size)
    except FileNotFoundError:
        raise ArchiveDamagedError(f"{store.place(name)}: is missing") from None
    except EOFError as error:
        raise ArchiveDamagedError(str(error)) from error
    except OSError as error:
        # A bucket gives EIO for whatever fails. A folder that gave the size is there: the file itself is bad.
        if error.errno != errno.EIO or size is None or not isinstance(store, LocalStore):
            raise
        raise ArchiveDamagedError(f"{store.place(name)}: its disk cannot read it ({error.strerror})") from error


def joined(end: WalPosition, part: LogPart) -> WalPosition | None:
    """Return the new end of a log that ended at `end` and gets this part; the log may have the part's beginning. Return
    None if bytes are missing between the two.
    """
    start, behind = WalPosition(part.file_no, part.offset), WalPosition(part.file_no, part.offset + part.size_bytes)
    if behind <= end:
        return end
    if start <= end or (part.offset == 0 and part.file_no == end.file_no + 1):
        return behind
    return None


def new_bytes(end: WalPosition, part: LogPart, content: memoryview) -> memoryview:
    """Return the bytes of a part that a log lacks which ends at `end`. No bytes may be missing between the two."""
    if part.file_no != end.file_no:
        return content if part.file_no > end.file_no else content[:0]
    return content[end.offset - part.offset :]


def split_payload(piece: Piece, payload: memoryview) -> Iterator[tuple[LogPart, memoryview]]:
    """Yield the parts of a piece with their bytes."""
    at = 0
    for part in piece.parts:
        yield part, payload[at : at + part.size_bytes]
        at += part.size_bytes


class Archive:
    """The objects of one archive as they are now. Owns the way to the store, and what is known to be damaged there."""

    def __init__(self, store: ArchiveStore) -> None:
        self.store = store
        self.damaged: dict[str | FileRef, ArchiveDamagedError] = {}
        """Damage that a copy has met, by names of bases, and files. Another copy needs another base."""

    def generations(self) -> list[int]:
        """Return the numbers of all generations, ascending; none for no archive. Raise ArchiveDamagedError if all of
        them are gone and other objects are there.
        """
        numbers = self._numbers(f"{_GENERATIONS}/")
        # A list may be old, so each generation of which there are objects is looked for.
        others = [] if numbers else sorted({int(name[1:9]) for name in self.store.list("g0")})
        if others and not any(map(self.has_generation, others)):
            place = self.store.place(f"{_GENERATIONS}/")
            raise ArchiveDamagedError(f"{place}: is lost; put it back from a copy, or use another place")
        return numbers

    def generation(self, number: int) -> Generation:
        return self._header(generation_name(number), Generation)[0]

    def has_generation(self, number: int) -> bool:
        return self.store.exists(generation_name(number))

    def bases(self, generation: int) -> list[int]:
        """Return the numbers of the bases of a generation, ascending."""
        return self._numbers(base_name(generation, 0)[:-12])

    def base(self, generation: int, number: int) -> tuple[Base, memoryview]:
        """Return (base, body of the snapshot; empty for a service that had none yet)."""
        return self._header(base_name(generation, number), Base)

    def has_base(self, generation: int, number: int) -> bool:
        return self.store.exists(base_name(generation, number))

    def removals(self, generation: int) -> list[Removal]:
        """Return the removals that are under way, also those of a pruning that was killed."""
        names = self.store.list(removal_name(generation, 0)[:-12])
        return [self._header(name, Removal)[0] for name in names]

    def pieces(self, generation: int) -> list[int]:
        """Return the numbers of all pieces of a generation, ascending."""
        return self._numbers(piece_name(generation, 0)[:-12])

    def has_piece(self, generation: int, number: int) -> bool:
        return self.store.exists(piece_name(generation, number))

    def piece(self, generation: int, number: int) -> tuple[Piece, memoryview]:
        return self._header(piece_name(generation, number), Piece)

    def last_piece(self, generation: int, known: int) -> int:
        """Return the number of the last piece. The caller knows that piece `known` exists (0: perhaps none does)."""
        step = 1
        while self.has_piece(generation, known + step):
            step *= 2
        low, high = known + step // 2, known + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.has_piece(generation, middle) else (low, middle)
        return low

    def loans(self, generation: int) -> dict[int, str]:
        """Return the bases of a generation whose files restored services still read, each with the name of a loan."""
        names = self.store.list(f"{_LOANS}/{generation:08d}-")
        found = [match for match in map(_LOAN.fullmatch, names) if match and f"{match[0]}{_OVER}" not in names]
        return {int(match[1]): match[0] for match in found}

    def end_loan(self, name: str) -> None:
        """End a loan. Its put may arrive later, so an `.over` object says that it has ended."""
        if self.store.exists(name):
            self.store.delete(name)
        else:
            self.store.create(f"{name}{_OVER}", b"")

    def file(self, ref: FileRef) -> bytes:
        """Read a file. Raise ArchiveDamagedError if it is not what was shipped."""
        try:
            content = read_whole(self.store, ref.name)
            if len(content) != ref.size_bytes or xxh3_64_intdigest(content) != ref.digest:
                place = self.store.place(ref.name)
                raise ArchiveDamagedError(f"{place}: is not what was shipped, its checksum differs")
        except ArchiveDamagedError as damage:
            self.damaged[ref] = damage
            raise
        return content

    def look_again(self) -> None:
        """Forget which files are damaged, but for those that still are: somebody may put them back. Raise OSError."""
        for ref in list(self.damaged):
            if isinstance(ref, FileRef):
                del self.damaged[ref]
                with suppress(ArchiveDamagedError):
                    self.file(ref)

    def require_undamaged(self, generation: int, base: Base) -> None:
        """Raise ArchiveDamagedError if a copy of this base, or of one of its files, has met damage."""
        its: list[str | FileRef] = [base_name(generation, base.number), *base.files]
        for known in its:
            if damage := self.damaged.get(known):
                raise damage

    def _header(self, name: str, kind: type[_Header]) -> tuple[_Header, memoryview]:
        found = decode(read_whole(self.store, name), kind, self.store.place(name))
        number = int(name.rpartition("/")[2])
        if found[0].number != number:
            raise ArchiveDamagedError(f"{self.store.place(name)}: is object {found[0].number} under another name")
        return found

    def _numbers(self, prefix: str) -> list[int]:
        names = (name.removeprefix(prefix) for name in self.store.list(prefix))
        return sorted(int(name) for name in names if name.isdecimal())
