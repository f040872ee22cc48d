"""What shards say to each other: a ring for each ordered pair, messages in order, each taken at least once.

A message stays in its ring until it was acted upon; a shard that is killed finds it again. What a sender had not yet
put into a full ring dies with it, so nothing may depend on a message alone: every shard looks at all its sources once a
second, whatever it was told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from topics.shm.instance import SharedMemory


class Changed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These topics of mine, which routers copy into topics of yours, have changed."""

    names: list[str]


class Ended(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """My topic `name`, from which you may copy, was deleted; its last record was `head_seq`."""

    name: str
    source_topic_id: int
    head_seq: int


class RoutersGone(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To shard 0: a topic of these routers is no more, so they are not, either."""

    router_ids: list[int]


PeerMessage = Changed | Ended | RoutersGone

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_NAMES_PER_MESSAGE = 8
"""Of 255 bytes at most, so that any such message fits the smallest ring."""


class Links:
    """One shard's ends. What it says to itself arrives as well, with the next `receive`."""

    def __init__(self, shared: SharedMemory, shard: int) -> None:
        self.shard = shard
        self._out = shared.links[shard]
        self._in = [row[shard] for row in shared.links]
        self._wakes = shared.shard_wakes
        self._waiting: list[deque[PeerMessage]] = [deque() for _ in self._out]
        self._changed: list[dict[str, None]] = [{} for _ in self._out]
        self._own: deque[PeerMessage] = deque()

    @property
    def shards(self) -> int:
        return len(self._out)

    @property
    def idle(self) -> bool:
        """Nothing to take; what is `stuck` waits for the others."""
        return not (self._own or self._changed[self.shard]) and all(ring is None or ring.empty for ring in self._in)

    @property
    def stuck(self) -> bool:
        return any(self._waiting) or any(
            names for peer, names in enumerate(self._changed) if peer != self.shard and names
        )

    def send(self, shard: int, message: PeerMessage) -> None:
        """Goes out with the next `flush`."""
        (self._own if shard == self.shard else self._waiting[shard]).append(message)

    def changed(self, shard: int, name: str) -> None:
        """As `send` of a Changed; many of one topic become one."""
        self._changed[shard][name] = None

    def flush(self) -> None:
        """Puts into the rings what fits and wakes the peers."""
        for shard, ring in enumerate(self._out):
            waiting, changed = self._waiting[shard], self._changed[shard]
            if ring is None:
                continue
            sent = False
            while waiting and ring.push(_encode(waiting[0])):
                waiting.popleft()
                sent = True
            while changed and not waiting:
                names = list(changed)[:_NAMES_PER_MESSAGE]
                if not ring.push(_encode(Changed(names))):
                    break
                for name in names:
                    del changed[name]
                sent = True
            if sent:
                self._wakes[shard].signal()

    def receive(self, take: Callable[[int, PeerMessage], None]) -> bool:
        """Hands over (sender, message) of all that has come; True if there was any."""
        some = False
        changed, self._changed[self.shard] = self._changed[self.shard], {}
        if changed:
            some = True
            take(self.shard, Changed(list(changed)))
        for _ in range(len(self._own)):
            some = True
            take(self.shard, self._own.popleft())
        for sender, ring in enumerate(self._in):
            if ring is None or ring.empty:
                continue
            some = True
            for message, position in ring.peek():
                take(sender, _decoder.decode(message))
                ring.consume(position)
        return some
