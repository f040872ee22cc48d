"""One atomic write of a group commit, and the groups that handlers draft."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from topics.storage.frame import Bytes
from topics.walshard.hosted import Hosted


class Answer:
    """What one request gets, in its place in the ring; `reply` is None when it wants no answer."""

    __slots__ = ("frontend", "position", "reply", "request_id")

    def __init__(self, frontend: int, position: int, request_id: int) -> None:
        self.frontend = frontend
        self.position = position
        self.request_id = request_id
        self.reply: bytearray | None = None


class Operation:
    """`buffers` are whole frames, one each but for `more_frames` that share a buffer with others. `apply(file_no,
    offset)` runs once they are in the log, and must not fail. `answer` is the request it carries out, if any; `sync`:
    it is not committed before it is on the disk; `undo` runs instead of `apply` when it never will be in the log.
    """

    __slots__ = ("answer", "apply", "buffers", "frames", "length", "sync", "undo")

    def __init__(
        self,
        buffers: list[Bytes],
        apply: Callable[[int, int], None],
        *,
        more_frames: int = 0,
        sync: bool = False,
        answer: Answer | None = None,
        undo: Callable[[], None] | None = None,
    ) -> None:
        self.buffers = buffers
        self.frames = len(buffers) + more_frames
        self.length = sum(map(len, buffers))
        self.apply = apply
        self.sync = sync
        self.answer = answer
        self.undo = undo


class Draft:
    """A group that a handler wants committed: operations for the durable log and the RAM log, and the topics to show
    once they are there. `committed` says afterwards whether all of it is.
    """

    __slots__ = ("committed", "durable", "ram", "touched")

    def __init__(self, durable: list[Operation], ram: Iterable[Operation] = (), touched: Iterable[Hosted] = ()) -> None:
        self.durable = durable
        self.ram = list(ram)
        self.touched = {hosted.topic.id: hosted for hosted in touched}
        self.committed = False


T = TypeVar("T")
Steps = Generator[Draft, None, T]
"""A handler that needs several commits yields each draft and goes on once it is committed, or was refused."""
