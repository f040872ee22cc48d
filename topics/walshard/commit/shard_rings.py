"""The shard's ends of the rings: requests in, answers out, each request answered once over any crash.

The shard moves `consumed` over a request only once the answer is in the reply ring. So after a crash its next life
finds exactly the requests that are not answered yet, and the journal says which of them were committed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from topics.core.errors import storage_unavailable
from topics.shm import messages
from topics.shm.instance import SharedMemory
from topics.shm.journal import JournalEntry
from topics.shm.queue_messages import Dealt
from topics.shm.shm_names import SHM_ROOT

REQUESTS_PER_GROUP_MAX: Final = 1024
BYTES_PER_GROUP_MAX: Final = 16 * 1024 * 1024
PUSH_IDS_FROM: Final = 1 << 63
"""Lowest id of a message that pushes jobs. Ids of requests are lower."""


class ShardRings:
    """Owns one shard's ends of the rings of its peers. Every list has the frontends first, then the compactor."""

    def __init__(self, shared: SharedMemory, shard: int) -> None:
        self._rings = [row[shard] for row in shared.rings]
        self._wakes = [*shared.frontend_wakes, shared.compactor_wake]
        self._journal = shared.journals[shard]
        self._long_reply_path = f"{SHM_ROOT}/topics-{shared.identity}-reply-{shard}-"
        self._read = [pair.requests.consumed for pair in self._rings]
        self._first = 0
        """The ring with which the next group begins."""
        self.turn_is_over = False  # the shard sets it to have `requests` yield no more in this turn
        self._waiting: list[deque[tuple[bytearray | None, int]]] = [deque() for _ in self._rings]
        self._unanswered: list[JournalEntry] = []
        self._group: list[JournalEntry] = []
        self.replies: dict[tuple[int, int], bytes] = {}
        """Replies that the former incarnation committed and did not send, by frontend and ring position."""
        self._notices: list[set[int]] = [set() for _ in self._rings]
        self._touched: set[int] = set()
        self._pushes = PUSH_IDS_FROM

    # -- requests

    def drain_dead(self, frontend: int) -> bool:
        """Drop the answers of a dead frontend, which nobody takes. Return whether all of its requests were taken."""
        pair, waiting = self._rings[frontend], self._waiting[frontend]
        if waiting:
            for reply, _ in waiting:
                _remove_long_reply(reply)
            pair.requests.consume(max(pair.requests.consumed, *(position for _, position in waiting)))
            waiting.clear()
        return not any(pair.requests.peek(self._read[frontend]))

    def requests(self) -> Iterator[tuple[int, memoryview, int]]:
        """Yield (frontend, message, position behind it) of new requests, up to a group, or to the end of the turn.

        The shard reads no requests from a frontend that does not take its answers, so that its ring fills and it slows
        down. After a full group the next one begins with the next ring: a ring that is never empty starves no other.
        """
        self.turn_is_over = False
        count = size_bytes = 0
        for turn in range(self._first, self._first + len(self._rings)):
            frontend = turn % len(self._rings)
            pair = self._rings[frontend]
            if self._waiting[frontend]:
                continue
            for message, position in pair.requests.peek(self._read[frontend]):
                size_bytes += len(message)
                yield frontend, message, position
                self._read[frontend] = position
                if self._waiting[frontend]:
                    break
                count += 1
                if count >= REQUESTS_PER_GROUP_MAX or size_bytes >= BYTES_PER_GROUP_MAX or self.turn_is_over:
                    self._first = (frontend + 1) % len(self._rings)
                    return

    @property
    def idle(self) -> bool:
        """Return whether there are no new requests, apart from those in rings whose answers are stuck."""
        return all(
            waiting or pair.requests.written == read
            for pair, read, waiting in zip(self._rings, self._read, self._waiting, strict=True)
        )

    @property
    def compactor_asks(self) -> bool:
        """Return whether the compactor has a new request."""
        return self._rings[-1].requests.written != self._read[-1]

    @property
    def stuck(self) -> bool:
        """Return whether an answer or notice waits for room in a reply ring."""
        return any(self._waiting) or any(self._notices)

    @property
    def pending_bytes(self) -> int:
        """Bytes of requests that wait in the rings."""
        return sum(pair.requests.pending_bytes for pair in self._rings)

    @property
    def fullness(self) -> float:
        """Share of the fullest ring that requests take, 0 to 1."""
        return max([pair.requests.pending_bytes / pair.requests.capacity_bytes for pair in self._rings])

    # -- the journal

    def journal(self, entries: list[JournalEntry]) -> None:
        """Store the entries of a group before its commit, beside committed ones whose answers are not sent yet."""
        self._unanswered = self._in_rings(self._unanswered) + entries
        self._group = entries
        self._journal.store(self._unanswered)

    def withdraw(self, ram_only: bool) -> None:
        """Remove the group that was journalled last, or only its RAM part, which will never be committed."""
        refused = [entry for entry in self._group if entry.ram_log or not ram_only]
        if refused:
            self._group = [entry for entry in self._group if entry not in refused]
            self._unanswered = [entry for entry in self._unanswered if entry not in refused]
            self._journal.store(self._unanswered)

    def committed_before(self) -> list[JournalEntry]:
        """Return the journalled requests of the former life that are still in the rings. It may have committed them."""
        return self._in_rings(self._journal.load())

    def _in_rings(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        return [entry for entry in entries if entry.ring_position > self._rings[entry.frontend].requests.consumed]

    def take_over(self, entries: list[JournalEntry]) -> None:
        """Take over entries of `committed_before` that the log has. They stay journalled until they are answered."""
        self._unanswered = list(entries)
        self.replies = {(entry.frontend, entry.ring_position): entry.reply for entry in entries}

    # -- answers

    def answer(self, frontend: int, reply: bytearray | None, position: int) -> None:
        """Queue an answer (None: none is wanted), in ring order. Once sent, it frees the ring up to `position`."""
        if reply is not None and len(reply) > self._rings[frontend].replies.message_max_bytes:
            reply = self._by_reference(reply)
        self._waiting[frontend].append((reply, position))
        self._touched.add(frontend)

    def _by_reference(self, reply: bytearray) -> bytearray:
        """Write an answer that is too long for a ring to a file; return a reference. The frontend removes the file."""
        kind, request_id, _count = messages.head(memoryview(reply))
        path = f"{self._long_reply_path}{request_id}"
        try:
            with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(reply)
        except OSError as error:
            reason = f"/dev/shm has no room for an answer of {len(reply)} bytes: {error.strerror}"
            return messages.encode_error(request_id, storage_unavailable(reason))
        return bytearray().join(messages.encode_reference(kind, request_id, path))

    def push(self, frontend: int, dealt: Dealt) -> None:
        """Queue jobs for a stream, behind earlier answers to its frontend."""
        self._pushes += 1
        self.answer(frontend, messages.encode_dealt(self._pushes, dealt), 0)

    def notify(self, tokens: Mapping[int, int]) -> None:
        """Queue a notice for each frontend: `tokens` are frontend → token of the topic. Equal notices become one."""
        for frontend, token in tokens.items():
            self._notices[frontend].add(token)
            self._touched.add(frontend)

    def announce_generation(self) -> None:
        """Tell every frontend that a new arena is current."""
        for frontend in range(len(self._rings)):
            self.answer(frontend, messages.encode_generation(), 0)

    def forget_notices(self, frontend: int) -> None:
        """Drop the notices of a dead frontend."""
        self._notices[frontend].clear()

    def flush(self) -> None:
        """Move as much as fits into the reply rings and wake the frontends; the rest waits for the next call."""
        if not self._touched:
            return
        still = set()
        for frontend in self._touched:
            if self._flush(frontend):
                still.add(frontend)
            self._wakes[frontend].signal_unless_looking()
        self._touched = still

    def _flush(self, frontend: int) -> bool:
        """Flush one frontend. True when something is left."""
        pair = self._rings[frontend]
        waiting = self._waiting[frontend]
        while waiting:
            reply, position = waiting[0]
            if reply is not None and not pair.replies.push(reply):
                break
            if position:  # at once: what is still in its ring is carried out again by the next life
                pair.requests.consume(position)
            waiting.popleft()
        notices = self._notices[frontend]
        if notices and not waiting:
            tokens = list(notices)[: pair.replies.message_max_bytes // 16]
            if pair.replies.push(messages.encode_notify(tokens)):
                notices.difference_update(tokens)
        return bool(waiting or notices)


def _remove_long_reply(reply: bytearray | None) -> None:
    """Remove the file to which a reply refers, if it does."""
    if reply is not None and messages.head(memoryview(reply))[0] & messages.BY_REFERENCE:
        Path(messages.decode_reference(memoryview(reply))).unlink(missing_ok=True)
