"""What is delivered next: weighted fair between bands of priority, first come first served in a band, nobody starves.

    ready   band 0  ▸ entry ▸ entry ▸ …          deficit round robin: a round gives each band weight × QUANTUM; within
            band 1  ▸ …                          it the first band that has something left to spend is served, so what
            …                                    is urgent never waits for the rest of a round
    aging   slot t, t+1, t+2, … (50 ms each)     when each entry is to be looked at, for it may have reached a
                                                 higher band by then

Every operation is O(1) however many entries are ready: an entry is not aged by a scan but filed under the moment at
which waiting will have lifted it into the next band (`priority.py`), and a step moves at most PROMOTIONS_MAX of those.

Cost is in units of the caller's, known only after the work: a band may overdraw and then pays in the rounds to come.
A band without work saves at most one round's worth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from topics.core import priority
from topics.core.priority import AGE_FULL_MS, AGE_MS_PER_POINT, BANDS, FLOORS, LAST, TOP, WEIGHTS

QUANTUM: Final = 64
TURN_COST: Final = 1024
"""Who has more to do than this goes to the end of its band between its turns."""
TICK_MS: Final = 50
PROMOTIONS_MAX: Final = 64
_SLOTS: Final = AGE_FULL_MS // TICK_MS + 2
_ROUND: Final = tuple(weight * QUANTUM for weight in WEIGHTS)

Item = TypeVar("Item", bound=Hashable)


class _Entry(Generic[Item]):
    """Something that waits, or is being served."""

    __slots__ = ("band", "base", "item", "since_ms", "slot", "spent")

    def __init__(self, item: Item, since_ms: int) -> None:
        self.item = item
        self.since_ms = since_ms
        self.base = 0
        self.band = LAST
        self.slot = -1
        """Of the wheel; −1 for one that has nothing to wait for there."""
        self.spent = 0
        """In this turn."""


_Queue = OrderedDict[_Entry[Item], None]
"""First in, first out, and any in between can go; the front of a plain dict is O(n) to find after many removals."""


class Scheduler(Generic[Item]):
    """`base_of(item)` is its priority without age, asked when it becomes ready and as it ages. `now_ms` is monotonic
    everywhere.
    """

    def __init__(self, base_of: Callable[[Item], int]) -> None:
        self._base_of = base_of
        self._entries: dict[Item, _Entry[Item]] = {}
        self._bands: list[_Queue[Item]] = [OrderedDict() for _ in range(BANDS)]
        self._deficits = list(_ROUND)
        self._wheel: list[_Queue[Item]] = [OrderedDict() for _ in range(_SLOTS)]
        self._tick = 0
        """The slot that is due next, counted from the beginning of time."""
        self._serving: _Entry[Item] | None = None
        self.paused = False
        """The last band is not served: who is in it waits until age lifts it out."""
        self.waits = 0
        self.waited_ms = 0
        """Entries served for the first time, and how long they had waited together: those of base priority 0 and
        above, since what is below may wait without anything being wrong.
        """

    # -- what is ready

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    @property
    def eligible(self) -> bool:
        """Whether `take` would find something."""
        return any(self._bands[: LAST if self.paused else BANDS])

    def depths(self) -> list[int]:
        """How many wait in each band."""
        return [len(band) for band in self._bands]

    def waiting_ms(self, item: Item, now_ms: int) -> int:
        """How long this one has waited, 0 when it does not."""
        entry = self._entries.get(item)
        return 0 if entry is None else max(0, now_ms - entry.since_ms)

    def band(self, item: Item) -> int:
        """Where this one waits; KeyError when it does not."""
        return self._entries[item].band

    def mark(self, item: Item, now_ms: int, since_ms: int | None = None) -> None:
        """There is work for `item` (since a while ago, perhaps). One that is ready already keeps its place and age."""
        if item in self._entries:
            return
        if not self._entries:
            # After a time with nothing to do nobody owes anything; and nothing is filed in the wheel.
            self._deficits = list(_ROUND)
            self._tick = now_ms // TICK_MS + 1
        entry = self._entries[item] = _Entry(item, now_ms if since_ms is None else since_ms)
        entry.base = self._base_of(item)
        self._file(entry, now_ms)

    def discard(self, item: Item) -> None:
        """Nothing is to be done for it any more."""
        entry = self._entries.pop(item, None)
        if entry is not None and entry is not self._serving:
            del self._bands[entry.band][entry]
            self._unwheel(entry)

    # -- serving

    def take(self, now_ms: int) -> Item | None:
        """Who is to be served now; `served` must follow before the next `take`."""
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
        """What it cost, and whether there is `more` to do for it; `fresh`: which has come up only now."""
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
        """Lifts those into their band whose time has come: some at a time, the rest at the next call."""
        due_tick = now_ms // TICK_MS
        left = PROMOTIONS_MAX
        while self._tick <= due_tick:
            slot = self._wheel[self._tick % _SLOTS]
            while slot and left:
                entry, _ = slot.popitem(last=False)
                entry.slot = -1
                self._look_again(entry, now_ms)
                left -= 1
            if slot:
                return
            self._tick += 1
            # After a long pause one turn of the wheel is all of it.
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
        """At the end of the band it belongs to now, and in the wheel for the next one."""
        entry.band = self._band_now(entry, now_ms)
        self._bands[entry.band][entry] = None
        self._wheel_in(entry, self._tick)

    def _look_again(self, entry: _Entry[Item], now_ms: int) -> None:
        """It should have reached a higher band by now; recency may have taken away some of what age has brought."""
        entry.base = self._base_of(entry.item)
        band = self._band_now(entry, now_ms)
        if band < entry.band:
            del self._bands[entry.band][entry]
            entry.band = band
            self._bands[band][entry] = None
        self._wheel_in(entry, self._tick + 1)

    def _band_now(self, entry: _Entry[Item], now_ms: int) -> int:
        waited_ms = now_ms - entry.since_ms
        return priority.band_of(entry.base + priority.age(waited_ms), waited_ms)

    def _wheel_in(self, entry: _Entry[Item], earliest_tick: int) -> None:
        """To be looked at when age has brought it to the next band's floor, or it has waited long enough anyhow."""
        if entry.band == TOP:
            return
        missing = FLOORS[entry.band - 1] - entry.base
        due_ms = entry.since_ms + min(missing * AGE_MS_PER_POINT, AGE_FULL_MS)
        # Never a whole turn of the wheel ahead, however late `age` is: too early is looked at once more.
        tick = min(max(-(-due_ms // TICK_MS), earliest_tick), self._tick + _SLOTS - 1)
        entry.slot = tick % _SLOTS
        self._wheel[entry.slot][entry] = None

    def _unwheel(self, entry: _Entry[Item]) -> None:
        if entry.slot >= 0:
            del self._wheel[entry.slot][entry]
            entry.slot = -1
