"""A body in pieces is the body, whatever it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from topics.api.requests import AppendBody, RecordBody
from topics.core.errors import TopicsError
from topics.frontend.entry import wire
from topics.frontend.routes import long_bodies

pytestmark = pytest.mark.long

RECORDS_MAX = 40
RECORD_MAX_BYTES = 400
PIECE_BYTES = 48


@contextmanager
def small_pieces() -> Iterator[None]:
    with patch.multiple(long_bodies, WHOLE_BYTES_MAX=0, PIECE_BYTES=PIECE_BYTES, REST_S=0, _FRAME_BYTES_MAX=300):
        yield


def cut(body: bytes) -> AppendBody:
    """In pieces, or _UncutError."""
    with small_pieces():
        return long_bodies.Cutter(body, RECORDS_MAX, RECORD_MAX_BYTES).decode(wire.append_decoder)


def plain(request: AppendBody) -> dict[str, Any]:
    """All that was sent, with the very bytes."""
    shown = {field: getattr(request, field) for field in request.__struct_fields__ if field != "records"}
    shown["config"] = bytes(shown["config"]) if shown["config"] is not msgspec.UNSET else None
    shown["records"] = [
        (bytes(one.data), one.tag, one.node, None if one.meta is msgspec.UNSET else bytes(one.meta))
        for one in request.records
    ]
    return shown


def outcome(decoded: Any) -> Any:
    try:
        return plain(decoded())
    except TopicsError as error:
        return error.code, error.message, error.detail


def check(body: bytes) -> None:
    whole = outcome(lambda: wire.decode(wire.append_decoder, body))

    def pieces() -> AppendBody:
        with small_pieces():
            return long_bodies.decode(wire.append_decoder, body, RECORDS_MAX, RECORD_MAX_BYTES)

    found = outcome(pieces)
    if isinstance(whole, dict) and len(whole["records"]) > RECORDS_MAX and not isinstance(found, dict):
        assert found[0] == "batch_too_large"
    elif isinstance(whole, dict):
        assert found == whole
    else:  # of two faults, either may be named
        assert found[0] == whole[0]


NASTY = ['},{"data":1', '}, {"data": ', "]", "],", '"]}', "\\", '"records":[', "é→😀", "}" * 5, ""]
scalars = st.one_of(st.sampled_from(NASTY), st.integers(), st.booleans(), st.none(), st.text(max_size=20))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["data", "tag", "records", "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)
record = st.fixed_dictionaries(
    {"data": values}, optional={"tag": st.text(max_size=5), "meta": st.just({"k": "v"}), "more": values}
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "node": st.sampled_from(["n", "]", "],["]),
        "idempotency_key": st.just('k"]'),
        "more": values,
        "config": st.just({"type": "log"}),
        "if_head_seq": st.integers(0, 9),
    },
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    before, behind = draw(fields), draw(fields)
    body = {**before, "records": draw(st.lists(record, max_size=30))} | {
        name: value for name, value in behind.items() if name not in before
    }
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:  ")]))
    return json.dumps(body, ensure_ascii=draw(st.booleans()), separators=separators).encode()


@settings(max_examples=400, deadline=None)
@given(bodies())
@example(b'{"records":[]}')
@example(b'{"records":[],"x":{"records":[{"data":1},{"data":2}]}}')
@example(b'{"x":{"records":[{"data":1},{"data":2}]},"records":[{"data":3}]}')
@example(b'{"records":[{"data":1},{"data":2}],"records":[{"data":3}]}')
@example(b'{"records":[{"data":1}],"records":[]}')
@example(b'{"records":[{"data":1},{"data":2}]} x')
@example(b'{"records":[{"data":1},{"data":2},]}')
@example(b'{"records":[{"data":1} {"data":2}]}')
@example(b'{"records":[{"data":1},[{"data":2}]]}')
@example(b'{"records":[1,2]}')
@example(b'{"records":[{"data":"' + b"x" * 1000 + b'"},{"data":2}]}')
@example(b'["records",{"records":[{"data":1}]}]')
@example(b'{"records":[{"data":1},{"tag":"no data"}]}')
@example(b'{"records":[' + b",".join([b'{"data":1}'] * (RECORDS_MAX + 1)) + b"]}")
@example(b'{"records":[' + b",".join([b'{"data":{"data":[{"data":1},{"data":2}]}}'] * 20) + b"]}")
@example(b'{"records":[' + b"[" * 2000 + b"]" * 2000 + b"]}")
def test_it_is_what_the_whole_is(body: bytes) -> None:
    check(body)


@settings(max_examples=400, deadline=None)
@given(bodies(), st.data())
def test_also_when_something_is_wrong_in_it(body: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(body)))
    junk = data.draw(st.sampled_from([b"", b"]", b"}", b",", b'"', b"\xff", b"{", b'},{"data":1}', b"\\"]))
    check(body[:at] + junk + body[at + data.draw(st.integers(0, 3)) :])


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize(
    "data",
    [1, "x" * 30, {"data": [{"data": 1}, {"data": 2}]}, '},{"data":1},{"data":2}'],
    ids=lambda data: str(data)[:20],
)
def test_what_can_be_cut_is(data: Any, separators: tuple[str, str]) -> None:
    """Such a body is not decoded as a whole after all."""
    body = json.dumps({"node": "n", "records": [{"data": data}] * 30, "create": False}, separators=separators).encode()
    assert plain(cut(body)) == plain(wire.decode(wire.append_decoder, body))


def test_a_guess_that_is_right_costs_no_walk() -> None:
    body = json.dumps({"records": [{"data": {"n": n}, "tag": "t"} for n in range(40)]}).encode()
    walked = []
    with small_pieces(), patch.object(long_bodies.Cutter, "_walk", lambda *_: walked.append(1)):
        found = long_bodies.Cutter(body, RECORDS_MAX, RECORD_MAX_BYTES).decode(wire.append_decoder)
    assert len(found.records) == 40
    assert not walked


def test_a_batch_without_bound_is_given_up_early() -> None:
    """Five million records are not decoded to be counted, nor is what follows them looked at."""
    body = b'{"records":[' + b'{"data":1},' * 5000 + b"no JSON at all"
    with pytest.raises(TopicsError) as refused:
        cut(body)
    assert (refused.value.code, refused.value.detail) == ("batch_too_large", {"max_batch_records": RECORDS_MAX})


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        (b'"x":"%b",' % (b"x" * 999), b"]}"),
        (b"", b'],"x":"%b"}' % (b"x" * 999)),
        (b"", b'],"records":[{"data":1}]}'),
        (b'"x":{"records":[{"data":1}]},', b"]}"),
        (b'"x":"%b","records":[{"data":"%b"}],' % (b"x" * 999, b"x" * 999), b"]}"),
        (b'"x":"%b",' % (b"x" * 999), b'],"records":[{"data":1},5]}'),
    ],
)
def test_nor_is_one_that_cannot_be_cut(before: bytes, behind: bytes) -> None:
    """Decoded, a body of 60 MB took 940 MiB and held every thread up for two seconds."""
    body = b'{%b"records":[%b%b' % (before, b",".join([b'{"data":1}'] * 5000), behind)
    made = []
    whole = wire.decode

    def counted(decoder: msgspec.json.Decoder[Any], text: bytes) -> Any:
        made.append(text.count(b'{"data"') if decoder.type in (AppendBody, list[RecordBody]) else 0)
        return whole(decoder, text)

    with small_pieces(), patch.object(wire, "decode", counted):
        outcome(lambda: long_bodies.decode(wire.append_decoder, body, RECORDS_MAX, RECORD_MAX_BYTES))
    assert max(made) < 100


def test_msgspec_says_where_a_value_ends() -> None:
    """Cutting value by value rests on this; with a version that says it otherwise long bodies are decoded whole."""
    for text, end in ((b'{"data":1} , 2', 11), (b"1]", 1), (b'"a"\n\n]', 5), (b"[1,{}],", 6)):
        cutter = long_bodies.Cutter(b"  " + text, RECORDS_MAX, RECORD_MAX_BYTES)
        assert cutter.end_of_value(2) == 2 + end
    for text in (b'{"data":', b"1", b"nul,", b"[1,]", b'"\\x",'):
        with pytest.raises(long_bodies.UncutError):
            long_bodies.Cutter(text, RECORDS_MAX, RECORD_MAX_BYTES).end_of_value(0)
