"""Bodies that are JSON and fit, and refusals of others (api §0.2, §2, §3)."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import case
from topics.api.requests import AppendBody, DiffBody, RecordBody, WatchBody
from topics.core.errors import TopicsError
from topics.frontend.entry import wire
from topics.frontend.live.websocket_commands import decode as decode_command
from topics.frontend.routes.append import ATTRIBUTED_INLINE_MAX, is_long


def refusal(body: bytes) -> TopicsError:
    with pytest.raises(TopicsError) as refused:
        wire.decode(wire.append_decoder, body)
    assert refused.value.code == "invalid_request"
    return refused.value


def write_of(data: bytes) -> bytes:
    return b'{"records":[{"data":' + data + b"}]}"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        st.lists,
    )
)
def test_any_json_is_kept_as_it_is(value: object) -> None:
    for raw in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8", "replace")):
        assert bytes(wire.decode(wire.append_decoder, write_of(raw)).records[0].data) == raw


@pytest.mark.parametrize(
    ("data", "position"),
    [
        (b"NaN", 20),
        (b"[1,]", 23),
        (b"01", 21),
        (b'"\\ud8', 26),
        (b'"\\ud83d\\ude00\\x"', 34),
        (b'"\\\\ud83d\\x"', 29),
        (b'"\xff"', 21),
        (b'"\xed\xa0\x80"', 21),
        (b'{"\xc3":1}', 22),
        (b'"\x00"', 21),
    ],
)
def test_what_is_not_json_is_refused_with_its_position(data: bytes, position: int | None) -> None:
    error = refusal(write_of(data))
    assert error.detail is not None
    if position is not None:
        assert error.detail == {"position": position}
        assert f"at byte {position}" in error.message


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        (b'{"topics": {"a": {}, "b": null}}', "topics.b", "Expected `object`, got `null` - at `$.topics.b`"),
        (b'{"topics": {"a": {}, "b": {"tail": 1}, "c": 1}}', "topics.b.tail", "`$.topics.b.tail`"),
        (b'{"topics": {"a": 1, "a": {}}}', "topics.…", "`$.topics.…`"),
        (b'{"topics": {"a": 1}, "topics": 2}', "topics.…", "`$.topics.…`"),
        (b'{"topics": 2}', "topics", "`$.topics`"),
    ],
)
def test_a_start_that_does_not_fit_is_named_by_its_topic(text: bytes, field: str, reason: str) -> None:
    """The field was `topics[...]`, whichever of 256 topics was meant."""
    for decode in (lambda: wire.decode_as(WatchBody, text), lambda: decode_command(b'{"op":"subscribe",' + text[1:])):
        with pytest.raises(TopicsError) as refused:
            decode()
        assert refused.value.detail == {"field": field}
        assert reason in refused.value.message


@pytest.mark.parametrize("lone", [b"\\ud800", b"\\uDBFF", b"\\udc00", b"\\uDFFF"])
def test_an_unpaired_surrogate_is_called_so(lone: bytes) -> None:
    pair = b"\\ud83d\\ude00"
    for before in (b"", b"x" * 30, pair, b"\\\\", b"\\n" * 9):
        for after in (b"", b"x", b"x" * 30, b"\\u0041", b"\\n", pair):
            with case(before, after):
                error = refusal(write_of(b'"' + before + lone + after + b'"'))
                assert error.detail == {"position": len(b'{"records":[{"data":"') + len(before)}
                assert f"unpaired surrogate escape ({lone.decode()})" in error.message


def test_half_a_pair_that_is_cut_short_is_that() -> None:
    for cut in (b"", b"\\", b"\\u", b"\\ud", b"\\uDc", b"\\udc0"):
        assert "truncated" in refusal(b'{"records":[{"data":"\\ud83d' + cut).message


def test_bad_utf8_far_into_a_long_body_is_found_where_it_is() -> None:
    text = "é" * (wire.UTF8_STEP_BYTES // 2 + 100)  # the step ends inside a character
    start = len(b'{"records":[{"data":"')
    for before in (text, "x" + text):
        body = write_of(b'"' + before.encode() + b'\xff"')
        assert refusal(body).detail == {"position": start + len(before.encode())}
        assert wire.decode(wire.append_decoder, write_of(b'"' + before.encode() + b'"'))
    cut = write_of(b'"' + text.encode() + b'"')[: start + 2 * 50 + 1]
    assert refusal(cut).detail == {"position": len(cut) - 1}


def test_nesting_is_bounded() -> None:
    for opening in (b"[", b'{"a":'):
        assert "nested too deeply" in refusal(write_of(opening * 100_000)).message
    assert wire.decode(wire.append_decoder, write_of(b"[" * 500 + b"]" * 500))


def test_digits_without_end() -> None:
    digits = b"1" * 100_000
    assert bytes(wire.decode(wire.append_decoder, write_of(digits)).records[0].data) == digits
    refusal(b'{"records":[{"data":1}],"if_head_seq":' + digits + b"}")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"records":[{"data":1,"tag":7}]}', "records[0].tag"),
        (b'{"records":[{"tag":"x"}]}', "records[0]"),
        (b'{"records":[{"data":1}],"create":"no"}', "create"),
        (b'{"records":[{"data":1}],"if_head_seq":-1}', "if_head_seq"),
        (b"{}", "records"),
        (b"[]", None),
    ],
)
def test_a_field_that_does_not_fit_is_named(body: bytes, field: str | None) -> None:
    error = refusal(body)
    assert (error.detail or {}).get("field") == field
    assert (field or "").rpartition(".")[2] in error.message


def test_optional_fields_may_be_null() -> None:
    request = wire.decode(
        wire.append_decoder,
        b'{"records":[{"data":null,"tag":null,"node":null,"meta":null}],"config":null,"idempotency_key":null}',
    )
    record = request.records[0]
    assert (bytes(record.data), record.tag, record.node) == (b"null", None, None)
    assert not wire.given(record.meta)
    assert not wire.given(request.config)
    assert wire.given(wire.decode(wire.append_decoder, b'{"records":[],"config":{}}').config)


def test_diff_counts() -> None:
    request = wire.decode_as(DiffBody, b'{"from_seq":18446744073709551615,"limit":0,"node":["a","b"],"surprise":[1]}')
    assert (request.from_seq, request.limit, request.node) == (2**64 - 1, 0, ["a", "b"])
    for body, field in (
        (b'{"limit":18446744073709551616}', "limit"),
        (b'{"wait_ms":1.0}', "wait_ms"),
        (b'{"from_ts":true}', "from_ts"),
    ):
        with pytest.raises(TopicsError) as refused:
            wire.decode_as(DiffBody, body)
        assert field in refused.value.message


def test_meta_is_an_object_of_strings() -> None:
    assert wire.decode_meta(msgspec.Raw(b'{"a":"b"}'), "records[0].meta") == {"a": "b"}
    for meta in (b"[]", b'"x"', b'{"a":1}', b'{"a":null}', b'{"a":{"b":"c"}}'):
        with pytest.raises(TopicsError) as refused:
            wire.decode_meta(msgspec.Raw(meta), "records[3].meta")
        assert "records[3].meta" in refused.value.message


def test_many_records_with_attributes_are_left_to_a_thread() -> None:
    """Each takes some µs to lay out, so ten thousand would hold up the loop. Others take next to nothing."""
    plain, tagged = RecordBody(msgspec.Raw(b"1")), RecordBody(msgspec.Raw(b"1"), tag="a:b")
    many = [plain] * ATTRIBUTED_INLINE_MAX
    assert is_long(AppendBody([*many, tagged]))
    assert is_long(AppendBody([*many, plain], node="me"))
    assert not is_long(AppendBody([*many, plain]))
    assert not is_long(AppendBody([tagged] * ATTRIBUTED_INLINE_MAX))
