"""Reading a log back: torn tails are cut, corruption is refused, and the two are not confused."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from topics.storage.frame import FLAG_MORE, FrameType, encode, scan
from topics.storage.logfile import FileStart, UnknownLogVersion, WalIdentity, file_start_frame
from topics.storage.recovery import BATCH_FRAMES, CorruptLog, Recovery
from topics.storage.wal import WalSyncError, WalWriter

payloads = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=4)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "wal")


def make_log(directory: str, groups: list[list[bytes]], sync: bool = False, **options: Any) -> list[Place]:
    """A log whose writer was killed after the last group."""
    writer = open_writer(FaultyFileSystem(), directory, **options)
    places = [place for group in groups for place in commit(writer, *group, sync=sync)]
    kill(writer)
    return places


def simple_groups(count: int, size: int = 20) -> list[list[bytes]]:
    return [[appends(seq, [b'"' + b"x" * size + b'"'])] for seq in range(1, count + 1)]


def closed_log(directory: str, count: int = 6, **options: Any) -> list[Place]:
    """A log that was closed in order: all of it is synced, and marked so."""
    writer = open_writer(FaultyFileSystem(), directory, **options)
    places = [place for group in simple_groups(count) for place in commit(writer, *group)]
    writer.close()
    return places


# -- torn tails


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(payloads, min_size=1, max_size=5), payloads, st.sampled_from([IDENTITY, LATER_BOOT]), st.randoms())
def test_a_tail_torn_at_every_byte(
    before: list[list[bytes]], last: list[bytes], identity: WalIdentity, noise: random.Random
) -> None:
    """Exactly the complete writes before it are read, and the log goes on from there."""
    with TemporaryDirectory() as root:
        directory = os.path.join(root, "wal")
        seq = 1
        writes = []
        for write in [*before, last]:
            writes.append(appends(seq, write))
            seq += len(write)
        *_, torn = make_log(directory, [[write] for write in writes])
        path = layout.log_path(directory, 1)
        whole = file_bytes(directory, 1)
        complete = b"".join(writes[:-1])
        end = torn.offset + len(torn.content)
        for cut in range(torn.offset, end):
            for tail in (bytes(len(whole) - cut), b"", noise.randbytes(end - cut) + bytes(len(whole) - end)):
                content = whole[:cut] + tail
                if content[: len(whole)].startswith(whole[:end]):
                    continue  # the noise happened to be what was there
                with open(path, "wb") as file:
                    file.write(content)
                read = read_log(directory, identity)
                assert read.content == complete, (cut, len(tail))
                assert read.recovery.end is not None
                assert read.recovery.end.offset == torn.offset
                dropped = len(content[torn.offset :].rstrip(b"\0"))
                assert read.recovery.torn_bytes == dropped
                assert len(read.recovery.report) == (1 if dropped else 0)
                assert all(path in line and f"offset {torn.offset}" in line for line in read.recovery.report)
                assert file_bytes(directory, 1)[torn.offset :].strip(b"\0") == b""
                assert read_log(directory, identity).recovery.report == []
        writer = open_writer(FaultyFileSystem(), directory, read_log(directory, identity).recovery.end, identity)
        (after,) = commit(writer, appends(seq, [b'"after"']))
        writer.close()
        assert read_log(directory, identity).content == complete + after.content


def test_a_write_of_several_frames_is_read_whole_or_not_at_all(directory: str) -> None:
    first, torn = make_log(directory, [[appends(1, [b"1"])], [appends(2, [b"2", b"3", b"4"])]])
    frames = scan(torn.content, 0, len(torn.content)).frames
    assert [frame[3] & FLAG_MORE for frame in frames] == [FLAG_MORE, FLAG_MORE, 0]
    last_frame_at = torn.offset + frames[2][0]
    patch(directory, 1, last_frame_at, bytes(frames[2][1]))
    read = read_log(directory)
    assert read.content == first.content
    assert read.recovery.torn_bytes == frames[2][0]
    assert "an incomplete write; dropped" in read.recovery.report[0]


def test_a_write_larger_than_a_batch_is_handed_out_whole(directory: str) -> None:
    count = 2 * BATCH_FRAMES + 5
    places = make_log(directory, [[appends(1, [b"1"] * count)], [appends(count + 1, [b"2"])]], file_bytes=4 << 20)
    batches = list(Recovery(FaultyFileSystem(), directory, IDENTITY))
    assert [len(batch.frames) for batch in batches] == [count + 1]
    assert read_log(directory).content == b"".join(place.content for place in places)


def test_batches_never_part_a_write_and_lose_nothing(directory: str) -> None:
    writes = [appends(seq, [b"1"] * 3) for seq in range(1, BATCH_FRAMES, 3)] * 3
    make_log(directory, [writes], file_bytes=8 << 20)
    recovery = Recovery(FaultyFileSystem(), directory, IDENTITY)
    batches = 0
    for batch in recovery:
        batches += 1
        assert batch.frames[-1][3] & FLAG_MORE == 0
        assert 0 < recovery.progress <= 1
    assert batches >= 3
    assert recovery.progress == 1
    assert read_log(directory).content == b"".join(writes)


def test_marks_and_file_frames_are_not_handed_out(directory: str) -> None:
    places = make_log(directory, simple_groups(12), sync=True, file_bytes=500)
    types = {frame[2] for batch in Recovery(FaultyFileSystem(), directory, IDENTITY) for frame in batch.frames}
    assert types == {FrameType.APPEND}
    assert read_log(directory).content == b"".join(place.content for place in places)


def test_an_unknown_frame_type_at_the_end_is_a_torn_tail(directory: str) -> None:
    (place,) = make_log(directory, simple_groups(1))
    end = place.offset + len(place.content)
    patch(directory, 1, end, encode(99, 0, 0, 0, 0, b"", b"", b""))
    read = read_log(directory)
    assert read.content == place.content
    assert f"torn tail at offset {end}: unknown frame type; dropped 46 bytes" in read.recovery.report[0]


def test_what_was_recovered_is_synced(directory: str) -> None:
    make_log(directory, simple_groups(8), file_bytes=400)
    fs = FaultyFileSystem()
    read_log(directory, fs=fs)
    assert fs.log[-2:] == ["open", "fdatasync"]


def test_a_file_that_was_finished_just_before_the_end_is_synced_too(directory: str) -> None:
    *_, second_file = rotated_log(directory)
    patch(directory, 2, second_file.offset, bytes(len(second_file.content)))
    fs = FaultyFileSystem()
    read_log(directory, fs=fs)
    assert fs.log[-4:] == ["open", "fdatasync", "open", "fdatasync"]


# -- power loss: pages reach the disk in any order


def test_after_a_power_loss_a_hole_in_unsynced_bytes_is_a_torn_tail(directory: str) -> None:
    places = make_log(directory, simple_groups(5))
    hole = places[2]
    patch(directory, 1, hole.offset, bytes(len(hole.content)))
    read = read_log(directory, LATER_BOOT)
    assert read.content == places[0].content + places[1].content
    assert f"torn tail at offset {hole.offset}" in read.recovery.report[0]


def test_after_a_power_loss_a_hole_in_synced_bytes_is_corruption(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory)
    places = [commit(writer, *group)[0] for group in simple_groups(3)]
    commit(writer, appends(4, [b"4"]), sync=True)
    commit(writer, appends(5, [b"5"]))  # carries the mark
    kill(writer)
    patch(directory, 1, places[1].offset, bytes(len(places[1].content)))
    with pytest.raises(CorruptLog, match="known to have been on the disk") as caught:
        read_log(directory, LATER_BOOT)
    assert caught.value.offset == places[1].offset


def test_without_a_power_loss_any_hole_is_corruption(directory: str) -> None:
    places = make_log(directory, simple_groups(3))
    patch(directory, 1, places[1].offset, bytes(len(places[1].content)))
    with pytest.raises(CorruptLog, match="the machine has not stopped since") as caught:
        read_log(directory)
    assert caught.value.offset == places[1].offset
    assert "1 valid frames, 1 of them records, in 1 files" in str(caught.value)


# -- corruption


@pytest.mark.parametrize("identity", [IDENTITY, LATER_BOOT], ids=["same-boot", "later-boot"])
def test_a_flipped_bit_in_synced_bytes_is_refused_with_file_and_offset(directory: str, identity: WalIdentity) -> None:
    closed_log(directory, count=20, file_bytes=600)
    clean = {no: file_bytes(directory, no) for no in layout.list_log_files(FaultyFileSystem(), directory)}
    end = read_log(directory).recovery.end
    assert end is not None
    assert end.file_no > 2
    noise = random.Random(20)
    flips = 0
    for file_no, content in clean.items():
        frames = scan(content, 0, len(content)).frames
        # The last frame of the log is the mark that vouches for the others: nothing vouches for it.
        used = frames[-1][0] if file_no == end.file_no else frames[-1][0] + frames[-1][1]
        for bit in [*noise.sample(range(used * 8), 150), used * 8 - 1]:
            damaged_frame = max(frame[0] for frame in frames if frame[0] <= bit // 8)
            patch(directory, file_no, bit // 8, bytes([content[bit // 8] ^ 1 << bit % 8]))
            with pytest.raises(CorruptLog) as caught:
                read_log(directory, identity)
            patch(directory, file_no, bit // 8, content[bit // 8 : bit // 8 + 1])
            assert caught.value.path == layout.log_path(directory, file_no)
            assert caught.value.offset == damaged_frame
            assert str(caught.value).startswith(f"{caught.value.path}: corrupt at offset {damaged_frame}: ")
            flips += 1
    assert flips >= 450
    assert {no: file_bytes(directory, no) for no in clean} == clean  # a refusal changes nothing
    read_log(directory, identity)


def damaged(directory: str) -> CorruptLog:
    with pytest.raises(CorruptLog) as caught:
        read_log(directory)
    return caught.value


def test_zeros_in_the_middle(directory: str) -> None:
    places = closed_log(directory)
    patch(directory, 1, places[2].offset, bytes(64))
    error = damaged(directory)
    assert (error.path, error.offset) == (layout.log_path(directory, 1), places[2].offset)


def test_a_finished_file_that_was_cut_short(directory: str) -> None:
    places = closed_log(directory, count=20, file_bytes=600)
    os.truncate(layout.log_path(directory, 1), places[1].offset + 10)
    error = damaged(directory)
    assert (error.path, error.offset) == (layout.log_path(directory, 1), places[1].offset)
    assert "though the log goes on in the next file" in str(error)


def test_a_finished_file_that_was_cut_between_two_frames(directory: str) -> None:
    places = closed_log(directory, count=20, file_bytes=600)
    os.truncate(layout.log_path(directory, 1), places[1].offset)
    assert damaged(directory).offset == places[1].offset


def test_an_emptied_file(directory: str) -> None:
    closed_log(directory, count=20, file_bytes=600)
    os.truncate(layout.log_path(directory, 2), 0)
    error = damaged(directory)
    assert (error.path, error.offset) == (layout.log_path(directory, 2), 0)
    assert "not a file of this log" in str(error)


def test_a_missing_file_in_the_middle(directory: str) -> None:
    closed_log(directory, count=20, file_bytes=600)
    os.unlink(layout.log_path(directory, 2))
    error = damaged(directory)
    assert (error.path, error.reason) == (layout.log_path(directory, 2), "the file is missing")


def test_a_missing_first_file(directory: str) -> None:
    closed_log(directory, count=20, file_bytes=600)
    os.unlink(layout.log_path(directory, 1))
    assert damaged(directory).path == layout.log_path(directory, 1)


def test_a_missing_last_file(directory: str) -> None:
    closed_log(directory, count=20, file_bytes=600)
    last = layout.list_log_files(FaultyFileSystem(), directory)[-1]
    os.unlink(layout.log_path(directory, last))
    error = damaged(directory)
    assert (error.path, error.reason) == (layout.log_path(directory, last), "the file is missing")
    os.unlink(os.path.join(directory, layout.CURRENT_NAME))
    assert "the file was finished, but the next one is missing" in str(damaged(directory))


def test_all_files_missing(directory: str) -> None:
    closed_log(directory)
    os.unlink(layout.log_path(directory, 1))
    assert damaged(directory).reason == "the file is missing"


def test_two_files_swapped(directory: str) -> None:
    closed_log(directory, count=20, file_bytes=600)
    first, second = layout.log_path(directory, 1), layout.log_path(directory, 2)
    os.rename(first, first + ".x")
    os.rename(second, first)
    os.rename(first + ".x", second)
    error = damaged(directory)
    assert error.path == first
    assert "it is file 2 of shard 0 of 1, expected file 1 of shard 0 of 1" in str(error)


def test_a_file_of_another_log(directory: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    closed_log(directory, count=20, file_bytes=600)
    closed_log(other, count=20, file_bytes=600)
    shutil.copy(layout.log_path(other, 2), layout.log_path(directory, 2))
    error = damaged(directory)
    assert error.path == layout.log_path(directory, 2)
    assert "is not that of file 1" in str(error)


def test_an_older_copy_of_a_file(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory, file_bytes=600)
    commit(writer, appends(1, [b"1"]))
    older = file_bytes(directory, 1)
    end = writer.offset
    while writer.file_no < 3:
        commit(writer, appends(2, [b'"x"' * 10]))
    kill(writer)
    patch(directory, 1, 0, older)
    assert damaged(directory).offset == end


def test_the_log_of_another_shard(directory: str) -> None:
    closed_log(directory, identity=WalIdentity(1, 2, "boot-1"))
    assert "it is file 1 of shard 1 of 2, expected file 1 of shard 0 of 1" in str(damaged(directory))


def test_a_frame_of_the_framing_in_the_wrong_place(directory: str) -> None:
    (place,) = make_log(directory, simple_groups(1))
    end = place.offset + len(place.content)
    stray = encode(FrameType.FILE_END, 0, 9, end, 0, b"", b"", b"")
    patch(directory, 1, end, stray)
    assert "a misplaced frame of type FILE_END" in str(damaged(directory))


def rotated_log(directory: str) -> list[Place]:
    """Two files; the second has one group."""
    writer = open_writer(FaultyFileSystem(), directory, file_bytes=600)
    places: list[Place] = []
    while writer.file_no == 1:
        places += commit(writer, appends(len(places) + 1, [b'"xxxxxxxx"']))
    kill(writer)
    return places


def test_the_end_of_a_finished_file_is_missed_also_when_the_next_is_empty(directory: str) -> None:
    """CURRENT knows that the next one is no spare."""
    *first_file, second_file = rotated_log(directory)
    end = first_file[-1].offset + len(first_file[-1].content)
    patch(directory, 2, second_file.offset, bytes(len(second_file.content)))
    patch(directory, 1, end, bytes(200))
    error = damaged(directory)
    assert (error.path, error.offset) == (layout.log_path(directory, 1), end)


def test_an_incomplete_write_before_the_end_of_a_file(directory: str) -> None:
    writer = open_writer(FaultyFileSystem(), directory, file_bytes=600)
    (incomplete,) = commit(writer, encode(FrameType.APPEND, FLAG_MORE, 1, 1, 1, b"", b"", b"1"))
    end = writer.offset
    commit(writer, appends(2, [b'"x"' * 200]))
    assert writer.file_no == 2
    kill(writer)
    error = damaged(directory)
    assert (error.path, error.offset) == (layout.log_path(directory, incomplete.file_no), end)
    assert "an incomplete write" in error.reason


def test_damage_before_the_place_where_the_next_file_takes_over(directory: str) -> None:
    """After a failed sync a file ends where its successor says, and must be whole up to there."""
    fs = FaultyFileSystem()
    writer = open_writer(fs, directory)
    commit(writer, appends(1, [b'"synced"']), sync=True)
    (synced,) = commit(writer, appends(2, [b'"synced as well"']), sync=True)
    (moved,) = commit(writer, appends(3, [b'"not synced"']))
    fs.arm(Fault(1, errno.EIO, calls=frozenset({"fdatasync"})))
    with pytest.raises(WalSyncError):
        commit(writer, appends(4, [b'"refused"']), sync=True)
    kill(writer)
    content = read_log(directory).content
    patch(directory, 1, moved.offset, b"\xff" * len(moved.content))  # behind that place anything may be
    assert read_log(directory).content == content
    patch(directory, 1, synced.offset + 9, b"\xff")
    error = damaged(directory)
    assert (error.path, error.offset) == (layout.log_path(directory, 1), synced.offset)
    assert "bytes were synced" in error.reason


def test_a_valid_frame_whose_checksum_ends_in_zeros_is_found_behind_damage(directory: str) -> None:
    write = next(write for seq in range(1, 5000) if (write := appends(seq, [b"1"])).endswith(b"\0"))
    damaged_place, _ = make_log(directory, [[appends(1, [b'"first"'])], [write]])
    patch(directory, 1, damaged_place.offset + 8, b"\xff")
    assert "1 valid frames" in damaged(directory).lost


def test_an_unknown_version_is_refused_never_guessed(directory: str) -> None:
    os.mkdir(directory)
    start = FileStart(3, 1, 1, 0, 1, "boot-1")
    with open(layout.log_path(directory, 1), "wb") as file:
        file.write(file_start_frame(start) + bytes(1000))
    for accept in (False, True):
        with pytest.raises(
            UnknownLogVersion, match=r"log format version 3 is unknown \(this release reads version 2\)"
        ):
            read_log(directory, accept_data_loss=accept)


def test_a_current_that_names_nothing(directory: str) -> None:
    places = closed_log(directory)
    with open(os.path.join(directory, layout.CURRENT_NAME), "w") as file:
        file.write("nonsense")
    with pytest.raises(Exception, match="holds b'nonsense' instead of a log file's name"):
        read_log(directory)
    read = read_log(directory, accept_data_loss=True)
    assert read.content == b"".join(place.content for place in places)
    assert read_log(directory).recovery.report == []


def test_a_missing_current_is_made_again(directory: str) -> None:
    places = closed_log(directory, count=20, file_bytes=600)
    os.unlink(os.path.join(directory, layout.CURRENT_NAME))
    read = read_log(directory)
    assert read.content == b"".join(place.content for place in places)
    assert "CURRENT is missing and is made again" in read.recovery.report[0]
    assert read_log(directory).recovery.report == []


def test_what_cannot_be_read_is_an_error_not_an_empty_log(directory: str) -> None:
    closed_log(directory)
    for call, count in (("pread", 3), ("open", 3)):
        for nth in range(1, count):
            fs = FaultyFileSystem()
            fs.arm(Fault(nth, errno.EIO, calls=frozenset({call})))
            with pytest.raises(OSError, match="Input/output error"):
                read_log(directory, fs=fs)


# -- going on without what is damaged


def test_accepted_data_loss_keeps_what_is_before_and_a_copy_of_everything(directory: str) -> None:
    places = closed_log(directory, count=20, file_bytes=600)
    damaged_place = [place for place in places if place.file_no == 2][2]
    kept = places[: places.index(damaged_place)]
    patch(directory, 2, damaged_place.offset + 20, b"\xff")
    names = set(os.listdir(directory))
    last = damaged(directory)
    assert "start with --accept-data-loss" in str(last)
    contents = {name: Path(directory, name).read_bytes() for name in names}

    read = read_log(directory, accept_data_loss=True)
    assert read.content == b"".join(place.content for place in kept)
    assert "accepted the loss of" in read.recovery.report[0]
    now = {name: Path(directory, name).read_bytes() for name in os.listdir(directory)}
    assert contents[layout.log_name(2)] == now[layout.log_name(2) + ".damaged-1"]
    for name in names - {layout.COMMITTED_NAME, layout.CURRENT_NAME, layout.log_name(1), layout.log_name(2)}:
        assert name not in now
        assert now[name + ".damaged-1"] == contents[name]

    goes_on_behind(directory, read.content)


def goes_on_behind(directory: str, content: bytes) -> None:
    """Assert that the log is whole up to here and can be written behind it."""
    again = read_log(directory)
    assert (again.content, again.recovery.report) == (content, [])
    writer = open_writer(FaultyFileSystem(), directory, again.recovery.end)
    (after,) = commit(writer, appends(5, [b'"after"']))
    writer.close()
    assert read_log(directory).content == content + after.content


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_accepted_loss_of_a_missing_file(directory: str, missing: int) -> None:
    places = closed_log(directory, count=20, file_bytes=600)
    os.unlink(layout.log_path(directory, missing))
    read = read_log(directory, accept_data_loss=True)
    assert read.content == b"".join(place.content for place in places if place.file_no < missing)
    goes_on_behind(directory, read.content)


# -- crashes while recovering


def states(directory: str) -> list[str]:
    """Logs that recovery has to repair, each in a directory of its own."""
    torn, rotating, spare, accepted = (f"{directory}-{name}" for name in ("torn", "rotating", "spare", "accepted"))
    *_, last = make_log(torn, [*simple_groups(2), [appends(3, [b"1", b"2", b"3"])]], file_bytes=400)
    patch(torn, last.file_no, last.offset + 100, bytes(200))
    make_log(rotating, simple_groups(2), file_bytes=400)
    os.unlink(os.path.join(rotating, layout.CURRENT_NAME))
    Path(rotating, layout.log_name(2) + ".tmp").write_bytes(b"half a file")
    writer = open_writer(FaultyFileSystem(), spare, file_bytes=400)
    commit(writer, *simple_groups(1)[0])
    writer._make_file(2, 400)
    kill(writer)
    closed_log(accepted, count=12, file_bytes=400)
    patch(accepted, 2, 200, b"\xff\xff")
    return [torn, rotating, spare, accepted]


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.TORN_CRASH, Fault.LATE_CRASH], ids=["before", "torn", "after"])
def test_a_crash_inside_recovery_and_inside_the_next(directory: str, error: int) -> None:
    crashes = 0
    for origin in states(directory):
        accept = origin.endswith("accepted")
        shutil.copytree(origin, f"{origin}-clean")
        clean = FaultyFileSystem()
        expected = read_log(f"{origin}-clean", fs=clean, accept_data_loss=accept).content
        for nth in range(1, len(clean.log) + 1):
            for nth_again in (None, *sorted({1, (nth + 1) // 2, nth})):
                copy = f"{origin}-{nth}-{nth_again}"
                shutil.copytree(origin, copy)
                for crash_at in (nth, nth_again):
                    if crash_at is not None:
                        fs = FaultyFileSystem()
                        fs.arm(Fault(crash_at, error))
                        try:
                            read_log(copy, fs=fs, accept_data_loss=accept)
                        except Crash:
                            crashes += 1
                        fs.bury()
                        numbers = layout.list_log_files(FaultyFileSystem(), copy)
                        assert numbers == list(range(1, len(numbers) + 1)), copy
                assert read_log(copy, accept_data_loss=accept).content == expected, (copy, clean.log)
                last = read_log(copy)
                assert (last.content, last.recovery.report) == (expected, []), copy
                assert not [name for name in os.listdir(copy) if name.endswith(layout.TMP_SUFFIX)]
                shutil.rmtree(copy)
    assert crashes >= 150


def test_an_error_inside_recovery_is_raised_and_harmless(directory: str) -> None:
    for origin in states(directory):
        accept = origin.endswith("accepted")
        shutil.copytree(origin, f"{origin}-clean")
        clean = FaultyFileSystem()
        expected = read_log(f"{origin}-clean", fs=clean, accept_data_loss=accept).content
        for nth in range(1, len(clean.log) + 1):
            copy = f"{origin}-{nth}"
            shutil.copytree(origin, copy)
            fs = FaultyFileSystem()
            fs.arm(Fault(nth, errno.EIO))
            with pytest.raises(OSError, match="Input/output error"):
                read_log(copy, fs=fs, accept_data_loss=accept)
            assert read_log(copy, accept_data_loss=accept).content == expected


def test_a_directory_that_does_not_exist_is_a_log_that_was_never_written(directory: str) -> None:
    read = read_log(directory)
    assert (read.content, read.recovery.end, read.recovery.progress) == (b"", None, 1.0)
    os.mkdir(directory)
    assert read_log(directory).recovery.end is None


def test_a_spare_is_removed_and_counts_as_nothing(directory: str) -> None:
    writer: WalWriter = open_writer(FaultyFileSystem(), directory)
    (place,) = commit(writer, appends(1, [b"1"]))
    writer._make_file(2, 4096)
    kill(writer)
    read = read_log(directory)
    assert (read.content, read.recovery.report) == (place.content, [])
    assert sorted(os.listdir(directory)) == [layout.COMMITTED_NAME, layout.CURRENT_NAME, layout.log_name(1)]
