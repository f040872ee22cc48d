"""Metrics in words, read back by parsers that are not ours."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.core.cost import lines_of
from topics.frontend.entry.responses import weight
from topics.frontend.operators.exposition import PIECE_SAMPLES, Buckets, Family, json, single, text
from topics.frontend.operators.service_routes import wants_json

MANY = PIECE_SAMPLES * 2 + 1
FAMILIES = [
    single("plain", "One number", 1.5),
    Family("none", "No sample", ("topic",), []),
    Family("each", "Many", ("topic",), [((f"t{n}.a:b-c_d",), n) for n in range(MANY)]),
    Family("two_total", "Two labels", ("a", "b"), [(("x", "0"), 1), (("x", "1"), 2), (("y", "0"), 3)]),
    Family(
        "took",
        "Times",
        ("route",),
        [(("r",), Buckets(["1", "2.5"], [3, 0, 4], 17.25)), (("s",), Buckets(["1", "2.5"], [0, 0, 0], 0))],
    ),
]


def test_the_text_says_what_was_put_in() -> None:
    rendered = b"".join(text(FAMILIES)).decode()
    read = {family.name: family for family in text_string_to_metric_families(rendered)}
    assert set(read) == {"plain", "each", "two", "took"}
    assert [(read[name].type, read[name].documentation) for name in ("plain", "two", "took")] == [
        ("gauge", "One number"),
        ("counter", "Two labels"),
        ("histogram", "Times"),
    ]
    assert [sample.value for sample in read["plain"].samples] == [1.5]
    each = {sample.labels["topic"]: sample.value for sample in read["each"].samples}
    assert each == {f"t{n}.a:b-c_d": n for n in range(MANY)}
    assert {(s.labels["a"], s.labels["b"]): s.value for s in read["two"].samples} == {
        ("x", "0"): 1,
        ("x", "1"): 2,
        ("y", "0"): 3,
    }
    took = [(s.name, s.labels.get("le"), s.value) for s in read["took"].samples if s.labels["route"] == "r"]
    assert took == [
        ("took_bucket", "1", 3),
        ("took_bucket", "2.5", 3),
        ("took_bucket", "+Inf", 7),
        ("took_sum", None, 17.25),
        ("took_count", None, 7),
    ]


def test_the_json_says_the_same() -> None:
    read: dict[str, Any] = msgspec.json.decode(b"{%b}" % b"".join(json(FAMILIES)))
    assert read == {
        "plain": 1.5,
        "none": {},
        "each": {f"t{n}.a:b-c_d": n for n in range(MANY)},
        "two_total": {"x": {"0": 1, "1": 2}, "y": {"0": 3}},
        "took": {
            "r": {"buckets": {"1": 3, "2.5": 3, "+Inf": 7}, "sum": 17.25, "count": 7},
            "s": {"buckets": {"1": 0, "2.5": 0, "+Inf": 0}, "sum": 0, "count": 0},
        },
    }


def test_no_piece_is_longer_than_its_share() -> None:
    assert max(piece.count(b"each{") for piece in text(FAMILIES)) == PIECE_SAMPLES
    assert max(piece.count(b".a:b-c_d") for piece in json(FAMILIES)) == PIECE_SAMPLES


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (b"", 0),
        (b"*/*", 1),
        (b"text/*;q=0.3", 0.3),
        (b"text/plain;q=0.2, */*", 0.2),
        (b"application/json, text/plain;version=0.0.4;q=0.5", 0.5),
        (b"TEXT/PLAIN", 1),
        (b"text/plain;q=7", 1),
        (b"text/plain;q=-1", 0),
        (b"text/plain;q=x", 1),
        (b"text/plain;q=0, */*", 0),
    ],
)
def test_weights_of_an_accept_header(accept: bytes, wanted: float) -> None:
    assert weight(accept, b"text/plain") == wanted


def test_the_rest_of_a_very_long_accept_header_is_not_read() -> None:
    """150 KB of commas, which a head may have, took 30 ms without a key."""
    assert lines_of(lambda: weight(b"a," * 75_000, b"text/plain")) < 20_000


@pytest.mark.parametrize(
    ("accept", "is_json"),
    [
        (b"application/json", True),
        (b"application/json, */*", True),
        (b"application/json;q=0.9, text/plain;q=0.1", True),
        (b"Application/JSON; charset=utf-8", True),
        (b"application/json;q=0.1, text/plain", False),
        (b"application/json;q=0", False),
        (b"*/*", False),
        (b"", False),
        (b"text/html", False),
        (b"application/*", False),
        # What Prometheus 3 sends.
        (b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", False),
    ],
)
def test_who_gets_json(accept: bytes, is_json: bool) -> None:
    assert wants_json(accept) is is_json
