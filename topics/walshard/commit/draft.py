"""What handlers hand to the commit: operations, each an atomic write of a log, gathered into a draft.

handler ──▶ Draft ──▶ Commits.commit ──▶ the same draft, with what it changed ──▶ Publisher.show
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from topics.shm.append_messages import AppendReply
from topics.shm.messages import Reply
from topics.storage.frame import Bytes
from topics.walshard.hosted.hosted import Hosted


class RingRequest:
    """A request in its place in the ring of its frontend, and the encoded reply; None when it wants none."""

    __slots__ = ("frontend", "id", "position", "reply")

    def __init__(self, frontend: int, position: int, id: int) -> None:
        self.frontend = frontend
        self.position = position
        self.id = id
        self.reply: bytearray | None = None


class LogWrite:
    """One atomic write: all of its frames are in the log, or none.

    `buffers` are whole frames, one each but for `more_frames` that share a buffer with others. `apply(file_no, offset)`
    runs once they are in the log and must not fail; `undo` runs instead when they will never be there. With `sync` the
    operation counts only once it is on the disk. `request` is the one that it carries out, if any.
    """

    __slots__ = ("apply", "buffers", "frames", "length", "request", "sync", "undo")

    def __init__(
        self,
        buffers: list[Bytes],
        apply: Callable[[int, int], None] | None = None,
        *,
        more_frames: int = 0,
        sync: bool = False,
        undo: Callable[[], None] | None = None,
    ) -> None:
        self.buffers = buffers
        self.frames = len(buffers) + more_frames
        self.length = sum(map(len, buffers))
        self.apply = apply
        self.sync = sync
        self.undo = undo
        self.request: RingRequest | None = None


class Draft:
    """A group of operations for the durable log and the RAM log, and the topics that it changes.

    Handlers fill it. The commit sets `committed`, and adds the topics that became durable with it. Whoever has to be
    told learns from `touched`, `created` and `deleted` once the commit is done. `floors_of` are ids of topics whose
    floors the operations say themselves.
    """

    __slots__ = ("carrier", "committed", "created", "deleted", "durable", "floors_of", "ram", "reply", "touched")

    def __init__(
        self,
        durable: Iterable[LogWrite] = (),
        ram: Iterable[LogWrite] = (),
        touched: Iterable[Hosted] = (),
        *,
        floors_of: Iterable[int] = (),
        reply: Reply | None = None,
    ) -> None:
        self.durable = list(durable)
        self.ram = list(ram)
        self.touched = {hosted.topic.id: hosted for hosted in touched}
        self.created: list[Hosted] = []
        self.deleted: list[Hosted] = []
        self.floors_of = set(floors_of)
        self.reply = reply
        """What the request gets that the draft carries out, for a draft of one request."""
        self.carrier: LogWrite | None = None
        """The operation that carries out the request which is being handled."""
        self.committed = False

    def __bool__(self) -> bool:
        return bool(self.durable or self.ram)

    def next_request(self) -> None:
        """The next request is going to be handled."""
        self.carrier = None

    def add(self, operation: LogWrite, *, in_ram: bool = False, carries_out: bool = True) -> None:
        """Adds an operation. With `carries_out` the request that is being handled fails if it cannot be committed."""
        (self.ram if in_ram else self.durable).append(operation)
        if carries_out:
            self.carrier = operation

    def touch(self, hosted: Hosted) -> None:
        """Notes that the draft changes what readers see of a topic."""
        self.touched[hosted.topic.id] = hosted


T = TypeVar("T")
Steps = Generator[Draft, None, T]
"""A handler that needs several commits yields each draft, and goes on once it is committed or was refused."""


GroupHandler = Callable[[Any, int, Draft], Reply | AppendReply | None]
"""Prepares a request of a frontend in a group: (call, frontend, group) → reply. It raises TopicsError, the group being
as before, or CommitFirst.
"""
AloneHandler = Callable[[Any, int], Steps[Any]]
"""Carries out a request by itself, everything prepared being committed: (call, frontend) → steps to the reply. The
draft that carries it out holds the reply too: the journal has it before the log has the draft.
"""


class CommitFirst(Exception):  # noqa: N818 - not an error
    """A request of a group can be prepared only once the group so far is committed, and then these steps are done."""

    def __init__(self, steps: Steps[object]) -> None:
        super().__init__()
        self.steps = steps


def nothing() -> Steps[None]:
    """No steps: all that a request waits for is the commit of its group so far."""
    yield from ()
