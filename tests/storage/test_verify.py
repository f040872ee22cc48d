"""The offline check finds whatever is not what was written, says where, and changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.storage.faults import Crash, Fault, FaultyFileSystem
from tests.storage.logs import TOPIC_ID, TS_MS, appends, commit, kill, open_writer, topic_create
from tests.storage.segments import Record, logged, make_segment
from topics.core.control_bodies import DeleteFrameBody, MarkFrameBody, encode_body
from topics.core.floors import Floors
from topics.core.fold import Fold
from topics.core.location import LOCATION_DELETED
from topics.core.names import owner_shard
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import COLD, SegmentInfo
from topics.core.segment_list import SEALED as SEALED_FLAG
from topics.core.seq_set import encode_runs
from topics.core.shard_state import ShardState
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem, ReadOnlyFileSystem, boot_id
from topics.storage.frame import FrameType, encode
from topics.storage.frame_columns import FrameColumns
from topics.storage.lock import DataDirLock, DataDirLocked, holder_pid
from topics.storage.log_fold import fold_frames
from topics.storage.logfile import WalIdentity, WalPosition
from topics.storage.postings import write_postings
from topics.storage.recovery import Recovery
from topics.storage.reshard import reshard
from topics.storage.segment_check import DamageFinding, FileKind, Report
from topics.storage.segment_deletes import mark_deleted
from topics.storage.segment_reader import SegmentReader
from topics.storage.segment_writer import SegmentWriter
from topics.storage.snapshot import decode_parts, encode_part, encode_parts, plan_move, read_snapshot, save_snapshot
from topics.storage.verify import NotADataDir, verify

SEALED = [Record(b'"a"', b"n", b"t"), Record(b'"b"', tag=b"u"), Record(b'"c"', tag=b"t", meta=b'{"k":1}')]
ACTIVE = [Record(b'"d"'), Record(b'"e"', tag=b"v")]
MARK_SEQ = len(SEALED) + len(ACTIVE)


def mark_frame(revision: int, head_seq: int, *segments: SegmentInfo) -> bytes:
    """Return a mark of a topic whose record 2 is deleted."""
    up_to_seq = segments[-1].last_seq
    floors = Floors(revision, 1, 1, 0, 1, head_seq - 1, 100 * (head_seq - 1))
    body = encode_body(MarkFrameBody(list(segments), floors))
    return encode(FrameType.CHECKPOINT_MARK, 0, TOPIC_ID, up_to_seq, TS_MS, b"", b"", body)


def delete_frame(revision: int) -> bytes:
    body = encode_body(DeleteFrameBody(0, encode_runs([2]), Floors(revision, 1, 1, 0, 1, MARK_SEQ - 1, 1)))
    return encode(FrameType.DELETE, 0, TOPIC_ID, MARK_SEQ, TS_MS, b"", b"", body)


def info_of(segment: SegmentReader, flags: int) -> SegmentInfo:
    ts = segment.entries(segment.first_seq, segment.last_seq)[1::4]
    return SegmentInfo(segment.first_seq, segment.last_seq, ts[0], ts[-1], len(segment.data), 0, flags)


def snapshot(data_dir: str, shard: int, shards: int, log_id: int, position: WalPosition, ahead: SegmentInfo) -> None:
    """Write a snapshot as of that place in the log, which has all its files."""
    group = layout.group_dir(data_dir, shard, shards)
    fold = Fold(lambda _topic_id: UnlocatedIndex())
    for batch in Recovery(ReadOnlyFileSystem(), group, WalIdentity(shard, shards, boot_id())):
        frames = FrameColumns.of(frame for frame in batch.frames if WalPosition(batch.file_no, frame[0]) < position)
        fold_frames(fold, batch._replace(frames=frames), in_ram=False)
    state = fold.state()
    for topic in state.topics:
        if topic.head_seq > len(SEALED):  # as the compactor saves it: the segments are ahead of the log's place
            topic.segments.append(ahead)
    part = encode_part(shard, shards, log_id, position, state)
    save_snapshot(OsFileSystem(), data_dir, encode_parts([part]))


def fill(data_dir: str, shard: int = 0, shards: int = 1, closed: bool = True) -> None:
    """A service that was stopped: two log files, a sealed and an active segment, two snapshots; the newer one does not
    have the last mark.
    """
    sealed = info_of(make_segment(FaultyFileSystem(), data_dir, SEALED), SEALED_FLAG)
    active = info_of(make_segment(FaultyFileSystem(), data_dir, ACTIVE, first_seq=len(SEALED) + 1, sealed=False), 0)
    writer = open_writer(
        FaultyFileSystem(),
        layout.group_dir(data_dir, shard, shards),
        identity=WalIdentity(shard, shards, boot_id()),
        file_bytes=560,
    )
    commit(writer, topic_create(TOPIC_ID, "orders"))
    places = [WalPosition(writer.file_no, writer.offset)]
    for seq in range(1, MARK_SEQ + 1):
        commit(writer, appends(seq, [b'"%d"' % seq * 4]))
        if seq == len(SEALED):
            commit(writer, mark_frame(1, seq, sealed))
        elif seq == len(SEALED) + 1:
            places.append(WalPosition(writer.file_no, writer.offset))
    commit(writer, mark_frame(2, MARK_SEQ, active))
    writer.close() if closed else kill(writer)
    mark_deleted(OsFileSystem(), layout.topic_dir(data_dir, TOPIC_ID), 1, [2])
    for place in places:
        snapshot(data_dir, shard, shards, writer.log_id, place, active)


@pytest.fixture
def data_dir(tmp_path: Path) -> str:
    path = str(tmp_path / "data")
    os.mkdir(path)
    fill(path)
    return path


def check(data_dir: str) -> Report:
    return verify(data_dir, lambda *_: None)


def files(data_dir: str) -> Iterator[Path]:
    return (path for path in sorted(Path(data_dir).rglob("*")) if path.is_file())


def everything(data_dir: str) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files(data_dir)}


def topic_file(data_dir: str, first_seq: int, suffix: str) -> Path:
    return Path(layout.topic_dir(data_dir, TOPIC_ID), f"seg-{first_seq:020d}.{suffix}")


def test_a_stopped_service_left_everything_in_order(data_dir: str) -> None:
    shares: list[float] = []
    report = verify(data_dir, lambda done_bytes, total_bytes: shares.append(done_bytes / total_bytes))
    assert (report.damage, report.notes) == ([], [])
    assert (report.segments, report.segment_records) == (2, MARK_SEQ)
    assert report.log_frames == 1 + MARK_SEQ + 2
    assert (report.postings, report.snapshots) == (1, 2)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) > 5


def test_any_flipped_bit_of_any_file_is_found(data_dir: str) -> None:
    """One bit of every byte of every file, each bit's turn; the file is named."""
    kinds = {".log": FileKind.LOG, "CURRENT": FileKind.LOG, ".bin": FileKind.SNAPSHOT, ".tags": FileKind.POSTINGS}
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
                assert kinds.get(ending, FileKind.SEGMENT) in {finding.kind for finding in report.damage}, place
            else:
                # Not told from a tail that was being written, or a CURRENT that was being replaced.
                assert ending in (".log", "CURRENT", "COMMITTED"), place
                assert report.notes or ending == "COMMITTED", place
        path.write_bytes(content)
    assert seen == {".log", "CURRENT", "COMMITTED", ".data", ".idx", ".tags", ".bin"}
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
            assert found or may_be_missing or path.name == "COMMITTED", (path, damaged)
            path.write_bytes(content)
    assert check(data_dir).damage == []


