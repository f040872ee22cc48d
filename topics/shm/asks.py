"""How a request names the type of its answer, so that whoever sends it gets that type back."""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

ReplyT = TypeVar("ReplyT")


class Asks(Generic[ReplyT]):
    """A request that its shard answers with a `ReplyT`; `Asks[None]`: nobody waits for an answer."""

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


class Done(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The request was carried out; there is nothing to say about it."""
