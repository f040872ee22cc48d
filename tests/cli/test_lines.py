"""Lines of the input and of the output: pure functions."""

from __future__ import annotations

import argparse
import json
from typing import Any

import msgspec
import pytest

from topics.cli import shared
from topics.cli.list_topics import HEADINGS
from topics.cli.queue_commands import Lease, job_argument, parse_jobs
from topics.cli.read import timestamp_ms
from topics.cli.shared import BadLineError, LineBatch, data_lines, record_lines
from topics.cli.write import is_certain, key_of, parse
from topics.client import Client, ClientError, NewRecord, Record, ServiceFaultError, UnreachableError
from topics.client.errors import api_error
from topics.terminal import table


def record(seq: int, data: bytes, **rest: Any) -> Record:
    return Record(seq=seq, ts=9, raw=msgspec.Raw(data), **rest)


def test_data_is_printed_byte_for_byte() -> None:
    assert record_lines([record(1, b'{"a": 1.50, "a": "\\u00e9"}', tag="t")]) == (
        b'{"$seq":1,"$ts":9,"data":{"a": 1.50, "a": "\\u00e9"},"$tag":"t"}\n'
    )


def test_data_of_several_lines_is_one_line() -> None:
    records = [record(1, b'{\r\n  "a": [\n1]\n}'), record(2, b"2"), record(3, b'"\\n"')]
    lines = record_lines(records).splitlines()
    assert [json.loads(line)["data"] for line in lines] == [{"a": [1]}, 2, "\n"]
    assert [json.loads(line) for line in data_lines(records).splitlines()] == [{"a": [1]}, 2, "\n"]


def test_lines_of_several_topics_begin_with_theirs() -> None:
    lines = record_lines([record(1, b'"}\\n{"'), record(2, b"{\n}")], "orders").splitlines()
    assert [list(json.loads(line))[:2] for line in lines] == [["topic", "$seq"]] * 2
    assert {json.loads(line)["topic"] for line in lines} == {"orders"}
    assert record_lines([], "orders") == b""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{bad", "is not JSON"),
        (b"1 2", "is not JSON"),
        (b"1,2", "is not JSON"),
        (b"[1", "is not JSON"),
        (b"NaN", "is not JSON: invalid character at byte 0: NaN"),
        (b'"\\ud800"', "is not accepted: an unpaired surrogate escape (\\ud800) at byte 1, which"),
        (b"[" * 5_000 + b"]" * 5_000, "is not accepted: its JSON is nested too deeply"),
        (b'"\xff"', "is not UTF-8 (byte 1)"),
    ],
)
def test_a_line_that_is_no_json(line: bytes, reason: str) -> None:
    records, bad = parse(LineBatch(5, [b"1", b"", line, b"2"]), whole_records=False)
    assert records == [NewRecord(msgspec.Raw(b"1"))]
    assert bad is not None
    assert bad.number == 7
    assert str(bad).startswith(f"line 7: {reason}")


def test_a_long_bad_line_is_shown_in_part() -> None:
    _, bad = parse(LineBatch(1, [b"x" * 1000]), whole_records=False)
    assert str(bad).endswith(": " + "x" * 120 + "…")


def test_whole_records_also_as_read_prints_them() -> None:
    lines = [
        b'{"data": 1.50, "tag": "t", "node": "n", "meta": {"k": "v"}, "delay_ms": 5, "order_key": "o"}',
        b'{"topic":"a","$seq":1,"$ts":9,"data":[1 ],"$tag":"u","$node":"m"}',
        b'{"data":null}',
    ]
    (first, second, third), bad = parse(LineBatch(1, lines), whole_records=True, tag="else")
    assert bad is None
    assert first == NewRecord(msgspec.Raw(b"1.50"), "t", "n", {"k": "v"}, delay_ms=5, order_key="o")
    assert second == NewRecord(msgspec.Raw(b"[1 ]"), "u", "m")
    assert third == NewRecord(msgspec.Raw(b"null"), "else")


@pytest.mark.parametrize("line", [b"1", b'{"dato":1}', b'{"data":1,"tags":"x"}', b'{"tombstone":{"gap_from":1}}'])
def test_a_line_that_is_no_record(line: bytes) -> None:
    records, bad = parse(LineBatch(1, [line]), whole_records=True)
    assert records == []
    assert str(bad).startswith("line 1: is not a record like")


