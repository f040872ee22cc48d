"""The order of delivery: weighted fair between bands of priority, first in first out in a band, no starvation. Pure.

Answers show the effective priority of a topic as `effective_priority` (api §1):

    effective priority = manual (−1000 … 1000), or by recency (500 halved every 30 s, 0 after 5 min)
                       + age (100 for each second it waits to be delivered, at most 1000 after 10 s)

    band       0        1        2        3       4
    priority   ≥ 750    ≥ 500    ≥ 250    ≥ 0     < 0
    weight     8        4        2        1       1

    ready   band 0  ▸ entry ▸ entry ▸ …          deficit round robin: a round gives each band weight × QUANTUM, and the
            band 1  ▸ …                          first band with budget left is served, so urgent entries never wait
            …                                    for the rest of a round
    aging   slot t, t+1, t+2, … (50 ms each)     the moment at which each entry may have reached a higher band

Every operation is O(1) however many entries are ready. No scan ages entries: each is filed under the moment at which
waiting will have lifted it into the next band, and one call lifts at most PROMOTIONS_MAX of them.

The caller chooses the unit of cost, and tells a turn's cost after its work. So a band may overdraw its budget, and pays
in later rounds. A band without work saves at most the budget of one round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from topics.core.config import TopicConfig

RECENT_PRIORITY: Final = 500
RECENT_HALF_LIFE_MS: Final = 30_000
RECENT_MS_MAX: Final = 300_000
AGE_MAX: Final = 1000
AGE_FULL_MS: Final = 10_000
"""Wait after which anything is in the first band whatever its priority: even −1000 is not starved."""
AGE_MS_PER_POINT: Final = AGE_FULL_MS // AGE_MAX

FLOORS: Final = (750, 500, 250, 0)
"""Least priority of each band but the last."""
WEIGHTS: Final = (8, 4, 2, 1, 1)
BANDS: Final = len(WEIGHTS)
TOP: Final = 0
LAST: Final = BANDS - 1
_ASCENDING: Final = sorted(FLOORS)


def base_priority(config: TopicConfig, last_read_ms: int, now_ms: int) -> int:
    """Return the priority without age: manual, or by the time of the last read (wall clock, 0 = never)."""
    if config.priority is not None:
        return config.priority
    idle_ms = max(0, now_ms - last_read_ms)
    if not config.auto_priority or not last_read_ms or idle_ms >= RECENT_MS_MAX:
        return 0
    return round(RECENT_PRIORITY * 2 ** (-idle_ms / RECENT_HALF_LIFE_MS))


def age(waited_ms: int) -> int:
    """Return what a wait adds to a priority."""
    return min(AGE_MAX, max(0, waited_ms) // AGE_MS_PER_POINT)


def below_zero_ms(base: int) -> int:
    """Return the wait after which age has raised this base priority to zero."""
    return max(0, -base) * AGE_MS_PER_POINT


def band_of(priority: int, waited_ms: int = 0) -> int:
    """Return the band of an effective priority, after a wait (0 for one that does not wait)."""
    if waited_ms >= AGE_FULL_MS:
        return TOP
    return LAST - bisect_right(_ASCENDING, priority)


QUANTUM: Final = 64
TURN_COST: Final = 1024
"""Cost of a turn: an entry with more to do goes to the end of its band after each turn."""
TICK_MS: Final = 50
PROMOTIONS_MAX: Final = 64
_SLOTS: Final = AGE_FULL_MS // TICK_MS + 2
_ROUND: Final = tuple(weight * QUANTUM for weight in WEIGHTS)

Item = TypeVar("Item", bound=Hashable)


class _Entry(Generic[Item]):
    """An item that waits, or is being served."""

    __slots__ = ("band", "base", "item", "since_ms", "slot", "spent")

    def __init__(self, item: Item, since_ms: int) -> None:
        self.item = item
        self.since_ms = since_ms
        self.base = 0
        self.band = LAST
        self.slot = -1
        """Slot in the wheel; −1 while it is in none."""
        self.spent = 0
        """Cost in this turn."""


_Queue = OrderedDict[_Entry[Item], None]
"""First in, first out, with removal from the middle; in a plain dict the front is O(n) to find after many removals."""


class Scheduler(Generic[Item]):
    """Ready items, in bands. `base_of(item)` is a priority without age, asked again as it waits. Time is monotonic."""

    def __init__(self, base_of: Callable[[Item], int]) -> None:
        self._base_of = base_of
        self._entries: dict[Item, _Entry[Item]] = {}
        self._bands: list[_Queue[Item]] = [OrderedDict() for _ in range(BANDS)]
        self._deficits = list(_ROUND)
        self._wheel: list[_Queue[Item]] = [OrderedDict() for _ in range(_SLOTS)]
        self._tick = 0
        """Number of the slot that is due next: time 0 is in slot 0."""
        self._serving: _Entry[Item] | None = None
        self.paused = False
        """True while the last band is not served: its entries wait until age lifts them out."""
        self.waits = 0
        """Number of entries that were served for the first time. Those below base priority 0 do not count: they may
        wait without anything being wrong.
        """
        self.waited_ms = 0
        """Sum of their waits."""

    # -- ready items

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    @property
    def eligible(self) -> bool:
        """True if `take` would return an item."""
        return any(self._bands[: LAST if self.paused else BANDS])

    def depths(self) -> list[int]:
        """Return the number of items in each band."""
        return [len(band) for band in self._bands]

    def waiting_ms(self, item: Item, now_ms: int) -> int:
        """Return how long an item has waited, 0 if it does not wait."""
        entry = self._entries.get(item)
        return 0 if entry is None else max(0, now_ms - entry.since_ms)

    def band(self, item: Item) -> int:
        """Return the band of an item; KeyError if it does not wait."""
        return self._entries[item].band

    def mark(self, item: Item, now_ms: int, since_ms: int | None = None) -> None:
        """Mark an item ready (since `since_ms`, or now). One that is ready already keeps its place and age."""
        if item in self._entries:
            return
        if not self._entries:
            # After an idle time no band owes anything, and the wheel is empty.
            self._deficits = list(_ROUND)
            self._tick = now_ms // TICK_MS + 1
        entry = self._entries[item] = _Entry(item, now_ms if since_ms is None else since_ms)
        entry.base = self._base_of(item)
        self._file(entry, now_ms)

    def discard(self, item: Item) -> None:
        """Remove an item: there is no work for it any more."""
        entry = self._entries.pop(item, None)
        if entry is not None and entry is not self._serving:
            del self._bands[entry.band][entry]
            self._unwheel(entry)

    # -- serving

    def take(self, now_ms: int) -> Item | None:
        """Return the item to serve now, None if there is none. Call `served` before the next `take`."""
        assert self._serving is None
        if not self._entries:
            return None
        self.age(now_ms)
        entry = self._first()
        if entry is None:
            return None
        del self._bands[entry.band][entry]
        self._unwheel(entry)
        self._serving = entry
        if not entry.spent and entry.base >= 0:
            self.waits += 1
            self.waited_ms += now_ms - entry.since_ms
        return entry.item

    def served(self, cost: int, now_ms: int, *, more: bool, fresh: bool = False) -> None:
        """End the turn of the item that `take` returned. With `more` work it stays ready; `fresh` work has age 0."""
        entry, self._serving = self._serving, None
        assert entry is not None
        self._deficits[entry.band] -= cost
        if self._entries.get(entry.item) is not entry:  # discarded meanwhile
            return
        if not more:
            del self._entries[entry.item]
            return
        entry.spent += max(1, cost)
        if fresh:
            entry.since_ms = now_ms
            entry.base = self._base_of(entry.item)
        front = not fresh and entry.spent < TURN_COST
        if not front:
            entry.spent = 0 if fresh else 1
        self._file(entry, now_ms)
        if front:
            self._bands[entry.band].move_to_end(entry, last=False)

    def age(self, now_ms: int) -> None:
        """Lift entries that are due into their band: PROMOTIONS_MAX at most, the rest at the next call."""
        due_tick = now_ms // TICK_MS
        left = PROMOTIONS_MAX
        while self._tick <= due_tick:
            slot = self._wheel[self._tick % _SLOTS]
            while slot and left:
                entry, _ = slot.popitem(last=False)
                entry.slot = -1
                self._promote(entry, now_ms)
                left -= 1
            if slot:
                return
            self._tick += 1
            # After a long pause one turn of the wheel covers everything.
            self._tick = max(self._tick, due_tick - _SLOTS)

    # -- inside

    def _first(self) -> _Entry[Item] | None:
        last = LAST if self.paused else BANDS
        while True:
            missing: int | None = None
            for band in range(last):
                if self._bands[band]:
                    deficit = self._deficits[band]
                    if deficit > 0:
                        return next(iter(self._bands[band]))
                    rounds = -deficit // _ROUND[band] + 1
                    missing = rounds if missing is None else min(missing, rounds)
            if missing is None:
                return None
            for band, most in enumerate(_ROUND):
                self._deficits[band] = min(self._deficits[band] + missing * most, most)

    def _file(self, entry: _Entry[Item], now_ms: int) -> None:
        """Put an entry at the end of its band, and into the wheel for the next band."""
        entry.band = self._band_now(entry, now_ms)
        self._bands[entry.band][entry] = None
        self._put_on_wheel(entry, self._tick)

    def _promote(self, entry: _Entry[Item], now_ms: int) -> None:
        """Move an entry up if it has reached a higher band. It has not if its recency fell as much as its age rose."""
        entry.base = self._base_of(entry.item)
        band = self._band_now(entry, now_ms)
        if band < entry.band:
            del self._bands[entry.band][entry]
            entry.band = band
            self._bands[band][entry] = None
        self._put_on_wheel(entry, self._tick + 1)

    def _band_now(self, entry: _Entry[Item], now_ms: int) -> int:
        waited_ms = now_ms - entry.since_ms
        return band_of(entry.base + age(waited_ms), waited_ms)

    def _put_on_wheel(self, entry: _Entry[Item], earliest_tick: int) -> None:
        """File an entry under the moment at which its age lifts it to the next band's floor; at AGE_FULL_MS at last."""
        if entry.band == TOP:
            return
        missing = FLOORS[entry.band - 1] - entry.base
        due_ms = entry.since_ms + min(missing * AGE_MS_PER_POINT, AGE_FULL_MS)
        # The slot is less than a whole turn ahead, even if `age` comes late. An entry that is early is filed again.
        tick = min(max(-(-due_ms // TICK_MS), earliest_tick), self._tick + _SLOTS - 1)
        entry.slot = tick % _SLOTS
        self._wheel[entry.slot][entry] = None

    def _unwheel(self, entry: _Entry[Item]) -> None:
        if entry.slot >= 0:
            del self._wheel[entry.slot][entry]
            entry.slot = -1
