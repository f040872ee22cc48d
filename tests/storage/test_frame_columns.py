"""Frames as columns are the frames that `frame.scan` finds one by one, up to the same end, for the same reason."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from topics.core.config import TopicConfig
from topics.core.control_bodies import CreateFrameBody, encode_body
from topics.core.fold import Fold
from topics.core.location import LOCATION_IN_RAM_LOG
from topics.core.record_index import UnlocatedIndex
from topics.storage import frame_columns
from topics.storage.frame import (
    FLAG_DURABLE,
    FLAG_MORE,
    LOCATION_FLAGS,
    Defect,
    FrameTuple,
    FrameType,
    encode,
    lay_out,
    scan,
    stamp,
)
from topics.storage.frame_columns import FrameColumns, scan_columns
from topics.storage.log_fold import fold_frames
from topics.storage.recovery import FRAMING_TYPES, RecoveredFile

NO_END = 2**40


def write(topic_id: int, first_seq: int, ts: int, records: Sequence[tuple[bytes, bytes, bytes, bytes]]) -> bytes:
    laid_out = lay_out(records)
    stamp(laid_out.buffer, laid_out.offset_len, topic_id, first_seq, ts, FLAG_DURABLE if ts % 2 else 0)
    return bytes(laid_out.buffer)


def control(type_: FrameType, topic_id: int, body_len: int) -> bytes:
    return encode(type_, 0, topic_id, 3, 4, b"", b"", b"c" * body_len)


texts = st.sampled_from([b"", b"", b"a", b"tag-1", "täg".encode(), b"x" * 30])
plain = st.tuples(st.just(b""), st.just(b""), st.integers(1, 80).map(b"1".__mul__), st.just(b""))
any_record = st.tuples(texts, texts, st.integers(1, 80).map(b"1".__mul__), st.sampled_from([b"", b'{"a":1}']))
like_records = st.builds(lambda record, count: [record] * count, any_record, st.integers(1, 200))
writes = st.builds(
    write,
    st.integers(1, 3),
    st.integers(1, 2**63),
    st.integers(0, 2**50),
    like_records | st.lists(plain, min_size=1, max_size=40) | st.lists(any_record, min_size=1, max_size=40),
)
controls = st.builds(control, st.sampled_from(list(FrameType)), st.integers(0, 3), st.integers(0, 20))
logs = st.lists(writes | controls, max_size=6).map(b"".join)


def same(buffer: bytes, start: int = 0, end: int | None = None, limit: int = NO_END) -> FrameColumns:
    """Return what both scans find, which is compared."""
    end = len(buffer) if end is None else end
    expected = scan(buffer, start, end, limit)
    found = scan_columns(buffer, start, end, limit)
    assert list(found.frames) == expected.frames
    assert (found.end, found.defect) == (expected.end, expected.defect)
    if not expected.defect:
        assert list(scan_columns(buffer, start, end, limit, trusts_records=True).frames) == expected.frames
    return found.frames


@given(logs, st.binary(max_size=60), st.integers(0, 300))
def test_an_intact_log(log: bytes, behind: bytes, limit: int) -> None:
    same(log)
    same(log, limit=limit)
    same(log + bytes(200))
    same(log + behind)
    same(behind + log, start=len(behind))
    same(memoryview(bytearray(log)).tobytes(), end=max(0, len(log) - limit))


@given(logs.filter(bool), st.data())
def test_a_byte_that_is_damaged(log: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(log) - 1))
    damaged = bytearray(log)
    damaged[at] ^= data.draw(st.integers(1, 255))
    same(bytes(damaged))


@pytest.mark.parametrize("tag", [b"", "tä".encode()])
def test_every_byte_of_a_table(tag: bytes) -> None:
    rows = 40
    log = write(7, 100, 5, [(b"", tag, b"12", b"")] * rows)
    defects = set()
    for at in range(len(log)):
        for bit in (0, 7):
            damaged = bytearray(log)
            damaged[at] ^= 1 << bit
            found = scan_columns(damaged, 0, len(log), NO_END)
            assert found.end == at // (len(log) // rows) * (len(log) // rows), "the frame that holds the byte ends it"
            assert found.defect is not None
            defects.add(found.defect)
            if at % 17 == bit % 2:
                same(bytes(damaged))
    assert defects >= {Defect.LENGTH, Defect.TYPE, Defect.LENGTHS, Defect.CHECKSUM}


@pytest.mark.parametrize("rows", [1, 16, 50, 300])
def test_text_that_is_not_utf8(rows: int) -> None:
    good = encode(FrameType.APPEND, 0, 1, 2, 3, b"no", "ä".encode(), b"1234")
    for bad in (
        encode(FrameType.APPEND, 0, 1, 2, 3, b"no", b"\xff\xff", b"1234"),
        encode(FrameType.APPEND, 0, 1, 2, 3, b"no\xc3", b"\xa4", b"1234"),
    ):
        assert len(bad) == len(good)
        frames = same(good * rows + bad + good * 20)
        assert len(frames) == rows
    assert len(same(good * rows)) == rows


def test_lengths_within_frames_of_one_length() -> None:
    """In a table the parts of the rows may differ, and one may be wrong though its checksum is right."""
    one = encode(FrameType.APPEND, 0, 1, 2, 3, b"node", b"", b"12345678")
    other = encode(FrameType.APPEND, 0, 1, 2, 3, b"", b"tags", b"12345678")
    assert len(same((one + other) * 100)) == 200
    wrong = bytearray(encode(FrameType.APPEND, 0, 1, 2, 3, b"", b"", b"123456789012"))
    assert len(wrong) == len(one)
    wrong[34] -= 1
    wrong[-8:] = xxh3_64_intdigest(bytes(wrong[4:-8])).to_bytes(8, "little")
    assert scan(wrong, 0, len(wrong)).defect is Defect.LENGTHS
    for alike in (one, encode(FrameType.APPEND, 0, 1, 2, 3, b"", b"", b"123456789012")):
        assert len(same(alike * 70 + wrong + alike * 70)) == 70


@pytest.mark.parametrize("count", [1, 3, 20])
def test_frames_that_are_too_long_to_be_copied(count: int) -> None:
    log = write(1, 1, 1, [(b"", b"", b"1" * 300_000, b"")] * count + [(b"", b"", b"2", b"")] * 40)
    assert len(same(log)) == count + 40
    damaged = bytearray(log)
    damaged[200_000] ^= 1
    assert len(same(bytes(damaged))) == 0


def test_neither_a_table_nor_a_walk_needs_a_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all of the above would hold without them."""

    def refuse(*_: Any) -> None:
        raise AssertionError("frame by frame")

    monkeypatch.setattr(frame_columns, "scan", refuse)
    for records in (
        [(b"", b"", b"1", b"")] * 1000,
        [(b"n", b"t" * (at % 7), b"1" * (at % 11), b"") for at in range(999)],
    ):
        log = write(1, 1, 1, records)
        assert len(scan_columns(log, 0, len(log), len(records)).frames) == len(records)