@pytest.mark.parametrize(
    ("error", "certain", "after_a_lost_answer"),
    [
        (api_error(422, "topic_full", "", {}), True, True),
        (api_error(400, "record_too_large", "", {}), True, True),
        (BadLineError(1, b"", ""), True, True),
        (api_error(401, "unauthorized", "", {}), True, False),
        (api_error(429, "throttled", "", {}), True, False),
        (UnreachableError(""), True, False),
        (ServiceFaultError(200, "unknown", "", {}), False, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_only_what_is_certain_is_said_to_be_unwritten(
    error: BaseException, certain: bool, after_a_lost_answer: bool
) -> None:
    assert is_certain(error) is certain
    if isinstance(error, ClientError):
        error.may_be_done = True
        assert is_certain(error) is after_a_lost_answer


@pytest.mark.parametrize(("data", "key"), [(b'{"id":"a\\u0062"}', "ab"), (b'{"x":1,"id": 1.50}', "1.50")])
def test_the_key_of_a_record(data: bytes, key: str) -> None:
    assert key_of(NewRecord(msgspec.Raw(data)), "id", 1) == key


@pytest.mark.parametrize(
    "data", [b"{}", b"3", b'{"id":null}', b'{"id":{}}', b'{"id":""}', b'{"id":"%b"}' % (b"x" * 257)]
)
def test_a_record_without_a_key(data: bytes) -> None:
    with pytest.raises(BadLineError, match=r"^line 4: .*'id'"):
        key_of(NewRecord(msgspec.Raw(data)), "id", 4)


def test_jobs_up_to_the_first_line_that_is_none() -> None:
    job = b'{"$seq":7,"$ts":1,"data":0,"lease_id":"lease_1","deadline":2,"deliveries":1,"node":"w"}'
    assert parse_jobs(LineBatch(1, [job, b" "])) == ([Lease(7, "lease_1", "w")], None)
    leases, bad = parse_jobs(LineBatch(3, [b'{"$seq":8,"lease_id":"l"}', b'{"$seq":9}', job]))
    assert leases == [Lease(8, "l")]
    assert bad is not None
    assert str(bad).startswith("line 4: is not a job like")


def test_jobs_as_arguments() -> None:
    assert job_argument("7:lease_1") == Lease(7, "lease_1")
    for wrong in ("7", "7:", "lease_1"):
        with pytest.raises(argparse.ArgumentTypeError, match="SEQ:LEASE_ID"):
            job_argument(wrong)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1767225600000", 1767225600000),
        ("2026-01-01", 1767225600000),
        ("2026-01-01T00:00:00Z", 1767225600000),
        ("2026-01-01T01:00:00+01:00", 1767225600000),
        ("2026-01-01T00:00:00.001", 1767225600001),
        ("2026-01-01T00:00:00.0001", 1767225600001),  # at this time or later
    ],
)
def test_times(text: str, ms: int) -> None:
    assert timestamp_ms(text) == ms


@pytest.mark.parametrize("text", ["yesterday", "-1", "1969-12-31T00:00:00Z"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no time|is before 1970"):
        timestamp_ms(text)


def test_the_table_has_columns_as_wide_as_they_need() -> None:
    rows = [("a", "log", "disk", "1", "100000", "1", "1"), ("orders.long", "queue", "ephemeral", "0", "0", "7", "-")]
    assert table([HEADINGS, *rows], text_columns=3).splitlines() == [
        "TOPIC        TYPE   CLASS      RECORDS   BYTES  HEAD  OLDEST",
        "a            log    disk             1  100000     1       1",
        "orders.long  queue  ephemeral        0       0     7       -",
    ]


def test_a_refusal_is_told_with_its_cause(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/operations.md lists by it what to do. It was only in the answer."""
    monkeypatch.setattr(shared, "end_in_order", lambda: None)  # its signals are those of pytest here

    def ask(client: Client, options: argparse.Namespace) -> int:
        raise api_error(503, "storage_unavailable", "the log cannot be written now", {"cause": "ENOSPC"})

    assert shared.run("write", ask, argparse.Namespace(environment={})) == 1
    assert capsys.readouterr().err == "topics write: storage_unavailable: the log cannot be written now (ENOSPC)\n"
