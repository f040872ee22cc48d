"""Files that a pin holds stay, in both tiers, and are removed when the pin is over (storage/pins.py)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.storage.logs import TOPIC_ID
from tests.storage.segments import Record, make_segment
from topics.compactor.leftovers import Leftovers, TopicFiles
from topics.compactor.relocation import HotRetention, Relocation
from topics.core.clock import SystemClock
from topics.core.segment_list import COLD, SEALED, SegmentInfo, SegmentKey, SegmentList
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.pins import Pin, PinFiles, Pinned, new_pin_id, pins_dir, read_pin, read_pinned
from topics.storage.segment_store import LocalStore

FS = OsFileSystem()


def info(first_seq: int, last_seq: int, version: int = 0, flags: int = SEALED) -> SegmentInfo:
    return SegmentInfo(first_seq, last_seq, 0, 0, 100, version, flags)


class Pins:
    """The pins of a service, at a time that the test says."""

    def __init__(self, ram_dir: Path) -> None:
        self.directory = pins_dir(str(ram_dir))
        self.now_ms = 1_000
        self.frontends = [PinFiles(FS, self.directory, number) for number in range(2)]

    def put(self, pin_id: str, *first_seqs: int, until_ms: int = 2_000, frontend: int = 0, ended: bool = False) -> None:
        segments = [(first_seq, 0) for first_seq in first_seqs]
        self.frontends[frontend].put(pin_id, Pin("t", TOPIC_ID, segments, until_ms, ended))

    def read(self) -> Pinned:
        return read_pinned(FS, self.directory, self.now_ms)


@pytest.fixture
def pins(tmp_path: Path) -> Pins:
    (tmp_path / "ram").mkdir()
    return Pins(tmp_path / "ram")


def pinned(*first_seqs: int) -> Pinned:
    return frozenset(SegmentKey(TOPIC_ID, first_seq, 0) for first_seq in first_seqs)


def test_a_pin_holds_for_its_time(pins: Pins) -> None:
    assert pins.read() == frozenset()
    pins.put(new_pin_id(), 1, 6)
    pins.now_ms = 1_999
    assert pins.read() == pinned(1, 6)
    pins.now_ms = 2_000
    assert pins.read() == frozenset()


def test_any_frontend_renews_and_ends_a_pin(pins: Pins) -> None:
    pin_id, other = new_pin_id(), new_pin_id()
    pins.put(pin_id, 1)
    pins.put(other, 6)
    pins.put(pin_id, 1, until_ms=3_000, frontend=1)
    pins.now_ms = 2_500
    assert pins.read() == pinned(1)
    assert pins.frontends[0].held(pins.now_ms) == 0
    assert pins.read() == pinned(1), "what one frontend removes is its own"
    pins.put(pin_id, frontend=0, until_ms=3_000, ended=True)
    assert pins.read() == frozenset()
    assert read_pin(FS, pins.directory, pin_id, pins.now_ms) is None


def test_a_frontend_finds_what_its_former_life_left(pins: Pins) -> None:
    pins.put(new_pin_id(), 1)
    pins.put(new_pin_id(), 6, frontend=1)
    again = PinFiles(FS, pins.directory, 0)
    assert again.held(1_500) == 1
    assert again.held(2_000) == 0
    assert len(FS.listdir(pins.directory)) == 1


def test_an_ended_pin_has_no_place(pins: Pins) -> None:
    pin_id, kept = new_pin_id(), new_pin_id()
    pins.put(pin_id, 1)
    pins.put(kept, 6)
    pins.put(pin_id, ended=True)
    assert pins.frontends[0].held(pins.now_ms) == 1
    assert FS.listdir(pins.directory) == [f"{kept}.0"]
    assert PinFiles(FS, pins.directory, 0).held(pins.now_ms) == 1


def test_a_pin_that_ended_does_not_hold_again(pins: Pins) -> None:
    """Its end is said by one frontend, and its segments by others."""
    pin_id, other = new_pin_id(), new_pin_id()
    pins.put(pin_id, 1)
    pins.put(pin_id, 1, until_ms=3_000, frontend=1)
    pins.put(pin_id, until_ms=3_000, ended=True)
    pins.put(other, 6, frontend=1)
    pins.put(other, ended=True)
    assert pins.read() == frozenset()
    assert [frontend.held(pins.now_ms) for frontend in pins.frontends] == [0, 2], "the other has not looked yet"
    again = PinFiles(FS, pins.directory, 0)
    assert again.held(pins.now_ms) == 0
    again.remove_ended()
    assert pins.read() == frozenset(), "what has ended is no reason to forget that it has"
    pins.frontends[1].remove_ended()
    assert pins.frontends[1].held(pins.now_ms) == 0
    assert sorted(FS.listdir(pins.directory)) == sorted([f"{pin_id}.0", f"{other}.0"])
    last = new_pin_id()
    pins.put(last, 1)
    pins.put(last, ended=True)
    assert FS.listdir(pins.directory) == [], "with the next that ends goes what is not needed any more"


def test_what_others_renewed_is_no_end(pins: Pins) -> None:
    pin_id = new_pin_id()
    pins.put(pin_id, 1)
    pins.put(pin_id, 1, until_ms=3_000, frontend=1)
    for frontend in pins.frontends:
        frontend.remove_ended()
    assert [frontend.held(pins.now_ms) for frontend in pins.frontends] == [1, 1]
    assert pins.read() == pinned(1)


class Directory:
    """Segments 1 to 5 and 6 to 10, of which nothing is needed any more."""

    def __init__(self, data_dir: Path, pins: Pins) -> None:
        self.path = Path(layout.topic_dir(str(data_dir), TOPIC_ID))
        for first_seq in (1, 6):
            make_segment(FS, str(data_dir), [Record(b"1")] * 5, first_seq)
        self.leftovers = Leftovers(FS, str(data_dir), pins.read)
        self.leftovers.consider(TOPIC_ID)

    def sweep(self, needed: TopicFiles) -> list[int]:
        removed, _ = self.leftovers.sweep(lambda topic_id: needed, lambda topic_id: True)
        return [key.first_seq for key in removed]

    def make_room(self, needed: TopicFiles) -> list[int]:
        removed, _ = self.leftovers.make_room([TOPIC_ID], lambda topic_id: needed)
        return [key.first_seq for key in removed]

    def tidy(self, needed: TopicFiles) -> list[int]:
        """Tidy without a snapshot."""
        removed, _ = self.leftovers.tidy(lambda topic_id: needed)
        return [key.first_seq for key in removed]


@pytest.mark.parametrize(
    "needed",
    [
        TopicFiles(SegmentList([]), 11),
        TopicFiles(None, 0),
        TopicFiles(SegmentList([info(1, 5, version=1), info(6, 10, version=1)]), 1),
    ],
    ids=["evicted", "topic deleted", "rewritten"],
)
def test_a_pinned_segment_goes_when_its_pin_is_over(tmp_path: Path, pins: Pins, needed: TopicFiles) -> None:
    directory = Directory(tmp_path, pins)
    pins.put(new_pin_id(), 1)
    assert directory.sweep(needed) == []
    if needed.earliest_seq != 1:
        assert directory.make_room(needed) == [6], "not even on a full disk"
        assert directory.sweep(needed) == []
    else:
        assert directory.sweep(needed) == [6]
    for _ in range(3):
        assert directory.sweep(needed) == directory.tidy(needed) == []
        assert not directory.leftovers.waiting, "a pin is no reason for a snapshot"
    assert len(list(directory.path.glob(f"seg-{1:020d}.*"))) == 3
    pins.now_ms = 2_000
    assert directory.tidy(needed) == [1]
    assert directory.sweep(needed) == []
    assert not directory.path.exists() or not list(directory.path.glob(f"seg-{1:020d}.*"))


def test_pinned_data_outlive_their_copy_into_the_cold_tier(tmp_path: Path, pins: Pins) -> None:
    directory = Directory(tmp_path, pins)
    needed = TopicFiles(SegmentList([info(1, 5, flags=SEALED | COLD), info(6, 10, flags=SEALED | COLD)]), 1)
    pins.put(new_pin_id(), 1)
    for _ in range(3):
        directory.sweep(needed)
    assert [path.name for path in directory.path.glob("*.data")] == [f"seg-{1:020d}.data"]
    pins.now_ms = 2_000
    for _ in range(2):
        directory.sweep(needed)
    assert not list(directory.path.glob("*.data"))


def test_a_pinned_object_of_the_cold_tier_stays(tmp_path: Path, pins: Pins) -> None:
    store = LocalStore(FS, str(tmp_path / "cold" / "topics"))
    for first_seq in (1, 6):
        for name in layout.object_names(TOPIC_ID, first_seq, 0):
            store.put(name, [b"x"])
    pins.put(new_pin_id(), 1)

    def left() -> int:
        return len(store.list(""))

    with ThreadPoolExecutor(1) as helper:
        retention = HotRetention(0, 0)
        relocation = Relocation(FS, str(tmp_path), store, retention, helper, SystemClock(), pins.read)

        def sweep() -> None:
            helper.submit(lambda: None).result()  # what it was told before is done
            relocation.sweep(lambda topic_id: TopicFiles(SegmentList([]), 11), lambda topic_id: True)
            helper.submit(lambda: None).result()

        for _ in range(4):
            sweep()
        assert left() == 3
        assert not relocation.waiting, "a pin is no reason for a snapshot"
        pins.now_ms = 2_000
        relocation.tidy(lambda topic_id: TopicFiles(SegmentList([]), 11))
        helper.submit(lambda: None).result()
        assert left() == 0
