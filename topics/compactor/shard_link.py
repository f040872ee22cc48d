"""The compactor's end of its ring to one shard: one request at a time, each answered, whoever is restarted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, TypeVar

from topics.core.errors import TopicsError
from topics.shm import messages
from topics.shm.control import Role, log_bytes
from topics.shm.instance import SharedMemory
from topics.shm.messages import Call, Kind
from topics.shm.names import SHM_ROOT
from topics.storage.frame import Bytes
from topics.storage.logfile import WalPosition

_OFFSET_BITS: Final = 32
ReplyT = TypeVar("ReplyT")


class ShardLink:
    """`wait` is called again and again until an answer is there: it sleeps a little, and raises to give up."""

    def __init__(self, shared: SharedMemory, shard: int, incarnation: int, wait: Callable[[], None]) -> None:
        self.shard = shard
        self._cell = shared.control.cell(Role.WALSHARD, shard)
        pair = shared.rings[shared.compactor_row][shard]
        self._requests = pair.requests
        self._replies = pair.replies
        self._wake = shared.shard_wakes[shard]
        self._wait = wait
        # Of this life alone: a former one's request may still be in the ring.
        self._spill_path = f"{SHM_ROOT}/topics-{shared.identity}-compactor-{shard}-{incarnation}"
        self._last_id = incarnation << 40

    @property
    def committed(self) -> WalPosition | None:
        """Behind the last frame that is in the log for good; None while the shard recovers."""
        word = self._cell.get("committed")
        return WalPosition(word >> _OFFSET_BITS, word & 0xFFFF_FFFF) if word else None

    @property
    def written_bytes(self) -> int:
        """Bytes of its log that were in no snapshot when the service was started, or have been written since."""
        return log_bytes(self._cell)

    @property
    def generation(self) -> int:
        """Of its arena; 0 until the shard has recovered for the first time."""
        return self._cell.get("generation")

    def call(self, request: Call, reply_type: type[ReplyT]) -> ReplyT:
        """The answer, as soon as the shard gives it. Raises TopicsError for its refusal, OSError without room in shared
        memory for a long request, and what `wait` raises.
        """
        self._last_id = request_id = self._last_id + 1
        parts = messages.encode_call(request_id, request)
        spilled = sum(map(len, parts)) > self._requests.message_max_bytes
        if spilled:
            self._spill(parts)
            parts = messages.encode_reference(Kind.CALL, request_id, self._spill_path)
        while not self._requests.push(*parts):
            self.take_notices()
            self._wait()
        self._wake.signal()
        while True:
            reply = self._take(request_id)
            if reply is not None:
                break
            self._wait()
        if spilled:
            os.unlink(self._spill_path)
        if isinstance(reply, TopicsError):
            raise reply
        assert isinstance(reply, reply_type), reply
        return reply

    def _spill(self, parts: Iterable[Bytes]) -> None:
        try:
            with open(self._spill_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.writelines(parts)
        except OSError:
            with suppress(OSError):
                os.unlink(self._spill_path)  # half of it is of no use, and others need the room
            raise

    def take_notices(self) -> None:
        """Whatever the shard says unasked means nothing here, but must not fill the ring."""
        self._take(0)

    def _take(self, request_id: int) -> object | None:
        found: object | None = None
        position = self._replies.consumed
        for message, position in self._replies.peek():  # noqa: B007
            kind, answered_id, _ = messages.head(message)
            # Others are notices, answers to a former life, or second answers of a restarted shard.
            if not answered_id or answered_id != request_id or found is not None:
                continue
            if kind == Kind.ERROR:
                found = messages.decode_error(message)
            else:
                assert kind == Kind.CALL, kind
                found = messages.decode_reply(message)
        self._replies.consume(position)
        return found