def test_files_in_each_others_place_are_found(data_dir: str) -> None:
    other = topic_file(data_dir, 1, "data").read_bytes()
    for suffix in ("data", "idx"):
        path = topic_file(data_dir, len(SEALED) + 1, suffix)
        content = path.read_bytes()
        path.write_bytes(topic_file(data_dir, 1, suffix).read_bytes())
        assert {finding.kind for finding in check(data_dir).damage} == {FileKind.SEGMENT}
        path.write_bytes(content)
    topic_file(data_dir, 1, "data").write_bytes(topic_file(data_dir, len(SEALED) + 1, "data").read_bytes())
    assert check(data_dir).damage
    topic_file(data_dir, 1, "data").write_bytes(other)
    write_postings(OsFileSystem(), layout.topic_dir(data_dir, TOPIC_ID), 1, 3, [(1, b"t"), (2, b"t"), (3, b"u")])
    (finding,) = check(data_dir).damage
    assert (finding.kind, finding.path) == (FileKind.POSTINGS, str(topic_file(data_dir, 1, "tags")))
    write_postings(OsFileSystem(), layout.topic_dir(data_dir, TOPIC_ID), 1, 2, [])
    assert "is of 2 records from seq 1, not of 3 from 1" in check(data_dir).damage[0].reason


