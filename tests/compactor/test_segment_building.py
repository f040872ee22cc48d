"""Records into segments: bounds, seals, leftovers of a killed life, damage."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.storage.logs import TOPIC_ID, TS_MS
from tests.storage.segments import Logged, Record, logged
from topics.compactor.segment_building import SealAt, SegmentAppender
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_DELETED, LOCATION_LOST
from topics.core.segment_list import SEALED, SegmentInfo
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.postings import Postings
from topics.storage.segment_reader import SegmentReader

NEVER = 10**9
FS = OsFileSystem()


def records(count: int, first: int = 1) -> list[Record]:
    return [Record(b'"%d"' % n, tag=b"odd" if n % 2 else b"") for n in range(first, first + count)]


class Topic:
    """One topic's segments and the records that must be in them."""

    def __init__(self, data_dir: Path, seal_at: SealAt) -> None:
        self.data_dir = str(data_dir)
        self.directory = layout.topic_dir(self.data_dir, TOPIC_ID)
        self.appender = SegmentAppender(FS, self.data_dir, seal_at, set())
        self.infos: list[SegmentInfo] = []
        self.now_ms = TS_MS

    def append(self, log: Logged, commit: bool = True) -> list[SegmentInfo]:
        def buffer_of(file_no: int, end: int) -> bytes:
            assert file_no == 1
            assert end <= len(log.buffer)
            return log.buffer

        last = self.infos[-1] if self.infos else None
        changed = self.appender.append(TOPIC_ID, last, log.entries, buffer_of, self.now_ms)
        if commit:
            if last is not None and changed[0].first_seq == last.first_seq:
                self.infos.pop()
            self.infos += changed
        return changed

    def payloads(self) -> list[bytes | None]:
        found: list[bytes | None] = []
        for info in self.infos:
            reader = SegmentReader.open(self.directory, info.first_seq, info.records, info.data_bytes, info.version)
            assert list(reader.damage(())) == []
            for seq in range(info.first_seq, info.last_seq + 1):
                frame = reader.frame(seq)
                found.append(None if frame is None else frame.data)
        return found


def test_sealed_by_count_with_postings(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(10, NEVER, 0))
    topic.append(logged(records(25)))
    assert [(info.first_seq, info.last_seq, info.flags) for info in topic.infos] == [
        (1, 10, SEALED),
        (11, 20, SEALED),
        (21, 25, 0),
    ]
    assert [(info.first_ts, info.last_ts) for info in topic.infos][1] == (TS_MS + 11, TS_MS + 20)
    topic.append(logged(records(10, 26), 26))
    assert [(info.first_seq, info.flags) for info in topic.infos][2:] == [(21, SEALED), (31, 0)]
    assert topic.payloads() == [record.payload for record in records(35)]
    assert [seqs for _, seqs in Postings.open(topic.directory, 11, 10).items()] == [[11, 13, 15, 17, 19]]


def test_sealed_by_bytes_but_never_empty(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(NEVER, 4096, 0))
    big = [Record(b'"' + b"x" * 1500 + b'"') for _ in range(5)] + [Record(b'"' + b"y" * 9000 + b'"')]
    topic.append(logged(big))
    assert [(info.first_seq, info.last_seq, info.flags) for info in topic.infos] == [
        (1, 2, SEALED),
        (3, 4, SEALED),
        (5, 5, SEALED),
        (6, 6, SEALED),
    ]
    assert topic.payloads() == [record.payload for record in big]


def test_sealed_by_age_when_appended_to_and_when_left_alone(tmp_path: Path) -> None:
    seal_at = SealAt(NEVER, NEVER, 1000)
    topic = Topic(tmp_path, seal_at)
    (info,) = topic.append(logged(records(3)))
    assert info.flags == 0
    topic.now_ms = TS_MS + 1 + 999
    assert not seal_at.is_old(info, topic.now_ms)
    topic.now_ms += 1
    assert seal_at.is_old(info, topic.now_ms)
    sealed = topic.appender.seal(TOPIC_ID, info)
    assert sealed == msgspec.structs.replace(info, flags=SEALED)
    (info,) = topic.append(logged(records(1, 4), 4), commit=False)
    assert (info.first_seq, info.last_seq, info.flags) == (1, 4, SEALED)


def test_what_a_killed_life_left_is_cut_off(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(10, NEVER, 0))
    topic.append(logged(records(5)))
    topic.append(logged([Record(b'"never marked"') for _ in range(30)], 6), commit=False)
    topic.append(logged(records(20, 6), 6))
    assert topic.payloads() == [record.payload for record in records(25)]
    assert [info.flags for info in topic.infos] == [SEALED, SEALED, 0]


def test_records_that_are_gone_have_an_entry_and_no_frame(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(4, NEVER, 0))
    log = logged(records(6)).flagged(1, LOCATION_DELETED).flagged(4, LOCATION_LOST, int(EvictReason.RESTART))
    log = log.flagged(5, LOCATION_DELETED)
    topic.append(log)
    kept = [record.payload for record in records(6)]
    assert topic.payloads() == [kept[0], None, kept[2], kept[3], None, None]


def test_a_segment_of_nothing_but_gone_records(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(2, NEVER, 0))
    topic.append(logged(records(2)).flagged(0, LOCATION_DELETED).flagged(1, LOCATION_DELETED))
    assert [(info.data_bytes, info.flags) for info in topic.infos] == [(0, SEALED)]
    assert topic.payloads() == [None, None]


def test_a_damaged_active_segment_is_left_and_the_next_one_begins(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(10, NEVER, 0))
    (damaged,) = topic.append(logged(records(5)))
    path = Path(layout.segment_data_path(topic.directory, 1))
    path.write_bytes(path.read_bytes()[:-1])
    topic.append(logged(records(3, 6), 6))
    assert [(info.first_seq, info.last_seq) for info in topic.infos] == [(1, 5), (6, 8)]
    assert damaged in topic.infos
    assert path.stat().st_size == damaged.data_bytes - 1


def test_a_gap_begins_a_new_segment(tmp_path: Path) -> None:
    topic = Topic(tmp_path, SealAt(10, NEVER, 0))
    topic.append(logged(records(5)))
    topic.append(logged(records(3, 60), 60))
    assert [(info.first_seq, info.last_seq) for info in topic.infos] == [(1, 5), (60, 62)]


def test_records_of_several_log_files(tmp_path: Path) -> None:
    appender = SegmentAppender(FS, str(tmp_path), SealAt(100, NEVER, 0), set())
    logs = {1: logged(records(3)), 2: logged(records(3, 4), 4, file_no=2)}
    entries = logs[1].entries + logs[2].flagged(0, LOCATION_DELETED).entries
    asked: list[int] = []

    def buffer_of(file_no: int, end: int) -> bytes:
        asked.append(file_no)
        return logs[file_no].buffer

    (info,) = appender.append(TOPIC_ID, None, entries, buffer_of, TS_MS)
    reader = SegmentReader.open(layout.topic_dir(str(tmp_path), TOPIC_ID), 1, info.records, info.data_bytes)
    found = [frame and frame.data for frame in map(reader.frame, range(1, 7))]
    assert found == [record.payload for record in records(3)] + [None] + [r.payload for r in records(2, 5)]
    assert asked == [1, 2]


def test_a_log_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    appender = SegmentAppender(FS, str(tmp_path), SealAt(100, NEVER, 0), set())
    log = logged(records(3), topic_id=TOPIC_ID + 1)
    with pytest.raises(ValueError, match="not those of topic"):
        appender.append(TOPIC_ID, None, log.entries, lambda key, end: log.buffer, TS_MS)
