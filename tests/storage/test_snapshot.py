"""Snapshots: the newest valid one counts, at any moment there is one, and an unknown one is never guessed at."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.faults import ERRNOS, Crash, Fault, FaultyFileSystem
from tests.storage.logs import IDENTITY, kill, open_writer
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.logfile import LOG_VERSION, FileStart, RefusedLog, WalPosition, file_start_frame
from topics.storage.snapshot import (
    BadSnapshot,
    ShardPart,
    UnknownSnapshotVersion,
    encode_parts,
    load_snapshot,
    read_snapshot,
    save_snapshot,
)

FS = OsFileSystem()


def body_of(name: str) -> bytes:
    """Return a body that goes with any logs: it has no part, but a field that a reader skips."""
    return msgspec.msgpack.encode({"shards": [], "name": name})


FIRST, SECOND, THIRD = BODIES = [body_of(name) for name in ("first", "second", "third")]
OF_OTHER_LOGS = encode_parts([ShardPart(0, 1, 7, WalPosition(1, 0), msgspec.Raw(b"\x90"))])
SAVING = ["open", "pwritev", "fdatasync", "rename", "fsync_dir", "open", "unlink"]
"""The second `open` is of the one before, which stays if it is valid."""


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    return str(tmp_path)


def newest(data_dir: str) -> tuple[int, bytes, list[BadSnapshot]]:
    """Return the number and the body of the snapshot that counts, and those that were skipped."""
    found = load_snapshot(FS, data_dir)
    assert found is not None
    return found.number, read_snapshot(FS, data_dir, found.number), found.skipped


def numbers(data_dir: str) -> list[int]:
    return layout.list_snapshots(FS, data_dir)


def put(data_dir: str, number: int, content: bytes) -> str:
    path = layout.snapshot_path(data_dir, number)
    Path(path).write_bytes(content)
    return path


def test_every_byte_is_where_the_format_says(data_dir: str) -> None:
    assert save_snapshot(FS, data_dir, b"body") == (1, None)
    path = Path(data_dir, "meta", "snapshot.00000000000000000001.bin")
    prefix = b"topicSNP" + struct.pack("<I4xQ", 1, 4)
    assert path.read_bytes() == prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + b"body")) + b"body"
    assert path.read_bytes().hex() == "746f706963534e5001000000000000000400000000000000f98c0491232f7d09626f6479"


def test_there_is_none_yet(data_dir: str) -> None:
    assert load_snapshot(FS, data_dir) is None
    assert os.listdir(data_dir) == []


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_a_body_comes_back(body: bytes) -> None:
    with TemporaryDirectory() as data_dir:
        save_snapshot(FS, data_dir, body)
        assert read_snapshot(FS, data_dir, 1) == body


def test_numbers_increase_and_the_one_before_the_newest_stays(data_dir: str) -> None:
    for number, body in enumerate(BODIES, 1):
        assert save_snapshot(FS, data_dir, body) == (number, number - 1 or None)
        assert numbers(data_dir) == [one for one in (number - 1, number) if one]
        assert newest(data_dir) == (number, body, [])
    assert read_snapshot(FS, data_dir, 2) == SECOND
    os.unlink(layout.snapshot_path(data_dir, 2))
    assert save_snapshot(FS, data_dir, b"fourth") == (4, 3)


def test_damaged_ones_are_passed_over_and_named(data_dir: str) -> None:
    for body in BODIES:
        save_snapshot(FS, data_dir, body)
    path = layout.snapshot_path(data_dir, 3)
    whole = Path(path).read_bytes()
    damaged = [
        bytes([*whole[:at], whole[at] ^ 1 << bit, *whole[at + 1 :]]) for at in range(len(whole)) for bit in range(8)
    ]
    damaged += [whole[:length] for length in range(len(whole))] + [whole + b"\0", bytes(len(whole))]
    damaged += [Path(layout.snapshot_path(data_dir, 2)).read_bytes()[:-1]]
    for content in damaged:
        put(data_dir, 3, content)
        number, body, (skipped,) = newest(data_dir)
        assert (number, body) == (2, SECOND)
        assert skipped.path == path
        assert str(skipped).startswith(f"{path}: cannot be used, at offset {skipped.offset}: ")


@pytest.mark.parametrize("damage", ["bit", "short", "gone"])
def test_a_damaged_one_pushes_out_no_valid_one(data_dir: str, damage: str) -> None:
    """The one to fall back on is valid, or there was none."""
    for body in BODIES:
        save_snapshot(FS, data_dir, body)
    path = Path(layout.snapshot_path(data_dir, 3))
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "short" else bytes([content[0] ^ 1]) + content[1:])
    number, fallback = save_snapshot(FS, data_dir, b"fourth")
    assert fallback == 2
    assert numbers(data_dir) == [2, number]
    put(data_dir, number, b"")
    assert newest(data_dir)[:2] == (2, SECOND)
    assert save_snapshot(FS, data_dir, b"fifth") == (number + 1, 2)
    assert numbers(data_dir) == [2, number + 1]
    save_snapshot(FS, data_dir, b"sixth")
    assert numbers(data_dir) == [number + 1, number + 2]


def test_when_all_are_damaged_it_is_not_as_if_there_were_none(data_dir: str) -> None:
    save_snapshot(FS, data_dir, FIRST)
    path = put(data_dir, 2, b"")
    put(data_dir, 1, b"topic")
    with pytest.raises(RefusedLog, match="the file ends inside its header") as caught:
        load_snapshot(FS, data_dir)
    assert caught.value.path == path


def test_one_that_goes_with_other_logs_is_passed_over(data_dir: str) -> None:
    for body in (FIRST, OF_OTHER_LOGS, b"no body"):
        save_snapshot(FS, data_dir, body)
    put(data_dir, 1, Path(layout.snapshot_path(data_dir, 2)).read_bytes())
    with pytest.raises(RefusedLog, match="goes with other logs than those that are here"):
        load_snapshot(FS, data_dir)
    save_snapshot(FS, data_dir, FIRST)
    save_snapshot(FS, data_dir, OF_OTHER_LOGS)
    number, body, skipped = newest(data_dir)
    assert (number, body) == (4, FIRST)
    assert [bad.path for bad in skipped] == [layout.snapshot_path(data_dir, 5)]


@pytest.mark.parametrize("version", [LOG_VERSION, LOG_VERSION + 1])
def test_a_log_that_cannot_be_read_is_named_and_no_snapshot_for_it(data_dir: str, version: int) -> None:
    directory = layout.wal_dir(data_dir)
    writer = open_writer(FaultyFileSystem(), directory)
    kill(writer)
    save_snapshot(FS, data_dir, encode_parts([ShardPart(0, 1, writer.log_id, WalPosition(1, 0), msgspec.Raw(b"\x90"))]))
    assert newest(data_dir)[0] == 1
    path = Path(layout.log_path(directory, 1))
    damaged = file_start_frame(FileStart(version, writer.log_id, 1, 0, 1, IDENTITY.boot_id))
    path.write_bytes(damaged if version != LOG_VERSION else damaged[:-1] + b"x")
    reason = "not a log file: checksum does not match" if version == LOG_VERSION else f"version {version} is unknown"
    with pytest.raises(RefusedLog, match=reason) as caught:
        load_snapshot(FS, data_dir)
    assert caught.value.path == str(path)


def test_an_unknown_version_is_refused_though_an_older_one_is_valid(data_dir: str) -> None:
    save_snapshot(FS, data_dir, b"first")
    prefix = b"topicSNP" + struct.pack("<I4xQ", 2, 3)
    path = put(data_dir, 2, prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + b"new")) + b"new")
    with pytest.raises(
        UnknownSnapshotVersion, match=r"version 2 is unknown \(this release reads version 1\)"
    ) as caught:
        load_snapshot(FS, data_dir)
    assert (caught.value.path, caught.value.version) == (path, 2)


def test_the_first_one_makes_its_directory_durably(data_dir: str) -> None:
    fs = FaultyFileSystem()
    save_snapshot(fs, data_dir, b"first")
    assert fs.log == ["mkdir", "fsync_dir", *SAVING[:-2]]


@pytest.mark.parametrize("nth", range(1, len(SAVING) + 1))
@pytest.mark.parametrize("error", [Fault.CRASH, Fault.TORN_CRASH, Fault.LATE_CRASH])
def test_killed_at_any_call_the_former_or_the_new_one_counts(data_dir: str, nth: int, error: int) -> None:
    for body in BODIES[:2]:
        save_snapshot(FS, data_dir, body)
    fs = FaultyFileSystem()
    fs.arm(Fault(nth, error))
    with pytest.raises(Crash):
        save_snapshot(fs, data_dir, THIRD)
    assert fs.log == SAVING[:nth]
    fs.bury()
    renamed = nth > 4 or (nth == 4 and error == Fault.LATE_CRASH)
    assert newest(data_dir) == ((3, THIRD, []) if renamed else (2, SECOND, []))
    # The one before is not removed until the new one's name is on the disk.
    assert (1 in numbers(data_dir)) == (nth < 7 or error != Fault.LATE_CRASH)
    save_snapshot(FS, data_dir, b"next")
    assert numbers(data_dir) == ([3, 4] if renamed else [2, 3])


@pytest.mark.parametrize("call", SAVING)
@pytest.mark.parametrize("error", ERRNOS)
def test_a_failure_is_told_and_the_former_ones_stay(data_dir: str, call: str, error: int) -> None:
    for body in BODIES[:2]:
        save_snapshot(FS, data_dir, body)
    fs = FaultyFileSystem()
    fs.arm(Fault(1, error, calls=frozenset({call})))
    if call == "unlink":  # it is saved, and the old one goes with the next
        assert save_snapshot(fs, data_dir, b"third") == (3, 2)
        assert numbers(data_dir) == [1, 2, 3]
    else:
        with pytest.raises(OSError, match=call):
            save_snapshot(fs, data_dir, b"third")
        assert numbers(data_dir)[:2] == [1, 2]
        assert len(os.listdir(layout.meta_dir(data_dir))) == len(numbers(data_dir))
    assert fs.struck == 1
    save_snapshot(FS, data_dir, FIRST)
    assert newest(data_dir)[1] == FIRST
    assert len(numbers(data_dir)) == 2
