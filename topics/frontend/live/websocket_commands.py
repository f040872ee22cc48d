"""The commands of a WebSocket client (api §7.7): one JSON object a message, its kind in `op`.

{"op":"subscribe","request_id":1,"topic":"orders","from_seq":0}
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from topics.api.requests import AppendBody, Count, FollowBody, StartBody
from topics.core.errors import TopicsError, invalid
from topics.frontend.entry import wire
from topics.frontend.entry.responses import encode_json
from topics.settings import COMMAND_BYTES_MAX
from topics.shm.durations import Route

_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
RequestId = Annotated[str, msgspec.Meta(max_length=256)] | _Number | None
"""The client's own id, repeated in every answer to a command."""


class Subscribe(FollowBody, tag_field="op", tag="subscribe", kw_only=True):
    """Follow `topic`, or `topics`: a list of names with one start, or a map from name to start."""

    request_id: RequestId = None
    topic: str | None = None
    topics: list[str] | dict[str, StartBody] | None = None
    from_seq: Count = 0
    tail: bool = False
    from_ts: Count | None = None

    def starts(self) -> dict[str, StartBody]:
        wire.check_counts(self)
        if isinstance(self.topics, dict):
            if self.topic is not None or self.from_seq or self.tail or self.from_ts is not None:
                raise invalid("topics as an object has all starts: leave out topic, from_seq, tail and from_ts")
            return self.topics
        start = StartBody(self.from_seq, self.tail, self.from_ts)
        return dict.fromkeys(_names(self.topic, self.topics), start)


class Unsubscribe(msgspec.Struct, tag_field="op", tag="unsubscribe", kw_only=True):
    """Follow `topic` or `topics` no longer. Topics that are not followed are ignored."""

    request_id: RequestId = None
    topic: str | None = None
    topics: list[str] | None = None

    def names(self) -> list[str]:
        return _names(self.topic, self.topics)


class Publish(AppendBody, tag_field="op", tag="publish", kw_only=True):
    """Append records (api §2)."""

    topic: str
    request_id: RequestId = None
    return_seqs: bool = True


class Ping(msgspec.Struct, tag_field="op", tag="ping", kw_only=True):
    """Ask for a `pong`."""

    request_id: RequestId = None


Command = Subscribe | Unsubscribe | Publish | Ping
ROUTES: Final[dict[type[Command], Route]] = {
    Subscribe: Route.WS_SUBSCRIBE,
    Unsubscribe: Route.WS_UNSUBSCRIBE,
    Publish: Route.WS_PUBLISH,
    Ping: Route.WS_PING,
}
"""The route under which the time until the answer to a command is measured."""


class _Answerable(msgspec.Struct):
    request_id: RequestId = None


class _Any(_Answerable):
    op: str = ""


_decoder: Final[msgspec.json.Decoder[Command]] = msgspec.json.Decoder(Command)
_publish_decoder: Final = msgspec.json.Decoder(Publish)
_any_decoder: Final = msgspec.json.Decoder(_Any)
_answerable_decoder: Final = msgspec.json.Decoder(_Answerable)


def decode(message: bytes, command_max_bytes: int = COMMAND_BYTES_MAX) -> Command:
    """Decode a command. Only a publish may be longer than `command_max_bytes`: no list of another is decoded then."""
    if len(message) <= command_max_bytes:
        return wire.decode(_decoder, message)
    if wire.decode(_any_decoder, message).op != "publish":
        detail = {"max_body_bytes": command_max_bytes}
        raise TopicsError("payload_too_large", f"only a publish may have {len(message)} bytes", detail)
    return wire.decode(_publish_decoder, message)


def request_id_of(message: bytes) -> RequestId:
    """Return the `request_id` of a malformed command; None if it cannot be read."""
    try:
        return _answerable_decoder.decode(message).request_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _names(topic: str | None, topics: list[str] | None) -> list[str]:
    if (topic is None) == (topics is None):
        raise invalid("give topic or topics, one of the two", field="topics")
    return [topic] if topic is not None else list(dict.fromkeys(topics or ()))


def error_message(request_id: RequestId, error: TopicsError) -> bytes:
    """Return the answer to a failed command; `code` and `detail` as over HTTP (api §0.6)."""
    answer = {"op": "error", "request_id": request_id, "code": error.code, "message": error.message}
    return encode_json(answer if error.detail is None else answer | {"detail": error.detail})
