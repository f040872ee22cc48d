"""Frames of one segment as Arrow columns, against the reader that takes them one by one."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from tests.storage.logs import TOPIC_ID, TS_MS
from tests.storage.segments import Logged, Record, logged
from topics.api.segment_answers import ManifestSegment
from topics.core.floors import EvictReason
from topics.core.location import LOCATION_DELETED, LOCATION_LOST
from topics.spark.columns import ColumnBuilder
from topics.spark.http_read import ROWS_PER_BATCH, ReadPlan
from topics.spark.offsets import Gap, Range
from topics.spark.options import Directories, ReadOptions, read_options
from topics.spark.segment_scan import SegmentScan
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment_reader import SegmentReader
from topics.storage.segment_writer import SegmentWriter

FS = OsFileSystem()
OPTIONS = read_options({"subscribe": "t", "mode": "segments", "dataDir": "/unused"})


def written(root: Path, made: Logged, first_seq: int) -> tuple[ManifestSegment, SegmentReader]:
    directory = layout.topic_dir(str(root), TOPIC_ID)
    writer = SegmentWriter.create(FS, directory, first_seq)
    writer.append(made.buffer, TOPIC_ID, made.entries)
    writer.sync()
    writer.close()
    reader = SegmentReader.open(directory, first_seq, writer.records, writer.data_bytes)
    segment = ManifestSegment(
        first_seq=first_seq,
        last_seq=reader.last_seq,
        records=reader.last_seq - first_seq + 1,
        first_ts=TS_MS + first_seq,
        last_ts=TS_MS + reader.last_seq,
        data_bytes=writer.data_bytes,
        version=0,
        tier="hot",
        data_path=os.path.relpath(reader.data_path, root),
        idx_path=os.path.relpath(reader.idx_path, root),
        idx_xxh3=None,
    )
    return segment, reader


def read(
    root: Path, segment: ManifestSegment, one: Range, options: ReadOptions = OPTIONS
) -> tuple[list[tuple[int, int, str | None, str | None, str]], list[Gap], list[int]]:
    """(records, gaps, rows of each batch)"""
    records, gaps, sizes = [], [], []
    plan = ReadPlan(options, ColumnBuilder(StructType([]), options), None)
    with SegmentScan(Directories(str(root), None), segment, one.topic, plan, True) as files:
        for item in files.read(one.from_seq, one.to_seq):
            if isinstance(item, Gap):
                gaps.append(item)
                continue
            sizes.append(len(item.seq))
            columns = [column.to_pylist() for column in (item.seq, item.ts_ms, item.node, item.tag, item.data)]
            records += list(zip(*columns, strict=True))
    return records, gaps, sizes


@pytest.mark.parametrize("seed", range(5))
def test_columns_are_what_the_frames_hold(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    made = logged(
        [
            Record(
                random_.choice(
                    [b"1", b'"\xc3\xa9"', b'{"a":",\\"meta\\":{"}', b'"%s"' % (b"x" * random_.randrange(90))]
                ),
                random_.choice([b"", b"me", "é".encode()]),
                random_.choice([b"", b"a", b"b:c"]),
                random_.choice([b"", b'{"k":"v"}']),
            )
            for _ in range(300)
        ],
        7,
    )
    lost: dict[int, EvictReason] = {}
    for position in range(300):
        if random_.random() < 0.1:
            made = made.flagged(position, LOCATION_DELETED)
        elif random_.random() < 0.2 or 100 <= position < 120:
            reason = random_.choice([EvictReason.CAP, EvictReason.SOURCE_TRIM])
            made = made.flagged(position, LOCATION_LOST, int(reason))
            lost[7 + position] = reason
    segment, reader = written(tmp_path, made, 7)
    from_seq, to_seq = sorted(random_.sample(range(6, 307), 2))
    records, gaps, _ = read(tmp_path, segment, Range("t", "e", from_seq, to_seq))
    expected = []
    for seq in range(from_seq + 1, to_seq + 1):
        frame = reader.frame(seq)
        if frame is not None and not frame.deleted:
            payload = frame.data.removeprefix(b'"data":')
            if frame.flags & 16:
                payload = payload[: payload.rindex(b',"meta":{')]
            texts = [part.decode() if part else None for part in (frame.node, frame.tag)]
            expected.append((seq, frame.ts, *texts, payload.decode()))
    assert records == expected
    gone = {seq for gap in gaps for seq in range(gap.first_seq, (gap.last_seq or 0) + 1)}
    assert gone == {seq for seq in lost if from_seq < seq <= to_seq}
    assert all(gap.reason == lost[gap.first_seq].name.lower() for gap in gaps)


def test_batches_are_bounded(tmp_path: Path) -> None:
    count = 2 * ROWS_PER_BATCH + 5
    segment, _ = written(tmp_path, logged([Record(b"1")] * count), 1)
    _, _, sizes = read(tmp_path, segment, Range("t", "e", 0, count))
    assert sizes == [ROWS_PER_BATCH, ROWS_PER_BATCH, 5]


def test_a_node_reads_none_of_its_own(tmp_path: Path) -> None:
    segment, _ = written(tmp_path, logged([Record(b"1", b"me"), Record(b"2", b"you"), Record(b"3")]), 1)
    own = read_options({"subscribe": "t", "mode": "segments", "dataDir": "/unused", "node": "me"})
    assert [row[0] for row in read(tmp_path, segment, Range("t", "e", 0, 3), own)[0]] == [2, 3]