def plainly(frames: Sequence[FrameTuple]) -> list[tuple[int, int]]:
    return sorted({(frame[2], frame[4]) for frame in frames})


@settings(max_examples=60)
@given(logs, st.data())
def test_columns_are_a_sequence_of_frames(log: bytes, data: st.DataObject) -> None:
    columns = scan_columns(log, 0, len(log), NO_END).frames
    frames = scan(log, 0, len(log)).frames
    count = len(frames)
    first, behind = sorted((data.draw(st.integers(0, count)), data.draw(st.integers(0, count))))
    assert list(columns[first:behind]) == frames[first:behind]
    assert list(FrameColumns.joined([columns[:first], columns[first:]])) == frames
    assert [columns[at] for at in range(-count, count)] == frames * 2
    assert list(FrameColumns.of(frames)) == frames
    for types in (FRAMING_TYPES, bytes((FrameType.APPEND,)), b""):
        assert list(columns.without(types)) == [frame for frame in frames if frame[2] not in types]
        assert columns.of_any(types) == sum(frame[2] in types for frame in frames)
    found = [at for at, frame in enumerate(frames) if frame[2] in (FrameType.FILE_END, FrameType.FILE_START)]
    assert columns.find(FrameType.FILE_END, FrameType.FILE_START) == min(found, default=count)
    complete = count
    while complete and frames[complete - 1][3] & FLAG_MORE:
        complete -= 1
    assert columns.complete() == complete
    assert columns[:first].complete() == max(
        [at + 1 for at in range(first) if not frames[at][3] & FLAG_MORE], default=0
    )
    offset = data.draw(st.integers(0, len(log) + 1))
    assert list(columns.from_offset(offset)) == [frame for frame in frames if frame[0] >= offset]
    assert sorted(columns.kinds_and_topics()) == plainly(frames)


