"""Who in this frontend wants to know when a topic changes: many listeners, one watch at the shard."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from topics.frontend.shards.arenas import Arenas
from topics.log import get_logger
from topics.shm.arena import TopicView
from topics.shm.messages import Call
from topics.shm.topic_messages import Unwatch, Watch

LINGER_S: Final = 10.0
"""A watch outlives its last listener: clients that poll come back."""

_log = get_logger()


class WatchHandle:
    """One listener; `cancel` it when done (more than once does no harm)."""

    __slots__ = ("_watched", "_watches", "callback")

    def __init__(self, watches: Watches, watched: _Watched, callback: Callable[[], None]) -> None:
        self._watches = watches
        self._watched = watched
        self.callback = callback

    def found(self, seen: TopicView) -> None:
        """To be told when it is no longer like this: a topic that was made anew after the end of the former one had
        been told is announced to nobody, so who finds it says so.
        """
        self._watches.look(self._watched, seen)

    def cancel(self) -> None:
        """No callback begins after this."""
        self._watches.remove(self._watched, self)


class _Watched:
    """One topic at one shard."""

    __slots__ = ("listeners", "name", "shard", "token", "topic_id")

    def __init__(self, token: int, shard: int, name: str) -> None:
        self.token = token
        self.shard = shard
        self.name = name
        self.topic_id = 0
        """The topic the shard was last asked to watch for us: a name that is made again is another one. 0: none."""
        self.listeners: dict[WatchHandle, None] = {}

    def fire(self) -> None:
        for listener in list(self.listeners):
            if listener in self.listeners:
                try:
                    listener.callback()
                except Exception:  # noqa: BLE001 — one listener's fault is not the others'
                    _log.error("a topic listener failed", exc_info=True)


class Watches:
    """`post` sends a message to a shard, in order, and does not mind a full ring; `crowded`: too many wait there."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        arenas: Arenas,
        post: Callable[[int, Call], object],
        crowded: Callable[[int], bool],
    ) -> None:
        self._loop = loop
        self._arenas = arenas
        self._post = post
        self._crowded = crowded
        self._by_name: dict[tuple[int, str], _Watched] = {}
        self._by_token: dict[int, _Watched] = {}
        self._idle_since_s: dict[_Watched, float] = {}
        """Those without a listener, longest first."""
        self._last_token = 0

    def add(self, shard: int, name: str, seen: TopicView | None, callback: Callable[[], None]) -> WatchHandle:
        """See `Gateway.watch`."""
        current = self._current(shard, name)
        watched = self._by_name.get((shard, name))
        if watched is None:
            self._last_token += 1
            watched = self._by_name[shard, name] = _Watched(self._last_token, shard, name)
            self._by_token[watched.token] = watched
        if current is not None:
            self.look(watched, current)
        handle = WatchHandle(self, watched, callback)
        watched.listeners[handle] = None
        self._idle_since_s.pop(watched, None)
        if current != seen:
            # It changed before we listened; the shard tells only of what comes after `current`.
            self._loop.call_soon(self._fire_one, handle)
        return handle

    def notify(self, tokens: list[int]) -> None:
        """The shard says that these topics changed."""
        for token in tokens:
            watched = self._by_token.get(token)
            if watched is not None:
                current = self._current(watched.shard, watched.name)
                if current is not None:
                    self.look(watched, current)
                watched.fire()

    def look(self, watched: _Watched, seen: TopicView) -> None:
        """The shard is to say when the topic is no longer like this, unless it watches it for us already."""
        if seen.topic_id != watched.topic_id:
            watched.topic_id = seen.topic_id
            self._post(watched.shard, Watch(watched.token, watched.name, seen.topic_id, seen.head_seq))

    def renew(self, shard: int) -> None:
        """The shard was started again: it knows of no watch, and anything may have changed."""
        for watched in list(self._by_name.values()):
            if watched.shard == shard:
                watched.topic_id = 0
                current = self._current(shard, watched.name)
                if current is not None:
                    self.look(watched, current)
                watched.fire()

    def remove(self, watched: _Watched, handle: WatchHandle) -> None:
        """Ends one listener; nothing happens when it has ended before."""
        if handle in watched.listeners:
            del watched.listeners[handle]
            if not watched.listeners:
                self._idle_since_s[watched] = self._loop.time()

    def sweep(self, now_s: float) -> None:
        """Ends watches that had no listener for LINGER_S."""
        overdue = list(itertools.takewhile(lambda idle: now_s - idle[1] >= LINGER_S, self._idle_since_s.items()))
        for watched, _since_s in overdue:
            del self._idle_since_s[watched]
            if self._crowded(watched.shard):
                # Not told now, nor forgotten: a topic that is polled now and then would be watched anew each time.
                self._idle_since_s[watched] = now_s
                continue
            del self._by_name[watched.shard, watched.name]
            del self._by_token[watched.token]
            self._post(watched.shard, Unwatch(watched.token, watched.name))

    def _fire_one(self, handle: WatchHandle) -> None:
        if handle in handle._watched.listeners:
            handle.callback()

    def _current(self, shard: int, name: str) -> TopicView | None:
        arena = self._arenas.of(shard)
        found = None if arena is None else arena.look_up(name)
        return None if found is None else found[1]
