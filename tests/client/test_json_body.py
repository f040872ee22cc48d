"""Values become JSON, or are refused: none is changed to `null` on its way."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from tests.harness import Service
from topics.client import AsyncClient, Client, ClientError, NewRecord, NotFiniteError, NotFoundError, calls
from topics.client.calls import encode_body

NAN = math.nan
INF = math.inf


@dataclasses.dataclass
class Reading:
    value: float
    unit: str | None = None


class Point(msgspec.Struct):
    at: list[float]


@pytest.mark.parametrize(
    ("records", "path"),
    [
        ([NAN], "records[0].data"),
        ([1, {"a": None}, NewRecord({"prices": [1.5, -INF]}, tag="x")], "records[2].data.prices[1]"),
        ([{"a": {"b": (1, {"c": INF})}}], "records[0].data.a.b[1].c"),
        ([Reading(NAN)], "records[0].data.value"),
        ([{"points": [Point([0.0]), Point([NAN])]}], "records[0].data.points[1].at[0]"),
        ([{7: {2.5: NAN}}], "records[0].data.7.2.5"),
        ([2**70, msgspec.Raw(b"null"), {"raw": msgspec.Raw(b'{"x":null}'), "set": {NAN}}], "records[2].data.set[0]"),
    ],
)
def test_a_number_that_is_not_finite_is_refused_by_its_place(records: list[Any], path: str) -> None:
    builds: list[Callable[[], object]] = [lambda: calls.append("t", records), lambda: calls.stage("t", "x", records)]
    for build in builds:
        with pytest.raises(NotFiniteError) as refused:
            build()
        assert refused.value.path == path
        assert str(refused.value).startswith(f"{path} is ")
        assert isinstance(refused.value, ClientError)


def test_nothing_was_sent(service: Service, topic: str) -> None:
    async def append() -> None:
        async with AsyncClient(service.url) as client:
            await client.append(topic, [{"price": NAN}])

    with Client(service.url) as client:
        with pytest.raises(NotFiniteError, match=r"^records\[0\]\.data is nan"):
            client.append(topic, [NewRecord(NAN)])
        with pytest.raises(NotFiniteError, match=r"^priority is inf"):
            client.put_topic(topic, priority=INF)
        with pytest.raises(NotFiniteError):
            asyncio.run(append())
        with pytest.raises(NotFoundError):
            client.get_topic(topic)


KEPT = [
    None,
    {"a": None},
    [None, [None]],
    "null",
    2**70,
    -(2**63) - 1,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    0.1,
    1.0,
    True,
]


def test_what_json_has_comes_back_as_it_was(service: Service, topic: str) -> None:
    with Client(service.url) as client:
        client.append(topic, KEPT)
        found = [record.data for record in client.read(topic)]
    assert [(value, type(value)) for value in found] == [(value, type(value)) for value in KEPT]
    assert math.copysign(1, found[KEPT.index(-0.0)]) == -1


@pytest.mark.parametrize(
    ("value", "json"),
    [
        (Decimal("1.50"), b'"1.50"'),
        (Decimal("NaN"), b'"NaN"'),
        (datetime(2026, 3, 1, 12, tzinfo=UTC), b'"2026-03-01T12:00:00Z"'),
        (datetime(2026, 3, 1, 12), b'"2026-03-01T12:00:00"'),
        (date(2026, 3, 1), b'"2026-03-01"'),
        (b"\xcb\x7f\xf8", b'"y3/4"'),
        ({3}, b"[3]"),
        ((1, None), b"[1,null]"),
        ({1: "a", 2.5: None}, b'{"1":"a","2.5":null}'),
        ({1: "a", "1": "b"}, b'{"1":"a","1":"b"}'),
    ],
)
def test_what_other_types_become(value: Any, json: bytes) -> None:
    """docs/api.md §0.2"""
    assert encode_body(value) == json


@pytest.mark.parametrize("value", [{True: 1}, {None: 1}, {(1, 2): 3}, object(), 1j])
def test_what_has_no_json_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        encode_body(value)


def test_what_only_looks_like_such_a_number_is_sent() -> None:
    """In MessagePack, which is searched when the JSON has a `null`."""
    assert encode_body([None, b"\xcb\x7f\xf8" * 3, 2**80]) == b'[null,"y3/4y3/4y3/4",1208925819614629174706176]'
