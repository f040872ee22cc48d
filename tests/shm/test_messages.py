"""Messages come out of a ring as they went in."""

from __future__ import annotations

from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.shm import messages
from topics.shm.topic_messages import Hello, PutTopic, SessionClose, SessionGet, SessionOpenReply, Watch


def test_calls_replies_errors_and_notices() -> None:
    for call in (
        PutTopic("t", TopicConfig(), True),
        Watch(3, "t", 1, 2),
        SessionGet("w"),
        SessionClose("w", 1, {"t": 5}),
        Hello(4),
    ):
        message = memoryview(b"".join(messages.encode_call(1, call)))
        assert messages.decode(message) == call
    reply = SessionOpenReply(b"body", {"t": 1}, True)
    assert messages.decode(memoryview(messages.encode_reply(1, reply))) == reply
    error = messages.decode_error(memoryview(messages.encode_error(2, TopicsError("head_mismatch", "m", {"a": 1}))))
    assert (error.code, error.message, error.detail) == ("head_mismatch", "m", {"a": 1})
    assert messages.decode_notify(memoryview(messages.encode_notify([1, 2**63]))) == [1, 2**63]
