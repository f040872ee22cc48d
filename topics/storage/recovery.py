"""Recovery: it reads one log at a start, however its writer ended, and repairs it.

Recovery yields frames file by file in batches, in log order. It validates every frame, and yields complete writes only:
a write of several frames whose last one is missing never happened. Where the valid frames end, it finds one of two
things:

- A torn tail: the write that was under way when the process or the machine stopped. Recovery cuts it off and reports
that.
- Corruption: damage to bytes that had been written whole. Recovery refuses the log and names the file, the offset and
the frames behind the damage, because a start would silently lose these.

It tells them apart as follows. A torn tail is in the active file. After the end of a process no valid frame follows a
torn tail: a stopped process leaves no hole, so without a boot of the machine since, a hole is corruption. After a power
loss valid frames may follow, because pages reach the disk in any order. Then the place had not been synced yet, so no
SYNC_MARK vouches for it.

Reading begins at `start`:

- None: file 1. The log has all its files.
- a WalPosition: a snapshot on the disk holds everything before it. Files below it may be there or not. The log must
reach it: recovery refuses a log that is older than the snapshot.
- "lowest": the first file there is. This is for a log that is trimmed without a snapshot, because its files repeat
everything from earlier files that is still needed (the RAM log, `walshard/commit/log_trim.py`).

After a crash in the middle of any step, recovery can run again. At its end everything that it yielded is on the disk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, NamedTuple

from topics.storage import layout
from topics.storage.filesystem import FileSystem, opened, read_all, replace_file
from topics.storage.frame import CHECKSUM_LEN, TYPE_AT, Defect, FrameTuple, FrameType, scan
from topics.storage.frame_columns import FrameColumns, scan_columns
from topics.storage.logfile import (
    FileStart,
    NotALogFile,
    RefusedLog,
    WalEnd,
    WalIdentity,
    WalPosition,
    erase_behind,
    read_committed,
    read_current,
    read_file_start,
    write_current,
)

BATCH_FRAMES: Final = 1024  # few enough to be freed while they are in the cache: a third faster than 8192
FRAMING_TYPES: Final = bytes((FrameType.FILE_START, FrameType.FILE_END, FrameType.SYNC_MARK))
"""Types of frames about the log itself, not about a topic."""

Start = WalPosition | Literal["lowest"] | None


class CorruptLog(RefusedLog):
    """Damage that no crash explains. `.path` and `.offset` (bytes) say where it is, `.lost` what a start would lose."""

    def __init__(self, path: str, offset: int, reason: str, lost: str) -> None:
        super().__init__(
            path,
            f"corrupt at offset {offset}: {reason}. Behind it: {lost}. Restore the file from a copy, or start with "
            f"--accept-data-loss to go on without what is behind it (the files are kept beside the log)",
        )
        self.offset = offset
        self.reason = reason
        self.lost = lost


class RecoveredFile(NamedTuple):
    """A batch of one file's frames, with complete writes only. Batches of one file come in a row. `buffer` is the whole
    file; the offsets in `frames` are offsets in it.
    """

    file_no: int
    path: str
    buffer: memoryview
    frames: FrameColumns


class _File(NamedTuple):
    """A log file with a valid FILE_START."""

    file_no: int
    path: str
    start: FileStart
    data_offset: int


class _Stop(NamedTuple):
    """The place at which reading a file ended, and the reason."""

    kept_end: int  # behind the last complete write
    offset: int  # behind the last valid frame, which may belong to an incomplete write
    sealed_at: int | None  # offset of FILE_END, if it was reached
    defect: str | None  # None at FILE_END, or at the end of the bytes
    buffer: bytes


@dataclass(eq=False)
class Recovery:
    """Reads one log from `start` on and repairs it. Nobody else may use the log meanwhile.

    Iterate once to get the batches. Then `end` (None if there is no log yet), `torn_bytes` and `report` are final.
    Iterating raises CorruptLog, UnknownLogVersion, RefusedLog or OSError.
    """

    _fs: FileSystem
    _directory: str
    _identity: WalIdentity
    _accept_data_loss: bool = False
    start: Start = field(default=None, kw_only=True)
    end: WalEnd | None = None
    torn_bytes: int = 0
    report: list[str] = field(default_factory=list)
    """Lines for the operator: one for every repair, with file, offset and bytes."""
    _current_file_no: int = 0
    _files_read: float = 0.0
    _files_total: int = 0

    def __post_init__(self) -> None:
        self._position = self.start if isinstance(self.start, WalPosition) else None

    @property
    def has_end(self) -> bool:
        """True if the log surely has everything that was committed; valid once the log is read."""
        end, committed = self.end, read_committed(self._fs, self._directory)
        return end is None or (committed is not None and committed <= WalPosition(end.file_no, end.offset))

    @property
    def progress(self) -> float:
        """Share of the log that has been yielded, 0 to 1."""
        return self._files_read / self._files_total if self._files_total else 1.0

    def __iter__(self) -> Iterator[RecoveredFile]:
        if not self._fs.exists(self._directory):
            if self._position is not None:
                raise self._too_short(self._directory, "it does not exist", self._position)
            return
        self._remove_unfinished_files()
        files = self._list_files()
        self._files_total = len(files)
        previous: _File | None = None
        for position, file in enumerate(files):
            later = files[position + 1 :]
            stop = yield from self._read(file, position, later[0].start.previous_end if later else None)
            self._files_read = position + 1
            active = self._is_active(stop, later)
            reason = self._damage_in_active(file, stop) if active else self._damage_in_finished(stop, later)
            if reason is not None:
                self._accept_loss(file, stop, reason, later)
            elif active:
                self._remove_spare(later)
            if active or reason is not None:
                self._cut_tail(file, stop, previous)
                return
            previous = file

    # -- the files

    def _remove_unfinished_files(self) -> None:
        for name in self._fs.listdir(self._directory):
            if name.endswith(layout.TMP_SUFFIX):
                self._fs.unlink(os.path.join(self._directory, name))

    def _list_files(self) -> list[_File]:
        """Return the files to read, in order. A missing or foreign file is corruption."""
        numbers = layout.list_log_files(self._fs, self._directory)
        self._read_current(numbers)
        last_no = max([0, self._current_file_no, *numbers])
        first_no = self._first_file_no(numbers, last_no)
        files: list[_File] = []
        for file_no in range(first_no, last_no + 1):
            path = layout.log_path(self._directory, file_no)
            try:
                files.append(self._open_head(file_no, path, files))
            except FileNotFoundError:
                reason = "the file is missing"
            except NotALogFile as error:
                reason = f"not a file of this log: {error}"
            else:
                continue
            behind = [number for number in numbers if number >= file_no]
            lost = self._describe(*map(self._survey_file, behind))
            if self._position is not None and not files:
                raise RefusedLog(
                    path,
                    f"{reason}, and the snapshot goes on in it. Behind it: {lost}. Restore the file from a copy, or "
                    f"the whole data directory",
                )
            if not self._accept_data_loss:
                raise CorruptLog(path, 0, reason, lost)
            self.report.append(f"{path}: {reason}; accepted the loss of {lost}")
            self._set_aside(behind, file_no - 1 if files else 0)
            break
        return files

    def _first_file_no(self, numbers: list[int], last_no: int) -> int:
        if self._position is not None:
            if self._position.file_no > last_no:
                raise self._too_short(self._directory, f"its last file is number {last_no}", self._position)
            return self._position.file_no
        if self.start == "lowest":
            return min(numbers, default=max(1, last_no))
        return 1

    def _too_short(self, path: str, end: str, position: WalPosition) -> RefusedLog:
        return RefusedLog(
            path,
            f"{end}, but the snapshot goes on at offset {position.offset} of file {position.file_no}: the snapshot is "
            f"newer than the log. Restore the log from a copy of the same age, or the whole data directory",
        )

    def _read_current(self, numbers: list[int]) -> None:
        try:
            current = read_current(self._fs, self._directory)
        except RefusedLog as error:
            if not self._accept_data_loss:
                raise
            current = None
            self.report.append(str(error))
        if current is None and len(numbers) > 1:
            self.report.append(f"{self._directory}: CURRENT is missing and is made again")
        self._current_file_no = current or 0

    def _open_head(self, file_no: int, path: str, before: list[_File]) -> _File:
        start, data_offset = read_file_start(self._fs, path)
        identity = self._identity
        found = (start.file_no, start.shard, start.shards)
        if found != (file_no, identity.shard, identity.shards):
            raise NotALogFile(
                f"it is file {start.file_no} of shard {start.shard} of {start.shards}, "
                f"expected file {file_no} of shard {identity.shard} of {identity.shards}"
            )
        if before and start.log_id != before[0].start.log_id:
            raise NotALogFile(
                f"its log id {start.log_id:016x} is not that of file {before[0].file_no}, {before[0].start.log_id:016x}"
            )
        return _File(file_no, path, start, data_offset)

    # -- reading

    def _read(self, file: _File, files_before: int, previous_end: int | None) -> Generator[RecoveredFile, None, _Stop]:
        buffer = read_all(self._fs, file.path)
        view = memoryview(buffer)
        limit = len(buffer) if previous_end is None else min(previous_end, len(buffer))
        offset = self._check_start(file, buffer, limit, previous_end)
        open_write = FrameColumns.none()
        while True:
            frames, offset, found_defect = scan_columns(view, offset, limit, BATCH_FRAMES)
            defect = None if found_defect is None else found_defect.value
            sealed_at = None
            at_end = defect is not None or offset == limit
            if frames.of_any(FRAMING_TYPES):
                frames, stray = _without_framing(frames)
                if stray is not None:
                    at_end, offset = True, stray[0]
                    if stray[2] == FrameType.FILE_END and stray[4:6] == (file.file_no, offset):
                        sealed_at, defect = offset, None
                    else:
                        defect = f"a misplaced frame of type {FrameType(stray[2]).name}"
            frames = FrameColumns.joined([open_write, frames]) if open_write else frames
            complete = frames.complete()
            open_write = frames[complete:]
            self._files_read = files_before + offset / limit
            if complete:
                yield RecoveredFile(file.file_no, file.path, view, frames[:complete])
            if at_end:
                return _Stop(open_write[0][0] if open_write else offset, offset, sealed_at, defect, buffer)

    def _check_start(self, file: _File, buffer: bytes, limit: int, previous_end: int | None) -> int:
        """Return the offset at which to begin. Raise RefusedLog or CorruptLog if no frame ends there."""
        position = self._position
        if position is None or file.file_no != position.file_no or position.offset <= file.data_offset:
            return file.data_offset
        start = position.offset
        if previous_end is not None and previous_end <= start:
            return limit  # the bytes between them were copied to the next file
        if scan(buffer, start, limit, limit=1).frames:
            return start
        # The log may end exactly at `start`: read the frames before it to see whether one ends there.
        offset = file.data_offset
        defect: Defect | None = None
        while offset < min(start, limit) and defect is None:
            _, offset, defect = scan_columns(buffer, offset, min(start, limit), BATCH_FRAMES)
        if offset == start:
            return start
        if start > limit or not used_bytes(buffer[:start], offset):
            raise self._too_short(file.path, f"it ends at offset {offset}", position)
        reason = f"{defect}, before offset {start}, where the snapshot goes on"
        lost = self._describe(survey(buffer, offset, file.file_no))
        if not self._accept_data_loss:
            raise CorruptLog(file.path, offset, reason, lost)
        self.report.append(f"{file.path}: corrupt at offset {offset}: {reason}; the snapshot holds what was there")
        return start

    # -- damage

    def _damage_in_finished(self, stop: _Stop, later: list[_File]) -> str | None:
        """Return why a finished file is damaged, None if it is not. Other files follow it, or it has a FILE_END."""
        if stop.kept_end < stop.offset:
            return "an incomplete write, though the log goes on in the next file"
        if stop.sealed_at is not None:
            return None if later else "the file was finished, but the next one is missing"
        reason = stop.defect or "the file ends without FILE_END"
        previous_end = later[0].start.previous_end
        if stop.offset == previous_end:
            return None
        on_disk = "the log goes on in the next file" if previous_end is None else f"{previous_end} bytes were synced"
        return f"{reason}, though {on_disk}"

    def _damage_in_active(self, file: _File, stop: _Stop) -> str | None:
        """Return why the bytes behind the last frame are corruption; None if they are nothing or a torn tail."""
        behind = survey(stop.buffer, stop.offset, file.file_no)
        if not behind.frames:
            return None
        if file.start.boot_id == self._identity.boot_id:
            return f"{stop.defect}, followed by valid frames, and the machine has not stopped since"
        if behind.synced_offset > stop.offset:
            return f"{stop.defect}, in bytes known to have been on the disk"
        return None

    def _is_active(self, stop: _Stop, later: list[_File]) -> bool:
        """True if this is the active file: it has no FILE_END, and at most a blank spare comes after it."""
        if stop.sealed_at is not None or not later:
            return stop.sealed_at is None
        spare = later[0]
        if len(later) > 1 or spare.file_no <= self._current_file_no or spare.start.previous_end is not None:
            return False
        return used_bytes(read_all(self._fs, spare.path), spare.data_offset) == 0

    def _survey_file(self, file_no: int) -> Survey:
        return survey(read_all(self._fs, layout.log_path(self._directory, file_no)), 0, file_no)

    def _describe(self, *surveys: Survey) -> str:
        frames, records = sum(found.frames for found in surveys), sum(found.records for found in surveys)
        return f"{frames} valid frames, {records} of them records, in {len(surveys)} files"

    # -- repairs

    def _cut_tail(self, file: _File, stop: _Stop, previous: _File | None) -> None:
        """Erase the bytes behind the last complete write, and sync everything that was yielded."""
        torn_bytes = used_bytes(stop.buffer, stop.kept_end)
        with opened(self._fs, file.path, os.O_RDWR) as fd:
            if torn_bytes:
                erase_behind(self._fs, fd, stop.kept_end, len(stop.buffer))
            self._fs.fdatasync(fd)
        if torn_bytes:
            self.torn_bytes += torn_bytes
            why = stop.defect if stop.defect not in (None, Defect.EMPTY.value) else "an incomplete write"
            self.report.append(f"{file.path}: torn tail at offset {stop.kept_end}: {why}; dropped {torn_bytes} bytes")
        if previous is not None and stop.kept_end == file.data_offset:
            # The writer stopped just after it switched files: the previous one may not be synced yet.
            with opened(self._fs, previous.path, os.O_RDWR) as fd:
                self._fs.fdatasync(fd)
        if self._current_file_no != file.file_no:
            write_current(self._fs, self._directory, file.file_no)
        self.end = WalEnd(file.file_no, stop.kept_end, file.start.log_id, file.start.boot_id)

    def _remove_spare(self, later: list[_File]) -> None:
        """Remove the spare: the writer makes one with its own boot in it."""
        for spare in later:
            self._fs.unlink(spare.path)
        if later:
            self._fs.fsync_dir(self._directory)

    def _accept_loss(self, file: _File, stop: _Stop, reason: str, later: list[_File]) -> None:
        """End the log at `stop` if the operator accepts that, and keep copies of the rest. Raise CorruptLog if not."""
        lost = self._describe(
            survey(stop.buffer, stop.kept_end, file.file_no), *(self._survey_file(other.file_no) for other in later)
        )
        if not self._accept_data_loss:
            raise CorruptLog(file.path, stop.offset, reason, lost)
        replace_file(self._fs, self._free_name(file.path), stop.buffer)
        self._set_aside([other.file_no for other in later], file.file_no)
        self.report.append(f"{file.path}: corrupt at offset {stop.offset}: {reason}; accepted the loss of {lost}")

    def _set_aside(self, file_nos: list[int], last_file_no: int) -> None:
        """Rename files out of the log, the last one first, so that the rest is a log at every moment."""
        if last_file_no:
            write_current(self._fs, self._directory, last_file_no)
        elif self._current_file_no:
            self._fs.unlink(os.path.join(self._directory, layout.CURRENT_NAME))
        self._current_file_no = last_file_no
        for file_no in reversed(file_nos):
            path = layout.log_path(self._directory, file_no)
            self._fs.rename(path, self._free_name(path))
        self._fs.fsync_dir(self._directory)

    def _free_name(self, path: str) -> str:
        return next(name for number in count(1) if not self._fs.exists(name := f"{path}.damaged-{number}"))


def _without_framing(frames: FrameColumns) -> tuple[FrameColumns, FrameTuple | None]:
    """Return the frames about topics up to the first FILE_START or FILE_END, and that frame (None if there is none)."""
    ending = frames.find(FrameType.FILE_START, FrameType.FILE_END)
    return frames[:ending].without(FRAMING_TYPES), frames[ending] if ending < len(frames) else None


# A valid type and valid flags of a frame; only an Append may have hops in its flags. The pattern is rare in JSON and
# absent in zeros, so `survey` scans few places.
_TYPE_AND_FLAGS: Final = re.compile(rb"(?=[\x01-\x0b\x20-\x28\x30-\x32][\x00-\x1f]|\x01[\x20-\xff])", re.DOTALL)


class Survey(NamedTuple):
    """The valid frames behind a defect. Recovery tells a torn tail from corruption by them."""

    frames: int
    records: int
    synced_offset: int
    """The furthest offset that a SYNC_MARK among them vouches for; 0 without one."""


def survey(buffer: bytes, start: int, file_no: int) -> Survey:
    """Find valid frames at any offset in buffer[start:], the content of file `file_no`."""
    frames = records = synced_offset = 0
    end = min(len(buffer), start + used_bytes(buffer, start) + CHECKSUM_LEN)  # a checksum may end in zeros
    offset = start
    while (candidate := _TYPE_AND_FLAGS.search(buffer, offset + TYPE_AT, end)) is not None:
        offset = candidate.start() - TYPE_AT
        found = scan(buffer, offset, end)
        if not found.frames:
            offset += 1
            continue
        for _, _, type_, _, topic_id, seq, *_ in found.frames:
            if type_ == FrameType.APPEND:
                records += 1
            elif type_ == FrameType.SYNC_MARK and topic_id == file_no:
                synced_offset = max(synced_offset, seq)
        frames += len(found.frames)
        offset = found.end
    return Survey(frames, records, synced_offset)


def used_bytes(buffer: bytes, start: int) -> int:
    """Count the bytes from `start` on without the zeros at the end of the buffer."""
    if buffer.count(0, start) == len(buffer) - start:
        return 0
    return len(buffer[start:].rstrip(b"\0"))
