"""Appends and their answers come out of a ring as they went in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.core.config import CLASSES, TopicConfig
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendOptions, AppendReply
from topics.storage.frame import lay_out

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,40}", fullmatch=True)


@given(
    name=names,
    create=st.booleans(),
    if_head_seq=st.none() | st.integers(0, 2**64 - 1),
    key=st.binary(max_size=300),
    config=st.none() | st.builds(TopicConfig, ttl_ms=st.integers(0, 2**63)),
    data=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=20),
)
def test_append_round_trip(
    name: str, create: bool, if_head_seq: int | None, key: bytes, config: TopicConfig | None, data: list[bytes]
) -> None:
    laid_out = lay_out([(b"n", b"", piece, b"") for piece in data])
    options = AppendOptions(name, create, if_head_seq, key, config)
    parts = append_messages.encode_append(7, options, laid_out.offset_len, laid_out.flags, laid_out.buffer)
    message = memoryview(b"".join(parts))
    assert messages.head(message) == (messages.MessageKind.APPEND, 7, len(data))
    request = append_messages.decode_append(message)
    assert (request.options, request.count) == (options, len(data))
    assert request.offset_len == laid_out.offset_len
    assert (request.record_flags, request.frames) == (laid_out.flags, laid_out.buffer)


@pytest.mark.parametrize("durability", CLASSES)
def test_append_reply_round_trip_and_times(durability: str) -> None:
    reply = AppendReply(5, 3, 7, True, False, durability, 0, 0)
    encoded = append_messages.encode_append_reply(9, reply)
    assert append_messages.decode_append_reply(memoryview(encoded)) == reply
    append_messages.add_times(encoded, 11, 22)
    timed = append_messages.decode_append_reply(memoryview(encoded))
    assert (timed.wal_us, timed.fsync_us, timed.first_seq) == (11, 22, 5)