@given(logs)
def test_stretches_are_of_one_type_and_topic(log: bytes) -> None:
    columns = scan_columns(log, 0, len(log), NO_END).frames
    behind = 0
    for start, stop in columns.stretches():
        assert start == behind < stop
        assert len(columns[start:stop].kinds_and_topics()) == len(plainly(list(columns[start:stop]))) == 1
        behind = stop
    assert behind == len(columns)


@given(logs, st.sampled_from([0, LOCATION_IN_RAM_LOG]))
def test_entries_of_the_index(log: bytes, ram_flag: int) -> None:
    expected = array("Q")
    for offset, total_len, _, flags, _, seq, ts, *_ in scan(log, 0, len(log)).frames:
        expected.extend((seq, ts, offset | total_len << 32, 0x12345678 | (LOCATION_FLAGS[flags] | ram_flag) << 32))
    assert scan_columns(log, 0, len(log), NO_END).frames.entries(0x12345678, ram_flag) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_fold_of_many_frames_is_that_of_each_by_itself(seed: int) -> None:
    chance = random.Random(seed)
    heads = dict.fromkeys(range(1, 6), 0)
    pieces = [
        encode(
            FrameType.TOPIC_CREATE, 0, topic, 0, 1, b"", b"", encode_body(CreateFrameBody(f"t{topic}", TopicConfig()))
        )
        for topic in heads
    ]
    for ts in range(60):
        topic = chance.choice(list(heads))
        count = chance.choice((1, 1, 1, 5, 100))
        if ts % 3 == 0:
            key = count.to_bytes(4, "little") + b"key-%d" % ts
            pieces.append(encode(FrameType.IDEMPOTENCY, FLAG_MORE, topic, heads[topic] + 1, ts, b"", b"", key))
        pieces.append(write(topic, heads[topic] + 1, ts, [(b"", b"", b"1" * chance.choice((3, 3, 9)), b"")] * count))
        heads[topic] += count
        if chance.random() < 0.1:
            pieces.append(encode(FrameType.SYNC_MARK, 0, 1, 0, 0, b"", b"", b""))
    log = b"".join(pieces)
    frames = scan(log, 0, len(log)).frames

    def fold(batches: list[FrameColumns], is_located: bool = True) -> Fold:
        made = Fold(lambda _topic_id: UnlocatedIndex(), is_located)
        for batch in batches:
            fold_frames(made, RecoveredFile(1, "log", memoryview(log), batch), in_ram=False)
        return made

    whole = fold([scan_columns(log, 0, len(log), NO_END).frames]).state()
    assert {topic.id: topic.head_seq for topic in whole.topics} == heads
    one_by_one = [FrameColumns.of([frame]) for frame in frames]
    few = [FrameColumns.of(frames[at : at + 7]) for at in range(0, len(frames), 7)]
    repeated = [*few[:20], *few[5:]]
    all_at_once = [scan_columns(log, 0, len(log), NO_END, trusts_records=True).frames]
    for batches in (one_by_one, few, repeated, all_at_once):
        for is_located in (True, False):
            state = fold(batches, is_located).state()
            assert [_fields(topic) for topic in state.topics] == [_fields(topic) for topic in whole.topics]


def _fields(topic: Any) -> list[Any]:
    return [getattr(topic, name) for name in topic.__struct_fields__]
