"""The arena: what a reader sees is always one state that the writer published."""

from __future__ import annotations

import multiprocessing.synchronize
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topics.core.config import TopicConfig
from topics.shm import shm_names
from topics.shm.arena import ArenaReader, ArenaWriter, Descriptor, SlotState, TopicView
from topics.shm.arena_heap import LocationRing


def view_of(ring: LocationRing, descriptor: tuple[int, int], **changes: int) -> TopicView:
    fields = dict.fromkeys(TopicView._fields, 0)
    fields |= {"topic_id": 1, "state": SlotState.LIVE, "head_seq": ring.next_seq - 1, "base_seq": ring.base_seq}
    fields |= {"ring_word": ring.word, "ring_capacity": ring.capacity, "descriptor_version": 1}
    fields |= {"descriptor_byte": descriptor[0], "descriptor_len": descriptor[1]}
    return TopicView(**(fields | changes))


def columns(count: int, first: int) -> tuple[array[int], array[int]]:
    return array("Q", [first + at | 50 << 32 for at in range(count)]), array("Q", [7]) * count


def test_a_topic_is_found_configured_changed_and_gone(identity: str) -> None:
    writer = ArenaWriter(identity, 0, 1)
    reader = ArenaReader(identity, 0, 1)
    assert reader.find("orders") is None
    slot = writer.new_slot()
    ring = LocationRing(writer.heap, 1)
    descriptor = writer.store_descriptor(Descriptor("orders", TopicConfig(ttl_ms=5)))
    writer.publish(slot, view_of(ring, descriptor))
    writer.announce(slot)
    assert reader.find("orders") == slot
    assert list(reader.names) == ["orders"]
    assert reader.config(slot, reader.view(slot)) == TopicConfig(ttl_ms=5)

    changed = writer.store_descriptor(Descriptor("orders", TopicConfig(ttl_ms=9)))
    writer.publish(slot, view_of(ring, changed, descriptor_version=2))
    assert reader.config(slot, reader.view(slot)).ttl_ms == 9

    writer.publish(slot, view_of(ring, changed, state=SlotState.DELETED))
    writer.announce(slot)
    assert reader.find("orders") is None
    assert list(reader.names) == []


def test_a_slot_used_again_is_another_topic(identity: str) -> None:
    writer = ArenaWriter(identity, 0, 1)
    reader = ArenaReader(identity, 0, 1)
    ring = LocationRing(writer.heap, 1)
    slot = writer.new_slot()
    for number in range(10_000):  # more changes than the change list holds: the reader has to look at all slots
        descriptor = writer.store_descriptor(Descriptor(f"t{number}", TopicConfig()))
        writer.publish(slot, view_of(ring, descriptor, topic_id=number + 1))
        writer.announce(slot)
        writer.heap.free(*descriptor)
    assert reader.find("t9999") == slot
    assert reader.find("t0") is None
    assert len(reader.names) == 1


class Directory:
    """Topics that come and go in an arena, and what they are called."""

    def __init__(self, identity: str) -> None:
        self.writer = ArenaWriter(identity, 0, 1)
        self.slots: dict[str, int] = {}
        self._ring = LocationRing(self.writer.heap, 1)
        self._last_id = 0

    def make(self, name: str) -> None:
        self.slots[name] = slot = self.writer.new_slot()
        self._publish(slot, name, SlotState.LIVE)

    def delete(self, name: str) -> None:
        slot = self.slots.pop(name)
        self._publish(slot, name, SlotState.DELETED)
        self.writer.return_slot(slot)

    def _publish(self, slot: int, name: str, state: SlotState) -> None:
        self._last_id += 1
        descriptor = self.writer.store_descriptor(Descriptor(name, TopicConfig()))
        self.writer.publish(slot, view_of(self._ring, descriptor, topic_id=self._last_id, state=state))
        self.writer.announce(slot)


@pytest.mark.parametrize("topics", [500, 5000], ids=["from the change list", "from all slots"])
def test_topics_are_learned_in_steps_while_they_come_and_go(identity: str, topics: int) -> None:
    directory = Directory(identity)
    for number in range(topics):
        directory.make(f"t{number}")
    reader = ArenaReader(identity, 0, 1)
    steps = 0
    while not reader.learn(64):
        steps += 1
        if steps < 4:
            # Names move to slots that were looked at, and to some that were not.
            for number in range(steps * 100, steps * 100 + 50):
                directory.delete(f"t{number}")
            for number in range(steps * 100 + 25, steps * 100 + 75):
                if f"t{number}" not in directory.slots:
                    directory.make(f"t{number}")
    assert steps >= topics // 64
    assert dict(reader.names) == directory.slots


