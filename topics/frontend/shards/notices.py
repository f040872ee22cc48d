"""The listeners in this frontend for what shards send unasked: changes of topics, and jobs dealt to claims and streams.

Many listeners for changes of one topic share one watch at its shard.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from topics.frontend.shards.arenas import Arenas
from topics.log import get_logger
from topics.shm.arena import TopicView
from topics.shm.asks import Message
from topics.shm.queue_messages import Dealt
from topics.shm.topic_messages import Unwatch, Watch

LINGER_S: Final = 10.0
"""The time for which a watch outlives its last listener: clients that poll come back."""
RENEWED_AT_ONCE: Final = 64
"""Watches that are renewed in one turn of the event loop."""
SWEPT_AT_ONCE: Final = 256
"""Watches that one sweep ends at most; the next one goes on."""

log = get_logger()


@dataclass(eq=False, slots=True)
class WatchHandle:
    """One listener for changes of a topic, until `cancel`."""

    watches: Watches
    watched: _Watched
    callback: Callable[[], None]

    def found(self, seen: TopicView) -> None:
        """Listen from `seen` on. Call this with every view: no shard announces a new topic of an old name."""
        self.watches.ensure_watch(self.watched, seen)

    def cancel(self) -> None:
        """Stop listening: no callback begins after this. Idempotent."""
        self.watches.remove(self.watched, self)


@dataclass(eq=False, slots=True)
class _Watched:
    """One name at one shard, and its listeners."""

    token: int
    shard: int
    name: str
    topic_id: int = 0
    """Id of the topic that the shard was last asked to watch; a topic created again has another one. 0: none."""
    listeners: dict[WatchHandle, None] = field(default_factory=dict)

    def fire(self) -> None:
        for listener in list(self.listeners):
            if listener in self.listeners:
                try:
                    listener.callback()
                except Exception:  # the other listeners are called in any case
                    log.error("a topic listener failed", exc_info=True)


@dataclass(eq=False)
class Watches:
    """The watches of one frontend. Each watched name has one watch at its shard, however many listeners it has. `post`
    sends a message to a shard, in order, also while its ring is full. `posts_full` tells whether too many wait.
    """

    loop: asyncio.AbstractEventLoop
    arenas: Arenas
    post: Callable[[int, Message], object]
    posts_full: Callable[[int], bool]
    _by_name: dict[tuple[int, str], _Watched] = field(default_factory=dict)
    _by_token: dict[int, _Watched] = field(default_factory=dict)
    _idle_since_s: dict[_Watched, float] = field(default_factory=dict)
    """Names without a listener, the longest idle first."""
    _last_token: int = 0

    def add(self, shard: int, name: str, seen: TopicView | None, callback: Callable[[], None]) -> WatchHandle:
        """Call `callback` (soon, never within this call) when the topic may differ from `seen`, or from its state at
        the last callback: records, floors, `durable_seq`, configuration, deletion. Some callbacks have no such reason.
        A topic that is created under the name of a deleted one has to be reported (`WatchHandle.found`).
        """
        watched = self._by_name.get((shard, name))
        if watched is None:
            self._last_token += 1
            watched = self._by_name[shard, name] = _Watched(self._last_token, shard, name)
            self._by_token[watched.token] = watched
        current = self._watch_current(watched)
        handle = WatchHandle(self, watched, callback)
        watched.listeners[handle] = None
        self._idle_since_s.pop(watched, None)
        if current != seen:
            # It changed before the watch began, and the shard reports only changes after `current`.
            self.loop.call_soon(self._fire_one, handle)
        return handle

    def notify(self, tokens: list[int]) -> None:
        """Call the listeners of the topics that a shard says have changed."""
        for token in tokens:
            watched = self._by_token.get(token)
            if watched is not None:
                self._watch_current(watched)
                watched.fire()

    def ensure_watch(self, watched: _Watched, seen: TopicView) -> None:
        """Ask the shard to report changes of the topic from `seen` on, unless it was asked before."""
        if seen.topic_id != watched.topic_id:
            watched.topic_id = seen.topic_id
            self.post(watched.shard, Watch(watched.token, watched.name, seen.topic_id, seen.head_seq))

    def renew(self, shard: int) -> None:
        """Watch again at a shard that was restarted, some now and the others in the next turns of the event loop. It
        has forgotten all watches, and any topic may have changed.
        """
        self._renew_some([watched for watched in self._by_name.values() if watched.shard == shard])

    def _renew_some(self, left: list[_Watched]) -> None:
        some, left = left[:RENEWED_AT_ONCE], left[RENEWED_AT_ONCE:]
        for watched in some:
            if watched.token in self._by_token:
                watched.topic_id = 0
                self._watch_current(watched)
                watched.fire()
        if left:
            self.loop.call_soon(self._renew_some, left)

    def remove(self, watched: _Watched, handle: WatchHandle) -> None:
        if handle in watched.listeners:
            del watched.listeners[handle]
            if not watched.listeners:
                self._idle_since_s[watched] = self.loop.time()

    def sweep(self, now_s: float) -> None:
        """End the watches that had no listener for LINGER_S."""
        overdue = itertools.takewhile(lambda idle: now_s - idle[1] >= LINGER_S, self._idle_since_s.items())
        for watched, _since_s in list(itertools.islice(overdue, SWEPT_AT_ONCE)):
            del self._idle_since_s[watched]
            if self.posts_full(watched.shard):
                # Keep the watch for now. If only this process forgot it, each poll of the topic would begin another.
                self._idle_since_s[watched] = now_s
                continue
            del self._by_name[watched.shard, watched.name]
            del self._by_token[watched.token]
            self.post(watched.shard, Unwatch(watched.token, watched.name))

    def _fire_one(self, handle: WatchHandle) -> None:
        if handle in handle.watched.listeners:
            handle.callback()

    def _watch_current(self, watched: _Watched) -> TopicView | None:
        """Return the topic that has the name now, watched from this view on."""
        arena = self.arenas.of(watched.shard)
        found = None if arena is None else arena.look_up(watched.name)
        if found is None:
            return None
        self.ensure_watch(watched, found[1])
        return found[1]


JobListener = Callable[[Dealt], None]


class JobListeners:
    """The listeners of one frontend, by the number of their stream or claim, which no incarnation uses twice."""

    def __init__(self, incarnation: int) -> None:
        self._last_number = incarnation << 32
        self._by_number: dict[int, JobListener] = {}

    def new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def listen(self, number: int, listener: JobListener) -> None:
        """Give `listener` the jobs for this number, until `forget` or another `listen`."""
        self._by_number[number] = listener

    def forget(self, number: int, listener: JobListener) -> None:
        """Forget a listener, unless another one has taken its place. Idempotent."""
        if self._by_number.get(number) == listener:
            del self._by_number[number]

    def hand_over(self, dealt: Dealt) -> None:
        """Give jobs to their listener. Jobs without one stay leased until the shard takes them back."""
        listener = self._by_number.get(dealt.stream)
        if listener is not None:
            listener(dealt)
