"""A log whose beginning is in a snapshot: reading starts behind it, and the files below may go."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.executors import Inline
from tests.storage.faults import Crash, Fault, FaultyFileSystem
from tests.storage.logs import (
    IDENTITY,
    LATER_BOOT,
    Place,
    appends,
    commit,
    file_bytes,
    kill,
    open_writer,
    patch,
    read_log,
)
from topics.storage import layout
from topics.storage.frame import FrameType, encode, scan
from topics.storage.logfile import RefusedLog, WalPosition
from topics.storage.recovery import CorruptLog, Recovery, survey
from topics.storage.wal import WalSyncError, WalWriteError, WalWriter

FILE_BYTES = 600


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "wal")


def write_log(directory: str, count: int = 24, close: bool = False) -> list[Place]:
    writer = open_writer(FaultyFileSystem(), directory, file_bytes=FILE_BYTES)
    places = [place for seq in range(1, count + 1) for place in commit(writer, appends(seq, [b'"xxxxxxxx"'] * 2))]
    if close:
        writer.close()
    else:
        kill(writer)
    assert writer.file_no >= 4
    return places


def content(places: list[Place]) -> bytes:
    return b"".join(place.content for place in places)


def before(place: Place) -> WalPosition:
    return WalPosition(place.file_no, place.offset)


def behind(place: Place) -> WalPosition:
    return WalPosition(place.file_no, place.offset + len(place.content))


def numbers(directory: str) -> list[int]:
    return layout.list_log_files(FaultyFileSystem(), directory)


def refused(directory: str, start: WalPosition, accept_data_loss: bool = False) -> RefusedLog:
    with pytest.raises(RefusedLog) as caught:
        read_log(directory, start=start, accept_data_loss=accept_data_loss)
    return caught.value


# -- where reading begins


@pytest.mark.parametrize("identity", [IDENTITY, LATER_BOOT], ids=["same-boot", "later-boot"])
def test_reading_begins_at_every_place_between_two_writes(directory: str, identity: object) -> None:
    places = write_log(directory)
    for at, place in enumerate(places):
        for start in (before(place), behind(place)):
            read = read_log(directory, IDENTITY if identity is IDENTITY else LATER_BOOT, start=start)
            assert read.content == content(places[at + (start == behind(place)) :])
            assert read.recovery.report == []
            assert read.recovery.progress == 1
            assert read.recovery.end is not None
            assert (read.recovery.end.file_no, read.recovery.end.offset) == (
                behind(places[-1]).file_no,
                behind(places[-1]).offset,
            )


def test_a_file_may_be_begun_from_its_first_byte(directory: str) -> None:
    places = write_log(directory)
    assert read_log(directory, start=WalPosition(2, 0)).content == content([p for p in places if p.file_no >= 2])


@pytest.mark.parametrize("gone", [(1,), (2,), (1, 2), ()])
def test_files_below_the_start_may_be_gone_or_damaged(directory: str, gone: tuple[int, ...]) -> None:
    places = write_log(directory)
    start = next(place for place in places if place.file_no == 3)
    for file_no in (1, 2):
        if file_no in gone:
            os.unlink(layout.log_path(directory, file_no))
        else:
            patch(directory, file_no, 0, bytes(300))
    read = read_log(directory, start=before(start))
    assert read.content == content(places[places.index(start) :])
    assert set(numbers(directory)) == set(range(1, places[-1].file_no + 1)) - set(gone)


def test_without_a_start_a_trimmed_log_is_refused(directory: str) -> None:
    write_log(directory)
    os.unlink(layout.log_path(directory, 1))
    with pytest.raises(CorruptLog, match="the file is missing"):
        read_log(directory)


def test_progress_is_that_of_what_is_read(directory: str) -> None:
    places = write_log(directory)
    recovery = Recovery(FaultyFileSystem(), directory, IDENTITY, start=before(places[-1]))
    shares = [recovery.progress for _ in recovery]
    assert shares == sorted(shares)
    assert all(0 < share <= 1 for share in shares)


def test_the_lowest_file_there_is(directory: str) -> None:
    places = write_log(directory)
    for lowest in (1, 2, 3):
        assert read_log(directory, start="lowest").content == content([p for p in places if p.file_no >= lowest])
        os.unlink(layout.log_path(directory, lowest))
    os.unlink(layout.log_path(directory, 5))
    with pytest.raises(CorruptLog, match=r"00005\.log: corrupt at offset 0: the file is missing"):
        read_log(directory, start="lowest")


def test_the_lowest_file_when_there_is_none(directory: str) -> None:
    assert read_log(directory, start="lowest").recovery.end is None
    write_log(directory)
    for number in numbers(directory):
        os.unlink(layout.log_path(directory, number))
    with pytest.raises(CorruptLog, match="the file is missing"):
        read_log(directory, start="lowest")
    assert read_log(directory, start="lowest", accept_data_loss=True).recovery.end is None
    assert read_log(directory).recovery.report == []


def test_the_log_goes_on_behind_a_start_that_is_its_end(directory: str) -> None:
    places = write_log(directory)
    start = behind(places[-1])
    writer = open_writer(FaultyFileSystem(), directory, read_log(directory, start=start).recovery.end)
    writer.drop_files_below(start.file_no)
    (after,) = commit(writer, appends(99, [b"1"]))
    kill(writer)
    assert read_log(directory, start=start).content == after.content


# -- a snapshot that does not fit


@pytest.mark.parametrize("accept", [False, True])
def test_a_snapshot_that_is_newer_than_the_log_is_refused(directory: str, accept: bool) -> None:
    places = write_log(directory)
    end = behind(places[-1])
    cases = [
        (WalPosition(end.file_no, end.offset + 1), f"it ends at offset {end.offset}"),
        (WalPosition(end.file_no, end.offset + 64), f"it ends at offset {end.offset}"),
        (WalPosition(end.file_no, 1 << 40), f"it ends at offset {end.offset}"),
        (WalPosition(end.file_no + 1, 100), f"its last file is number {end.file_no}"),
    ]
    for start, found in cases:
        message = str(refused(directory, start, accept))
        assert found in message
        assert f"goes on at offset {start.offset} of file {start.file_no}: the snapshot is newer" in message
    assert read_log(directory).content == content(places)


def test_a_snapshot_without_any_log_is_refused(directory: str) -> None:
    assert "it does not exist, but the snapshot" in str(refused(directory, WalPosition(1, 100)))
    os.mkdir(directory)
    assert "its last file is number 0, but the snapshot" in str(refused(directory, WalPosition(1, 100)))


def test_a_start_inside_a_frame_is_refused(directory: str) -> None:
    places = write_log(directory)
    place = next(place for place in places if place.file_no == 2)
    for inside in (1, 8, len(place.content) - 1):
        error = refused(directory, WalPosition(2, place.offset + inside))
        assert isinstance(error, CorruptLog)
        assert f"before offset {place.offset + inside}, where the snapshot goes on" in str(error)


@pytest.mark.parametrize("accept", [False, True])
def test_the_file_that_the_snapshot_goes_on_in_must_be_there(directory: str, accept: bool) -> None:
    places = write_log(directory)
    start = before(next(place for place in places if place.file_no == 2))
    os.unlink(layout.log_path(directory, 2))
    assert "00002.log: the file is missing, and the snapshot goes on in it" in str(refused(directory, start, accept))


# -- damage


def test_a_torn_tail_behind_the_start(directory: str) -> None:
    *_, last = places = write_log(directory)
    patch(directory, last.file_no, last.offset + 20, bytes(len(last.content) - 20))
    for start in (before(places[0]), before(last)):
        shutil.copytree(directory, f"{directory}-copy")
        read = read_log(f"{directory}-copy", start=start)
        assert read.content == content(places[places.index(last) if start == before(last) else 0 : -1])
        assert read.recovery.torn_bytes > 0
        assert f"torn tail at offset {last.offset}" in read.recovery.report[0]
        shutil.rmtree(f"{directory}-copy")


def test_damage_behind_the_start_is_corruption_and_before_it_nothing_to_us(directory: str) -> None:
    places = write_log(directory, close=True)
    in_second = [place for place in places if place.file_no == 2]
    start = before(in_second[1])
    patch(directory, 2, in_second[0].offset + 10, b"\xff\xff")
    assert read_log(directory, start=start).content == content(places[places.index(in_second[1]) :])
    damaged = in_second[2]
    patch(directory, 2, damaged.offset + 10, b"\xff\xff")
    error = refused(directory, start)
    assert isinstance(error, CorruptLog)
    assert (error.path, error.offset) == (layout.log_path(directory, 2), damaged.offset)
    kept = read_log(directory, start=start, accept_data_loss=True)
    assert kept.content == in_second[1].content
    again = read_log(directory, start=start)
    assert (again.content, again.recovery.report) == (kept.content, [])


def test_damage_right_at_the_start_is_corruption(directory: str) -> None:
    places = write_log(directory, close=True)
    place = [place for place in places if place.file_no == 2][1]
    patch(directory, 2, place.offset + 10, b"\xff\xff")
    error = refused(directory, before(place))
    assert isinstance(error, CorruptLog)
    assert error.offset == place.offset


def test_damage_before_a_start_that_is_the_end_can_be_accepted(directory: str) -> None:
    places = write_log(directory)
    start = behind(places[-1])
    patch(directory, start.file_no, places[-1].offset + 10, b"\xff\xff")
    assert isinstance(refused(directory, start), CorruptLog)
    read = read_log(directory, start=start, accept_data_loss=True)
    assert read.content == b""
    assert "the snapshot holds what was there" in read.recovery.report[0]
    assert read.recovery.end is not None
    assert (read.recovery.end.file_no, read.recovery.end.offset) == (start.file_no, start.offset)


def test_a_start_in_a_tail_that_was_saved_elsewhere(directory: str) -> None:
    """After a failed sync the frames behind the last synced one are in the next file, and read from there."""
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory)
    commit(writer, appends(1, [b'"synced"']), sync=True)
    moved = commit(writer, appends(2, [b"2"]), appends(3, [b"3"]))
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    with pytest.raises(WalSyncError):
        commit(writer, appends(4, [b"4"]), sync=True)
    fs.arm(None)
    (after,) = commit(writer, appends(4, [b"5"]))
    kill(writer)
    for place in moved:
        assert read_log(directory, start=before(place)).content == content([*moved, after])


# -- dropping files


def test_only_files_that_were_left_for_good_are_dropped(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory, file_bytes=FILE_BYTES, helper=Inline())
    places = [place for seq in range(1, 24) for place in commit(writer, appends(seq, [b'"xxxxxxxx"'] * 2))]
    while numbers(directory)[-1] == writer.file_no:  # until the spare is there
        places += commit(writer, appends(99, [b"1"]))
    last = writer.file_no
    assert writer.drop_files_below(0) == writer.drop_files_below(1) == 0
    assert writer.drop_files_below(3) == 2
    assert writer.drop_files_below(3) == 0
    assert numbers(directory) == [3, *range(4, last + 2)]
    assert writer.drop_files_below(1 << 40) == last - 3
    assert numbers(directory) == [last, last + 1]
    while writer.file_no == last:
        places += commit(writer, appends(100, [b'"xxxxxxxx"'] * 2))
    kill(writer)
    assert read_log(directory, start="lowest").content == content([p for p in places if p.file_no >= last])


def test_the_file_that_current_names_stays(directory: str) -> None:
    """CURRENT follows the active file only with the next commit."""
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=FILE_BYTES)
    commit(writer, appends(1, [b"1"]), sync=True)
    (moved,) = commit(writer, appends(2, [b"2"]))
    file_no = writer.file_no
    assert writer.sync_failed(file_no, OSError(5, "gone")) is not None
    assert writer.file_no == file_no + 1
    assert writer.drop_files_below(writer.file_no) == 0
    kill(writer)
    assert read_log(directory).content.endswith(moved.content)


def test_a_dropped_file_is_durably_gone_before_the_call_returns(directory: str) -> None:
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory, file_bytes=FILE_BYTES)
    for seq in range(1, 24):
        commit(writer, appends(seq, [b'"xxxxxxxx"'] * 2))
    fs.log.clear()
    writer.drop_files_below(3)
    assert fs.log == ["unlink", "unlink", "fsync_dir"]
    fs.log.clear()
    writer.drop_files_below(3)
    assert fs.log == []
    kill(writer)


def drop(fs: FaultyFileSystem, directory: str, start: WalPosition) -> WalWriter:
    recovery = Recovery(fs, directory, IDENTITY, start=start)
    for _ in recovery:
        pass
    writer = open_writer(fs, directory, recovery.end, file_bytes=FILE_BYTES)
    writer.drop_files_below(start.file_no)
    return writer


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH, errno.EIO], ids=["before", "after", "error"])
def test_a_crash_at_each_step_of_dropping(directory: str, error: int) -> None:
    places = write_log(directory)
    start = next(before(place) for place in places if place.file_no == 4)
    expected = content([place for place in places if before(place) >= start])
    shutil.copytree(directory, f"{directory}-clean")
    clean = FaultyFileSystem()
    kill(drop(clean, f"{directory}-clean", start))
    steps = len(clean.log)
    assert clean.log.count("unlink") == 3
    for nth in range(1, steps + 1):
        copy = f"{directory}-{nth}"
        shutil.copytree(directory, copy)
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        with pytest.raises((OSError, WalWriteError) if error > 0 else Crash):
            drop(fs, copy, start)
        fs.bury()
        assert numbers(copy) == list(range(numbers(copy)[0], places[-1].file_no + 1)), "no hole"
        assert read_log(copy, start=start).content == expected
        lowest = numbers(copy)[0]
        assert read_log(copy, start="lowest").content == content([p for p in places if p.file_no >= lowest])
        writer = drop(FaultyFileSystem(), copy, start)
        assert numbers(copy) == list(range(4, places[-1].file_no + 1))
        (after,) = commit(writer, appends(99, [b"1"]))
        kill(writer)
        assert read_log(copy, start=start).content == expected + after.content


def test_every_file_of_a_trimmed_log_still_says_whose_it_is(directory: str) -> None:
    write_log(directory)
    os.unlink(layout.log_path(directory, 1))
    other = f"{directory}-other"
    write_log(other)
    shutil.copy(layout.log_path(other, 3), layout.log_path(directory, 3))
    with pytest.raises(CorruptLog, match="is not that of file 2"):
        read_log(directory, start=WalPosition(2, 0))
    assert scan(file_bytes(directory, 2), 0, FILE_BYTES).frames


@pytest.mark.parametrize("type", list(FrameType))
def test_a_frame_of_any_type_is_found_behind_damage(type: FrameType) -> None:
    buffer = b"\xff" * 11 + encode(type, 0, 1, 1, 1, b"", b"", b"") + bytes(100)
    found = survey(buffer, 0, 1)
    assert found.frames == 1
