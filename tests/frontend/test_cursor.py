"""The composite cursor, and where a session goes on (api §7 Resume)."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from topics.frontend.live.watch import resume
from topics.frontend.live.wording import decode_cursor, encode_cursor

names = st.text("abcdeABCDE0189._:-", min_size=1, max_size=20)
positions = st.dictionaries(names, st.integers(0, 2**64 - 1), max_size=8)


@given(positions)
def test_a_cursor_is_base64url_of_the_json_map(places: dict[str, int]) -> None:
    encoded = encode_cursor(places)
    assert not set(encoded) & set(b"=+/\r\n")
    assert json.loads(base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))) == places
    assert decode_cursor(encoded) == places


@given(st.binary(max_size=60))
@example(b"")
@example(b"e30=")
@example(encode_cursor({"t": 1})[:-1])
@example(base64.urlsafe_b64encode(b'{"t":-1}').rstrip(b"="))
@example(base64.urlsafe_b64encode(b'{"t":1.5}').rstrip(b"="))
@example(base64.urlsafe_b64encode(b'{"t":null}').rstrip(b"="))
@example(base64.urlsafe_b64encode(b'{"t":"1"}').rstrip(b"="))
@example(base64.urlsafe_b64encode(b"[1]").rstrip(b"="))
@example(base64.urlsafe_b64encode(b'{"\xff":1}').rstrip(b"="))
@example(base64.urlsafe_b64encode(b"[" * 5000).rstrip(b"="))
@example(encode_cursor({"t": 2**64}))
def test_what_never_was_a_cursor_is_none(garbage: bytes) -> None:
    decoded = decode_cursor(garbage)
    if decoded is not None:  # by chance it may be one
        text = base64.urlsafe_b64decode(garbage + b"=" * (-len(garbage) % 4))
        assert json.loads(text) == decoded
        assert all(seq < 2**64 for seq in decoded.values()), "the end of a stream there could not be told to its shard"


@given(positions, positions, st.booleans(), st.data())
def test_resume_topic_by_topic(stored: dict[str, int], seen: dict[str, int], exact: bool, data: st.DataObject) -> None:
    ended = data.draw(st.sets(st.sampled_from(sorted(stored)))) if stored else set()
    heads = {name: data.draw(st.integers(0, 2**64 - 1)) for name in stored}
    follows = set(stored)
    held = {name: seq for name, seq in stored.items() if name not in ended}
    resumed = resume(follows, held, seen, exact, heads)
    assert set(resumed) <= follows, "topics of other sessions mean nothing"
    for name in follows:
        if name not in seen:
            assert resumed.get(name) == held.get(name)
        elif name in ended:
            assert resumed[name] == seen[name], "its end is said again to who has not seen it"
        elif exact:
            assert resumed[name] == min(held[name], seen[name]), "only back"
        elif seen[name] > heads[name]:
            assert resumed[name] == min(held[name], seen[name]), "beyond the head is nobody's position"
        else:
            assert resumed[name] == seen[name]


@pytest.mark.parametrize("exact", [True, False])
def test_without_an_id_the_session_knows_best(exact: bool) -> None:
    assert resume({"a", "b"}, {"a": 5}, None, exact, {"a": 9}) == {"a": 5}
