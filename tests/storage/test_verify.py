"""The offline check finds whatever is not what was written, says where, and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.storage.faults import FaultyFileSystem
from tests.storage.logs import TOPIC_ID, TS_MS, appends, commit, kill, open_writer, topic_create
from tests.storage.segments import Record, logged, make_segment
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem, boot_id
from topics.storage.frame import FrameType, encode
from topics.storage.lock import DataDirLock, DataDirLocked, holder_pid
from topics.storage.logfile import WalIdentity, WalPosition, parse_file_start
from topics.storage.postings import write_postings
from topics.storage.segment_deletes import mark_deleted
from topics.storage.segment_writer import SegmentWriter
from topics.storage.snapshot import save_snapshot
from topics.storage.verify import Finding, Kind, NotADataDir, Report, SnapshotFacts, verify

SEALED = [Record(b'"a"', b"n", b"t"), Record(b'"b"', tag=b"u"), Record(b'"c"', tag=b"t", meta=b'{"k":1}')]
ACTIVE = [Record(b'"d"'), Record(b'"e"', tag=b"v")]
MARK_SEQ = len(SEALED) + len(ACTIVE)


def mark_frame(seq: int = MARK_SEQ) -> bytes:
    return encode(FrameType.CHECKPOINT_MARK, 0, TOPIC_ID, seq, TS_MS, b"", b"", b"")


def fill(data_dir: str, shard: int = 0, shards: int = 1, closed: bool = True) -> None:
    """A service that was stopped: two log files, a sealed and an active segment, two snapshots."""
    writer = open_writer(
        FaultyFileSystem(),
        layout.group_dir(data_dir, shard, shards),
        identity=WalIdentity(shard, shards, boot_id()),
        file_bytes=512,
    )
    commit(writer, topic_create(TOPIC_ID, "orders"))
    for seq in range(1, MARK_SEQ + 1):
        commit(writer, appends(seq, [b'"%d"' % seq * 4]))
    commit(writer, mark_frame())
    writer.close() if closed else kill(writer)
    make_segment(FaultyFileSystem(), data_dir, SEALED)
    make_segment(FaultyFileSystem(), data_dir, ACTIVE, first_seq=len(SEALED) + 1, sealed=False)
    mark_deleted(OsFileSystem(), layout.topic_dir(data_dir, TOPIC_ID), 1, [2])
    for body in (b"before", b"now"):
        save_snapshot(OsFileSystem(), data_dir, body)


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    path = str(tmp_path / "data")
    os.mkdir(path)
    fill(path)
    return path


def check(data_dir: str) -> Report:
    return verify(data_dir, lambda share: None, lambda body: SnapshotFacts({}, {TOPIC_ID: MARK_SEQ}))


def files(data_dir: str) -> Iterator[Path]:
    return (path for path in sorted(Path(data_dir).rglob("*")) if path.is_file())


def everything(data_dir: str) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(data_dir)}


def topic_file(data_dir: str, first_seq: int, suffix: str) -> Path:
    return Path(layout.topic_dir(data_dir, TOPIC_ID), f"seg-{first_seq:020d}.{suffix}")


def test_a_stopped_service_left_everything_in_order(data_dir: str) -> None:
    shares: list[float] = []
    report = verify(data_dir, shares.append, lambda body: SnapshotFacts({}, {TOPIC_ID: MARK_SEQ}))
    assert (report.damage, report.notes) == ([], [])
    assert (report.log_frames, report.segments, report.segment_records) == (MARK_SEQ + 2, 2, MARK_SEQ)
    assert (report.postings, report.snapshots) == (1, 2)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 5


def test_any_flipped_bit_of_any_file_is_found(data_dir: str) -> None:
    """One bit of every byte of every file, each bit's turn; the file is named."""
    kinds = {".log": Kind.LOG, "CURRENT": Kind.LOG, ".bin": Kind.SNAPSHOT, ".tags": Kind.POSTINGS}
    seen = set()
    flipped = 0
    for path in files(data_dir):
        content = path.read_bytes()
        ending = path.suffix or path.name
        seen.add(ending)
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << (at * 5 + 3) % 8]) + content[at + 1 :])
            report = check(data_dir)
            flipped += 1
            place = f"{path}, byte {at} of {len(content)}"
            if report.damage:
                assert kinds.get(ending, Kind.SEGMENT) in {finding.kind for finding in report.damage}, place
            else:
                # Not told from a tail that was being written, or a CURRENT that was being replaced.
                assert ending in (".log", "CURRENT"), place
                assert report.notes, place
        path.write_bytes(content)
    assert seen == {".log", "CURRENT", ".data", ".idx", ".tags", ".bin"}
    assert flipped > 1500
    assert check(data_dir).damage == []


