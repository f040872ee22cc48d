"""Lines of stdin: which go together in a request, and when it is sent."""

from __future__ import annotations

import os

import pytest

from topics.cli import shared as lines_of
from topics.cli.shared import BadLineError, Batcher, LineBatch, LineSource


def batcher(lines_max: int = 3, bytes_max: int = 100, delay_s: float = 1.0) -> Batcher:
    return Batcher(lines_max=lines_max, bytes_max=bytes_max, delay_s=delay_s)


def test_a_full_batch_goes_at_once() -> None:
    lines = batcher()
    lines.add([b"1", b"2", b"3", b"4"], now_s=0.0)
    assert lines.due(0.0, ended=False) == LineBatch(1, [b"1", b"2", b"3"])
    assert lines.due(0.0, ended=False) is None
    assert lines.due(0.0, ended=True) == LineBatch(4, [b"4"])
    assert lines.due(0.0, ended=True) is None


def test_a_line_waits_for_others_no_longer_than_the_delay() -> None:
    lines = batcher()
    assert lines.wait_s(5.0) is None
    lines.add([b"1"], now_s=5.0)
    lines.add([b"2"], now_s=5.75)
    assert lines.due(5.75, ended=False) is None
    assert lines.wait_s(5.75) == 0.25
    assert lines.wait_s(7.0) == 0.0
    assert lines.due(6.0, ended=False) == LineBatch(1, [b"1", b"2"])
    assert lines.wait_s(6.0) is None


def test_bytes_cut_a_batch_and_a_long_line_goes_alone() -> None:
    lines = batcher(lines_max=10, bytes_max=4)
    lines.add([b"aa", b"bb", b"c", b"dddddd", b"e"], now_s=0.0)
    cut = []
    while (batch := lines.due(0.0, ended=True)) is not None:
        cut.append(batch)
    assert cut == [LineBatch(1, [b"aa", b"bb"]), LineBatch(3, [b"c"]), LineBatch(4, [b"dddddd"]), LineBatch(5, [b"e"])]


def test_a_batch_knows_its_lines_by_number() -> None:
    batch = LineBatch(7, [b"a", b"", b" \r", b"b "])
    assert batch.last == 10
    assert list(batch.numbered()) == [(7, b"a"), (10, b"b")]


def test_lines_come_whole_whatever_the_pipe_cuts() -> None:
    reader, writer = os.pipe()
    source = LineSource(reader)
    try:
        assert source.take(0.0) == []
        for part, lines in (
            (b"on", []),
            (b"e\ntwo\nthr", [b"one", b"two"]),
            (b"ee", []),
            (b"\n\nend", [b"three", b""]),
        ):
            os.write(writer, part)
            assert source.take(None) == lines
        os.close(writer)
        assert not source.ended
        assert source.take(None) == [b"end"]
        assert source.ended
    finally:
        os.close(reader)


def test_a_line_without_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_of, "LINE_MAX_BYTES", 10)
    reader, writer = os.pipe()
    try:
        source = LineSource(reader)
        os.write(writer, b"1\n2\nxxxxxxxxx")
        assert source.take(None) == [b"1", b"2"]
        os.write(writer, b"xx")
        with pytest.raises(BadLineError, match=r"^line 3: is longer than 10 bytes: xxxxxxxxx$"):
            source.take(None)
    finally:
        os.close(reader)
        os.close(writer)