def test_damage_names_file_and_offset(data_dir: str) -> None:
    path = topic_file(data_dir, 1, "data")
    content = bytearray(path.read_bytes())
    second = int.from_bytes(content[:4], "little") + 4
    content[second + 30] ^= 1
    path.write_bytes(content)
    (finding,) = check(data_dir).damage
    assert finding == DamageFinding(FileKind.SEGMENT, str(path), second, "checksum does not match")


def test_one_damaged_file_does_not_hide_another(data_dir: str) -> None:
    paths = [topic_file(data_dir, 1, "tags"), topic_file(data_dir, len(SEALED) + 1, "data"), Path(data_dir, "meta")]
    paths[2] = sorted(paths[2].iterdir())[0]
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    assert {(finding.kind, finding.path) for finding in check(data_dir).damage} == {
        (kind, str(path))
        for kind, path in zip((FileKind.POSTINGS, FileKind.SEGMENT, FileKind.SNAPSHOT), paths, strict=True)
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
    assert f"{path}: torn tail at offset" in note  # the last mark is gone, the snapshot has what it says
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
    assert f"from offset {active_bytes} on, which no checkpoint counts yet" in report.notes[2]
    assert everything(data_dir) == before
    assert check(data_dir).segment_records == MARK_SEQ


def test_what_a_checkpoint_counts_must_be_there(data_dir: str) -> None:
    for suffix in ("idx", "data"):
        path = topic_file(data_dir, len(SEALED) + 1, suffix)
        content = path.read_bytes()
        path.write_bytes(content[:-20])
        (finding, *_) = check(data_dir).damage
        assert (finding.path, finding.offset) == (str(path), len(content) - 20)
        assert f"{len(content)} bytes are committed" in finding.reason
        path.write_bytes(content)


def test_a_segment_that_is_missing_as_a_whole(data_dir: str) -> None:
    shutil.rmtree(layout.topics_dir(data_dir))
    assert {finding.reason for finding in check(data_dir).damage} == {"the file is missing"}


def test_a_sealed_segment_has_no_more_than_what_is_committed(data_dir: str) -> None:
    path = topic_file(data_dir, 1, "data")
    path.write_bytes(path.read_bytes() + b"more")
    (finding,) = check(data_dir).damage
    assert "but the segment is sealed" in finding.reason


def test_without_log_and_snapshot_a_segment_must_be_whole(data_dir: str) -> None:
    shutil.rmtree(layout.wal_dir(data_dir))
    assert [finding.kind for finding in check(data_dir).damage] == [FileKind.LOG]
    path = topic_file(data_dir, len(SEALED) + 1, "data")
    path.write_bytes(path.read_bytes() + b"more")
    assert [finding.path for finding in check(data_dir).damage[1:]] == [str(path)]
    # Without any snapshot there is no such topic.
    shutil.rmtree(layout.meta_dir(data_dir))
    report = check(data_dir)
    assert report.damage == []
    assert [note.rpartition(": ")[2] for note in report.notes] == ["the log knows no such topic"] * 2


def test_files_of_other_versions_and_deleted_topics_are_notes(data_dir: str) -> None:
    directory = layout.topic_dir(data_dir, TOPIC_ID)
    for path_of in (layout.segment_data_path, layout.segment_idx_path):
        shutil.copy(path_of(directory, 1), path_of(directory, 1, 3))
    os.makedirs(layout.topic_dir(data_dir, 5))
    Path(layout.segment_idx_path(layout.topic_dir(data_dir, 5), 1)).touch()
    report = check(data_dir)
    assert report.damage == []
    assert [note.rpartition(": ")[2] for note in report.notes] == [
        "the log knows no such topic",
        "no checkpoint counts it any more",
    ]


def test_a_deletion_under_way_is_no_damage(data_dir: str) -> None:
    """A frame is marked and its index entry is not: only if the log that is still to be read says so."""
    path = topic_file(data_dir, 1, "idx")
    content = path.read_bytes()
    path.write_bytes(content[:36] + bytes([content[36] & ~2]) + content[37:])
    (finding,) = check(data_dir).damage
    assert "seq 2 is deleted here and live in the index, at 20" in finding.reason
    recovery = Recovery(FaultyFileSystem(), layout.wal_dir(data_dir), WalIdentity(0, 1, boot_id()))
    for _ in recovery:
        pass
    writer = open_writer(
        FaultyFileSystem(), layout.wal_dir(data_dir), recovery.end, identity=WalIdentity(0, 1, boot_id())
    )
    commit(writer, delete_frame(3))
    writer.close()
    assert check(data_dir).damage == []
    flipped = bytearray(path.read_bytes())
    flipped[16] ^= LOCATION_DELETED
    path.write_bytes(flipped)
    assert "seq 1 is live here and deleted in the index" in check(data_dir).damage[0].reason


class Cold:
    """The sealed segment is cold: all three files are in the cold directory, and the data no longer here."""

    def __init__(self, data_dir: str, cold_dir: str) -> None:
        recovery = Recovery(FaultyFileSystem(), layout.wal_dir(data_dir), WalIdentity(0, 1, boot_id()))
        for _ in recovery:
            pass
        identity = WalIdentity(0, 1, boot_id())
        writer = open_writer(FaultyFileSystem(), layout.wal_dir(data_dir), recovery.end, identity=identity)
        self.hot = topic_file(data_dir, 1, "data")
        sealed = SegmentReader.open(layout.topic_dir(data_dir, TOPIC_ID), 1, 3, self.hot.stat().st_size)
        commit(writer, mark_frame(3, MARK_SEQ, info_of(sealed, SEALED_FLAG | COLD)))
        writer.close()
        self.data_dir, self.cold_dir = data_dir, cold_dir
        self.there = Path(layout.segment_data_path(layout.topic_dir(cold_dir, TOPIC_ID), 1))
        self.there.parent.mkdir(parents=True)
        for kind in ("idx", "tags", "data"):
            shutil.copy(topic_file(data_dir, 1, kind), self.there.parent)

    def check(self, look: bool = True) -> Report:
        return verify(self.data_dir, lambda *_: None, self.cold_dir if look else None)


@pytest.fixture
def cold(data_dir: str, tmp_path: Path) -> Cold:
    return Cold(data_dir, str(tmp_path / "cold"))


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("both", [True, False])
def test_cold_data_are_checked_where_they_are(cold: Cold, look: bool, both: bool) -> None:
    if not both:
        cold.hot.unlink()
    report = cold.check(look)
    assert report.damage == []
    assert len(report.notes) == (0 if look else 1)
    content = cold.there.read_bytes()
    cold.there.write_bytes(content.replace(b'"a"', b'"A"'))
    assert [finding.path for finding in cold.check(look).damage] == ([str(cold.there)] if look else [])
    cold.there.unlink()
    assert [finding.path for finding in cold.check(look).damage] == ([str(cold.there)] if look else [])
    if both:
        cold.there.write_bytes(content)
        cold.hot.write_bytes(content.replace(b'"b"', b'"B"'))
        assert [finding.path for finding in cold.check(look).damage] == [str(cold.hot)]


def test_the_index_of_cold_data_is_checked_though_these_are_not_looked_at(cold: Cold) -> None:
    cold.hot.unlink()
    path = topic_file(cold.data_dir, 1, "idx")
    content = path.read_bytes()
    for at in (20, 24, 36, 37, 38):  # offset, len, flags and padding of the second record
        path.write_bytes(content[:at] + bytes((content[at] ^ 0x40,)) + content[at + 1 :])
        assert str(path) in [found.path for found in cold.check(look=False).damage], at


def test_the_copies_beside_cold_data_are_checked(cold: Cold) -> None:
    cold.hot.unlink()
    for kind in ("idx", "tags"):
        path = cold.there.with_suffix(f".{kind}")
        content = path.read_bytes()
        for at in range(len(content)):
            path.write_bytes(content[:at] + bytes((content[at] ^ 0x40,)) + content[at + 1 :])
            assert [(found.path, found.offset) for found in cold.check().damage] == [(str(path), at)]
        for wrong in (content[:-1], content + b"x"):
            path.write_bytes(wrong)
            offset = min(len(wrong), len(content))
            assert [(found.path, found.offset) for found in cold.check().damage] == [(str(path), offset)]
        path.unlink()
        assert [found.path for found in cold.check().damage] == [str(path)]
        path.write_bytes(content)
    assert cold.check(look=False).damage == []


def test_what_was_deleted_since_is_not_marked_in_the_copy_of_an_index(cold: Cold) -> None:
    mark_deleted(OsFileSystem(), str(cold.hot.parent), 1, [2], cold=True)
    assert cold.check().damage == []
    cold.hot.unlink()
    assert cold.check().damage == []


def test_an_index_of_before_a_deletion_is_found_though_nothing_else_repeats_it(cold: Cold) -> None:
    """A cold segment's deletions are in the index alone: what the log counts tells that one is an older one."""
    cold.hot.unlink()
    here = topic_file(cold.data_dir, 1, "idx")
    content = here.read_bytes()
    older = content[:36] + bytes([content[36] & ~LOCATION_DELETED]) + content[37:]
    assert older != content
    cold.there.with_suffix(".idx").write_bytes(older)  # it was deleted since
    assert cold.check().damage == []
    here.write_bytes(older)
    for look in (True, False):
        (finding,) = cold.check(look).damage
        assert (finding.kind, finding.path) == (FileKind.SEGMENT, str(here.parent))
        assert finding.reason.startswith("5 records live by its indexes and the log behind them, 4 by what the log")
    here.write_bytes(content[:16] + bytes([content[16] | LOCATION_DELETED]) + content[17:])
    assert cold.check(look=False).damage[0].reason.startswith("3 records live by its indexes")


def test_what_the_log_deletes_need_not_be_marked_yet(cold: Cold) -> None:
    """Behind the last snapshot the next start marks it again."""
    recovery = Recovery(FaultyFileSystem(), layout.wal_dir(cold.data_dir), WalIdentity(0, 1, boot_id()))
    for _ in recovery:
        pass
    writer = open_writer(
        FaultyFileSystem(), layout.wal_dir(cold.data_dir), recovery.end, identity=WalIdentity(0, 1, boot_id())
    )
    commit(writer, appends(MARK_SEQ + 1, [b"1", b"2", b"3"]))
    body = DeleteFrameBody(0, encode_runs([3, MARK_SEQ + 2]), Floors(4, 1, 1, 0, 1, MARK_SEQ, 1))
    commit(writer, encode(FrameType.DELETE, 0, TOPIC_ID, MARK_SEQ + 3, TS_MS, b"", b"", encode_body(body)))
    writer.close()
    assert cold.check().damage == []
    mark_deleted(OsFileSystem(), str(cold.hot.parent), 1, [3], cold=True)
    assert cold.check().damage == []


def test_a_trimmed_log_begins_where_the_snapshot_says(data_dir: str) -> None:
    names = sorted(path.name for path in Path(data_dir, "wal").glob("*.log"))
    assert names == [layout.log_name(1), layout.log_name(2)]
    first, second = (Path(data_dir, "wal", name) for name in names)
    parts = decode_parts(read_snapshot(OsFileSystem(), data_dir, 2))
    assert parts[0].position.file_no == 2
    first.unlink()
    assert check(data_dir).damage == []
    Path(layout.snapshot_path(data_dir, 2)).unlink()
    (finding,) = check(data_dir).damage
    assert finding.path == layout.wal_dir(data_dir)
    assert "where this log has nothing" in finding.reason
    second.unlink()
    Path(data_dir, "wal", "CURRENT").unlink()
    assert layout.wal_dir(data_dir) in [finding.path for finding in check(data_dir).damage]


def test_the_snapshot_that_goes_with_the_logs_counts(data_dir: str) -> None:
    """The shard count was about to change: the newest is of logs that are not in place yet."""
    part = decode_parts(read_snapshot(OsFileSystem(), data_dir, 2))[0]
    strange = encode_part(0, 1, 0xABC, WalPosition(1, 0), ShardState())
    save_snapshot(OsFileSystem(), data_dir, encode_parts([strange]))
    assert check(data_dir).damage == []
    save_snapshot(OsFileSystem(), data_dir, encode_parts([part, strange]))
    (finding, *_) = check(data_dir).damage
    assert finding.reason.endswith("goes on in logs that are not there: 0000000000000abc")


@pytest.mark.parametrize("error", [Fault.CRASH, Fault.LATE_CRASH], ids=["before", "after"])
def test_a_change_of_the_shard_count_that_was_killed_anywhere_is_no_damage(
    data_dir: str, tmp_path: Path, error: int
) -> None:
    def owner(name: str) -> int:
        return owner_shard(name, 2)

    states = set()
    for nth in count(1):
        copied = str(tmp_path / f"{nth}")
        shutil.copytree(data_dir, copied)
        fs = FaultyFileSystem()
        fs.arm(Fault(nth, error))
        try:
            move = plan_move(fs, copied, owner)
            reshard(fs, copied, 2, boot_id(), owner, lambda _share: None, file_bytes=1 << 12, move=move)
        except Crash:
            fs.bury()
        report = check(copied)
        assert report.damage == [], nth
        assert report.segments == 2
        states.add(tuple(sorted(name for name in os.listdir(copied) if name.startswith("wal"))))
        shutil.rmtree(copied)
        if not fs.struck:
            break
    assert states == {("wal",), ("wal", "wal.new"), ("wal.new", "wal.old"), ("wal", "wal.old")}


def test_a_log_that_contradicts_itself(data_dir: str) -> None:
    recovery = Recovery(FaultyFileSystem(), layout.wal_dir(data_dir), WalIdentity(0, 1, boot_id()))
    for _ in recovery:
        pass
    writer = open_writer(
        FaultyFileSystem(), layout.wal_dir(data_dir), recovery.end, identity=WalIdentity(0, 1, boot_id())
    )
    commit(writer, appends(MARK_SEQ + 3, [b"1"]))
    writer.close()
    assert any("the records between are missing" in finding.reason for finding in check(data_dir).damage)


# -- the whole directory


@pytest.mark.parametrize(
    "name", ["service-id", "restored.json", "archive.json", "borrowed.json", "following.json", "format.json"]
)
def test_the_notes_of_what_the_directory_is_are_read(data_dir: str, name: str) -> None:
    path = Path(layout.meta_dir(data_dir), name)
    for content in (b"", b'{"version": 1, ', b'{"version": 3}', bytes(40)):
        path.write_bytes(content)
        assert str(path) in [finding.path for finding in check(data_dir).damage], content


def test_every_shard_has_its_log(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    for shard in range(3):
        fill(data_dir, shard, 3)
    shutil.rmtree(layout.meta_dir(data_dir))
    assert check(data_dir).damage == []
    gone = layout.group_dir(data_dir, 1, 3)
    shutil.rmtree(gone)
    (finding,) = check(data_dir).damage
    assert (finding.kind, finding.path) == (FileKind.LOG, gone)


def test_a_log_without_its_files_is_damage(tmp_path: Path) -> None:
    """A start refuses it; before the first snapshot the check called it clean."""
    data_dir = str(tmp_path)
    for shard in range(2):
        fill(data_dir, shard, 2)
    shutil.rmtree(layout.meta_dir(data_dir))
    for path in Path(layout.group_dir(data_dir, 1, 2)).glob("*.log"):
        path.unlink()
    (finding,) = check(data_dir).damage
    assert (finding.kind, finding.reason.partition(";")[0]) == (FileKind.LOG, "the file is missing")


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

    def start(done_bytes: int, total_bytes: int) -> None:
        with pytest.raises(DataDirLocked):
            DataDirLock.acquire(data_dir)
        refusals.append(done_bytes)

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
    assert [one.kind for one in check(data_dir).damage] == [FileKind.UNREADABLE]


def test_what_cannot_be_read_hides_nothing(data_dir: str) -> None:
    """A stage that cannot be read, and a damaged sink; without a snapshot a segment, and a damaged one behind it."""
    stage = Path(layout.stages_dir(data_dir), f"{'0' * 32}-{'0' * 16}.stage")
    sink = Path(layout.sinks_dir(data_dir), f"{'0' * 32}.sink")
    stage.mkdir(parents=True)
    sink.parent.mkdir()
    sink.write_bytes(b"TSNK")
    assert [one.path for one in check(data_dir).damage] == [str(stage), str(sink)]
    shutil.rmtree(stage.parent.parent)
    for number in layout.list_snapshots(OsFileSystem(), data_dir):
        Path(layout.snapshot_path(data_dir, number)).write_bytes(b"")
    unreadable, damaged = topic_file(data_dir, 1, "idx"), topic_file(data_dir, len(SEALED) + 1, "data")
    unreadable.unlink()
    unreadable.mkdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    found = {one.path for one in check(data_dir).damage if one.kind != FileKind.SNAPSHOT}
    assert found >= {str(unreadable), layout.segment_idx_path(layout.topic_dir(data_dir, TOPIC_ID), len(SEALED) + 1)}


def test_what_cannot_be_listed_does_not_end_the_check(data_dir: str) -> None:
    """A file where a topic's directory should be, and one where all snapshots should be."""
    in_the_way = [Path(layout.topic_dir(data_dir, 1)), Path(layout.meta_dir(data_dir))]
    shutil.rmtree(in_the_way[1])
    for path in in_the_way:
        path.touch()
    report = check(data_dir)
    assert [(one.kind, one.path) for one in report.damage] == [
        (FileKind.UNREADABLE, str(in_the_way[1])),
        (FileKind.UNREADABLE, str(in_the_way[0])),
    ]
    assert report.segments == 2


def test_a_snapshot_with_a_body_of_something_else(data_dir: str) -> None:
    save_snapshot(OsFileSystem(), data_dir, b"something else")
    first, *_ = check(data_dir).damage
    assert (first.kind, first.path, first.offset) == (FileKind.SNAPSHOT, layout.snapshot_path(data_dir, 3), 32)
