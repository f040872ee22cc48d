"""The base of all messages between processes, and the type of answer that a request asks for."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

ReplyT = TypeVar("ReplyT")


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A message in a ring: a msgpack array that begins with the name of its class."""


class Asks(Generic[ReplyT]):
    """Mixin of a request that its shard answers with a `ReplyT`. `Asks[None]` means that nobody waits for an answer."""

    __slots__ = ()
    reply_type: ClassVar[Any] = type(None)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (cls.reply_type,) = get_args(cls.__dict__["__orig_bases__"][-1])

    def checked(self, reply: object) -> ReplyT:
        """Return the reply, which has the type that this request asks for."""
        assert isinstance(reply, self.reply_type), reply
        answer: ReplyT = reply
        return answer


class OfTopic(Message, frozen=True):
    """Base of requests to the shard that owns the topic `name`, which need not exist."""

    name: str


class Done(Message, frozen=True):
    """The request was carried out."""


class Deleted(Message, frozen=True):
    """False if there was nothing of that name."""

    deleted: bool