def test_a_file_that_is_missing_cut_or_zeroed_is_found(data_dir: str) -> None:
    for path in list(files(data_dir)):
        content = path.read_bytes()
        for damaged in (None, content[: len(content) // 2], bytes(len(content)), b""):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            report = check(data_dir)
            found = bool(report.damage or report.notes)
            # Postings make a segment a sealed one, and snapshots are numbered from any number on.
            may_be_missing = damaged is None and (path.suffix == ".bin" or path.name == "CURRENT")
            assert found or may_be_missing, (path, damaged)
            path.write_bytes(content)
    assert check(data_dir).damage == []


def test_files_in_each_others_place_are_found(data_dir: str) -> None:
    other = topic_file(data_dir, 1, "data").read_bytes()
    for suffix in ("data", "idx"):
        path = topic_file(data_dir, len(SEALED) + 1, suffix)
        content = path.read_bytes()
        path.write_bytes(topic_file(data_dir, 1, suffix).read_bytes())
        assert {finding.kind for finding in check(data_dir).damage} == {Kind.SEGMENT}
        path.write_bytes(content)
    topic_file(data_dir, 1, "data").write_bytes(topic_file(data_dir, len(SEALED) + 1, "data").read_bytes())
    assert check(data_dir).damage
    topic_file(data_dir, 1, "data").write_bytes(other)
    write_postings(OsFileSystem(), layout.topic_dir(data_dir, TOPIC_ID), 1, 3, [(1, b"t"), (2, b"t"), (3, b"u")])
    (finding,) = check(data_dir).damage
    assert (finding.kind, finding.path) == (Kind.POSTINGS, str(topic_file(data_dir, 1, "tags")))
    write_postings(OsFileSystem(), layout.topic_dir(data_dir, TOPIC_ID), 1, 2, [])
    assert "is of 2 records from seq 1, the segment has 3 from 1" in check(data_dir).damage[0].reason


def test_damage_names_file_and_offset(data_dir: str) -> None:
    path = topic_file(data_dir, 1, "data")
    content = bytearray(path.read_bytes())
    second = int.from_bytes(content[:4], "little") + 4
    content[second + 30] ^= 1
    path.write_bytes(content)
    (finding,) = check(data_dir).damage
    assert finding == Finding(Kind.SEGMENT, str(path), second, "checksum does not match")


def test_one_damaged_file_does_not_hide_another(data_dir: str) -> None:
    paths = [topic_file(data_dir, 1, "tags"), topic_file(data_dir, len(SEALED) + 1, "data"), Path(data_dir, "meta")]
    paths[2] = sorted(paths[2].iterdir())[0]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert {(finding.kind, finding.path) for finding in check(data_dir).damage} == {
        (kind, str(path)) for kind, path in zip((Kind.POSTINGS, Kind.SEGMENT, Kind.SNAPSHOT), paths, strict=True)
    }


# -- what a killed service leaves is no damage


def test_a_torn_tail_is_a_note(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    fill(data_dir, closed=False)
    path = max(Path(data_dir, "wal").glob("*.log"))
    content = path.read_bytes()
    used = len(content.rstrip(b"\0"))
    path.write_bytes(content[: used - 3] + bytes(len(content) - used + 3))
    before = everything(data_dir)
    report = check(data_dir)
    assert report.damage == []
    (note,) = report.notes
    assert f"{path}: torn tail at offset" in note
    assert everything(data_dir) == before


def test_an_append_before_its_mark_is_a_note(data_dir: str) -> None:
    directory = layout.topic_dir(data_dir, TOPIC_ID)
    first_seq = len(SEALED) + 1
    active_bytes = topic_file(data_dir, first_seq, "data").stat().st_size
    more = logged([Record(b'"more"', tag=b"w")] * 3, first_seq=MARK_SEQ + 1)
    writer = SegmentWriter.reopen(OsFileSystem(), directory, first_seq, len(ACTIVE), active_bytes)
    writer.append(more.buffer, TOPIC_ID, more.entries)
    writer.close()
    make_segment(FaultyFileSystem(), data_dir, [Record(b"1")], first_seq=MARK_SEQ + 4, sealed=False)
    for path, cut in ((topic_file(data_dir, first_seq, "data"), 5), (topic_file(data_dir, first_seq, "idx"), 30)):
        path.write_bytes(path.read_bytes()[:-cut])
    before = everything(data_dir)
    report = check(data_dir)
    assert report.damage == []
    assert len(report.notes) == 3
    assert f"from offset {active_bytes} on, which no checkpoint counts yet" in report.notes[1]
    assert everything(data_dir) == before
    assert check(data_dir).segment_records == MARK_SEQ


def test_what_a_checkpoint_counts_must_be_there(data_dir: str) -> None:
    path = topic_file(data_dir, len(SEALED) + 1, "idx")
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    (finding, *_) = check(data_dir).damage
    assert (finding.path, finding.offset) == (str(path), len(content) - 20)
    assert f"it is committed up to seq {MARK_SEQ}" in finding.reason


def test_marks_come_from_the_log_as_well(data_dir: str) -> None:
    """The snapshot may be older than the last checkpoint."""
    path = topic_file(data_dir, len(SEALED) + 1, "data")
    path.write_bytes(path.read_bytes() + b"more")
    for facts_of in (lambda body: SnapshotFacts({}, {}), lambda body: SnapshotFacts({}, {TOPIC_ID: 1}), None):
        report = verify(data_dir, lambda share: None, facts_of)
        assert report.damage == []
        assert "4 bytes from offset" in report.notes[0]


def test_without_marks_a_segment_must_be_whole(data_dir: str) -> None:
    shutil.rmtree(layout.wal_dir(data_dir))
    assert verify(data_dir, lambda share: None).damage == []
    path = topic_file(data_dir, len(SEALED) + 1, "data")
    path.write_bytes(path.read_bytes() + b"more")
    assert [finding.path for finding in verify(data_dir, lambda share: None).damage] == [str(path)]
    # Without any snapshot nothing has ever been checkpointed.
    shutil.rmtree(layout.meta_dir(data_dir))
    report = verify(data_dir, lambda share: None)
    assert report.damage == []
    assert len(report.notes) == 2


def test_a_deletion_under_way_is_no_damage(data_dir: str) -> None:
    path = topic_file(data_dir, 1, "data")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\xd5")
    (finding,) = check(data_dir).damage
    assert "seq 3 is deleted here and live in the index, at 40" in finding.reason
    shutil.rmtree(layout.wal_dir(data_dir))
    writer = open_writer(
        FaultyFileSystem(), layout.wal_dir(data_dir), identity=WalIdentity(0, 1, boot_id()), file_bytes=512
    )
    commit(writer, encode(FrameType.DELETE, 0, TOPIC_ID, MARK_SEQ, TS_MS, b"", b"", b""))
    writer.close()
    assert check(data_dir).damage == []


def test_a_trimmed_log_begins_where_the_snapshot_says(data_dir: str) -> None:
    names = sorted(path.name for path in Path(data_dir, "wal").glob("*.log"))
    assert names == [layout.log_name(1), layout.log_name(2)]
    second = Path(data_dir, "wal", names[1])
    start, first_frame = parse_file_start(str(second), second.read_bytes())

    def facts_of(body: bytes) -> SnapshotFacts:
        position = WalPosition(2, first_frame) if body == b"now" else WalPosition(1, 0)
        return SnapshotFacts({start.log_id: position}, {TOPIC_ID: MARK_SEQ})

    def found() -> list[str]:
        return [finding.path for finding in verify(data_dir, lambda share: None, facts_of).damage]

    assert found() == []
    first = Path(data_dir, "wal", names[0])
    first.unlink()
    assert found() == []
    assert verify(data_dir, lambda share: None).damage == []
    assert [finding.path for finding in check(data_dir).damage] == [str(first)]
    second.unlink()
    Path(data_dir, "wal", "CURRENT").unlink()
    assert found() == [layout.wal_dir(data_dir)]


def test_the_snapshot_that_goes_with_the_logs_counts(data_dir: str) -> None:
    """The shard count was about to change: the newest is of logs that are not in place yet."""
    path = topic_file(data_dir, len(SEALED) + 1, "data")
    path.write_bytes(path.read_bytes() + b"more")
    other = {0xABC: WalPosition(1, 0)}
    bodies = {b"before": SnapshotFacts({}, {TOPIC_ID: MARK_SEQ}), b"now": SnapshotFacts(other, {TOPIC_ID: 99})}
    report = verify(data_dir, lambda share: None, lambda body: bodies[body])
    assert report.damage == []
    assert "4 bytes from offset" in report.notes[0]
    report = verify(data_dir, lambda share: None, lambda body: bodies[b"now"])
    assert report.damage[0].reason.endswith("goes on in logs that are not there: 0000000000000abc")


# -- the whole directory


def test_every_shard_has_its_log(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    for shard in range(3):
        fill(data_dir, shard, 3)
    shutil.rmtree(layout.meta_dir(data_dir))
    save_snapshot(OsFileSystem(), data_dir, b"now")
    assert check(data_dir).damage == []
    gone = layout.group_dir(data_dir, 1, 3)
    shutil.rmtree(gone)
    (finding,) = check(data_dir).damage
    assert (finding.kind, finding.path) == (Kind.LOG, gone)


def test_nothing_is_changed_whatever_is_found(data_dir: str) -> None:
    for path in list(files(data_dir)):
        path.write_bytes(path.read_bytes()[:-7] + b"garbage")
    Path(layout.wal_dir(data_dir), "CURRENT.tmp").write_bytes(b"unfinished")
    before = everything(data_dir)
    assert len(check(data_dir).damage) > 5
    assert everything(data_dir) == before


def test_a_running_service_is_not_disturbed(data_dir: str) -> None:
    lock = DataDirLock.acquire(data_dir)
    before = everything(data_dir)
    with pytest.raises(DataDirLocked, match=f"in use by process {os.getpid()}"):
        check(data_dir)
    assert holder_pid(data_dir) == os.getpid()
    assert everything(data_dir) == before
    lock.release()
    assert check(data_dir).damage == []


def test_no_service_starts_meanwhile(data_dir: str) -> None:
    DataDirLock.acquire(data_dir).release()
    refusals = []

    def start(share: float) -> None:
        with pytest.raises(DataDirLocked):
            DataDirLock.acquire(data_dir)
        refusals.append(share)

    verify(data_dir, start)
    assert refusals
    DataDirLock.acquire(data_dir).release()


def test_another_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotADataDir, match="holds neither logs nor segments nor snapshots"):
            check(str(path))


def test_a_directory_in_a_files_place_is_damage(data_dir: str) -> None:
    path = topic_file(data_dir, 1, "idx")
    path.unlink()
    path.mkdir()
    assert [one.kind for one in check(data_dir).damage] == [Kind.UNREADABLE]


def test_what_cannot_be_listed_does_not_end_the_check(data_dir: str) -> None:
    """A file where a topic's directory should be, and one where all snapshots should be."""
    in_the_way = [Path(layout.topic_dir(data_dir, 1)), Path(layout.meta_dir(data_dir))]
    shutil.rmtree(in_the_way[1])
    for path in in_the_way:
        path.touch()
    report = check(data_dir)
    assert [(one.kind, one.path) for one in report.damage] == [
        (Kind.UNREADABLE, str(in_the_way[1])),
        (Kind.UNREADABLE, str(in_the_way[0])),
    ]
    assert report.segments == 2


def test_a_snapshot_with_a_body_of_something_else(data_dir: str) -> None:
    def facts_of(body: bytes) -> SnapshotFacts:
        return msgspec.msgpack.decode(body, type=SnapshotFacts)

    first, second = verify(data_dir, lambda share: None, facts_of).damage
    assert (first.kind, first.path, first.offset) == (Kind.SNAPSHOT, layout.snapshot_path(data_dir, 1), 32)
    assert "its body does not decode" in second.reason