def test_who_looks_for_a_topic_does_not_wait_for_the_steps(identity: str) -> None:
    directory = Directory(identity)
    for number in range(300):
        directory.make(f"t{number}")
    reader = ArenaReader(identity, 0, 1)
    assert not reader.learn(10)
    directory.delete("t7")
    directory.make("t300")
    assert reader.find("t300") == directory.slots["t300"]
    assert reader.find("t7") is None
    assert dict(reader.names) == directory.slots
    assert reader.learn(1)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 90)), min_size=1, max_size=40))
def test_the_location_ring_holds_what_was_appended_and_not_dropped(steps: list[tuple[int, int]]) -> None:
    from secrets import token_hex

    identity = token_hex(8)
    try:
        writer = ArenaWriter(identity, 0, 1)
        reader = ArenaReader(identity, 0, 1)
        ring = LocationRing(writer.heap, 1)
        other = LocationRing(writer.heap, 1)
        rows: dict[int, tuple[int, int, int]] = {}
        for ts, (count, drop) in enumerate(steps):
            offset_len, file_flags = columns(count, ring.next_seq * 100)
            ring.reserve(count)
            for at in range(count):
                rows[ring.next_seq + at] = (ts, offset_len[at], file_flags[at])
            ring.append(ts, offset_len, file_flags)
            other.reserve(1)
            other.append(ts, *columns(1, 5))
            ring.drop_before(ring.base_seq + min(drop, ring.next_seq - ring.base_seq))
            view = view_of(ring, (0, 0))
            if view.base_seq > view.head_seq:
                continue
            seen = reader.locations(view, view.base_seq, view.head_seq)
            assert seen is not None
            expected = [rows[seq] for seq in range(view.base_seq, view.head_seq + 1)]
            assert list(zip(seen.ts, seen.offset_len, seen.file_flags, strict=True)) == expected
            first_at_ts = next((s for s in range(view.base_seq, view.head_seq + 1) if rows[s][0] >= ts), None)
            assert reader.first_seq_at(view, ts) == (first_at_ts or view.head_seq + 1)
    finally:
        shm_names.unlink_all(identity)


def test_an_old_view_of_a_ring_that_moved_is_refused(identity: str) -> None:
    writer = ArenaWriter(identity, 0, 1)
    reader = ArenaReader(identity, 0, 1)
    ring = LocationRing(writer.heap, 1)
    ring.reserve(16)
    ring.append(1, *columns(16, 0))
    old = view_of(ring, (0, 0))
    ring.drop_before(17)
    ring.reserve(16)
    ring.append(2, *columns(16, 0))
    assert reader.locations(old, 1, 16) is None
    assert reader.ts_at(old, 3) is None


def _write_for_ever(identity: str, ready: multiprocessing.synchronize.Event) -> None:
    writer = ArenaWriter(identity, 0, 1)
    slot = writer.new_slot()
    ring = LocationRing(writer.heap, 1)
    descriptor = writer.store_descriptor(Descriptor("t", TopicConfig()))
    number = 0
    while True:
        number += 1
        writer.publish(
            slot,
            TopicView._make(
                (
                    *([number] * 11),
                    ring.word,
                    ring.capacity,
                    *descriptor,
                    1,
                    number,
                    0,
                    0,
                    0,
                    *([number] * 4),
                    1,
                    number,
                    number,
                )
            ),
        )
        if number == 1:
            writer.announce(slot)
            ready.set()


def test_a_view_is_never_half_of_two_states_also_when_the_writer_is_killed(identity: str) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=_write_for_ever, args=(identity, ready), daemon=True)
    process.start()
    assert ready.wait(30)
    reader = ArenaReader(identity, 0, 1)
    seen: set[int] = set()
    views = 0
    while views < 20_000 or len(seen) < 5:
        view = reader.view(0)
        assert len(set(view[:11])) == 1
        seen.add(view.topic_id)
        views += 1
    process.kill()
    process.join()
    assert len(set(reader.view(0)[:11])) == 1


def test_a_reader_of_another_version_is_refused(identity: str) -> None:
    ArenaWriter(identity, 0, 1)
    (arena,) = shm_names.objects(identity)
    with open(f"/dev/shm/{arena}", "r+b") as file:
        file.seek(8)
        file.write((99).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="not an index arena of this version"):
        ArenaReader(identity, 0, 1)


def test_topics_that_come_and_go_do_not_keep_a_reader_from_knowing_the_others(identity: str) -> None:
    directory = Directory(identity)
    for number in range(20_000):
        directory.make(f"t{number}")
    reader = ArenaReader(identity, 0, 1)
    steps = made = 0
    while reader.unlearned > 256:
        reader.learn(256)
        steps += 1
        assert steps < 10 * 20_000 // 256, f"{reader.unlearned} are left after {steps} steps"
        for _ in range(15):
            directory.delete(f"t{made}")
            directory.make(f"t{20_000 + made}")
            made += 1
