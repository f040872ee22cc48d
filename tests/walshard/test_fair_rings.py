"""A group takes from every ring in its turn: one that is never empty starves neither the others nor the compactor."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.storage.faults import Fault, FaultyFileSystem
from tests.walshard.rig import Rig, TestClock
from topics.core.config import TopicConfig
from topics.shm import messages, shm_names
from topics.shm.instance import SharedMemory
from topics.shm.topic_messages import DeleteTopic, EnsureTopic, PutTopic
from topics.walshard.commit import shard_rings as module
from topics.walshard.commit.shard_rings import ShardRings
from topics.walshard.shard import TURN_MS

FRONTENDS = 3
COMPACTOR = FRONTENDS
GROUP = 5


class Rings:
    """The rings of one shard, the peers' ends and its own."""

    def __init__(self, identity: str) -> None:
        self.shared = SharedMemory.create(identity, 1, FRONTENDS, 1 << 16)
        self.outbox = ShardRings(self.shared, 0)
        self.last_id = 0

    def push(self, peer: int, count: int, name: str = "t") -> None:
        for _ in range(count):
            self.last_id += 1
            request = messages.encode_call(self.last_id, DeleteTopic(name, False))
            assert self.shared.rings[peer][0].requests.push(*request)

    def group(self, ends_turn: bool = False) -> list[int]:
        """Return the frontends whose requests the next group holds, in order; all are answered. With `ends_turn` each
        request takes long.
        """
        taken = []
        for peer, _message, position in self.outbox.requests():
            taken.append((peer, position))
            if ends_turn:
                self.outbox.turn_is_over = True
        for peer, position in taken:
            self.outbox.answer(peer, None, position)
        self.outbox.flush()
        return [peer for peer, _position in taken]


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rings]:
    monkeypatch.setattr(module, "REQUESTS_PER_GROUP_MAX", GROUP)
    identity = secrets.token_hex(8)
    yield Rings(identity)
    shm_names.unlink_all(identity)


def test_a_ring_that_is_never_empty_starves_nobody(rings: Rings) -> None:
    rings.push(1, 1)
    rings.push(2, 1)
    rings.push(COMPACTOR, 1)
    for _ in range(2):
        rings.push(0, GROUP)
        assert rings.group() != [], "the rings hold requests"
        rings.push(0, GROUP)
    # The second group at the latest began behind the ring that filled the first one.
    assert not any(rings.shared.rings[peer][0].requests.pending_bytes for peer in (1, 2, COMPACTOR))


def test_two_busy_rings_take_turns_and_the_last_in_the_row_is_no_exception(rings: Rings) -> None:
    served = []
    for _ in range(6):
        for peer in (0, COMPACTOR):
            rings.push(peer, GROUP)
        served.append(rings.group())
    assert served == [[0] * GROUP, [COMPACTOR] * GROUP] * 3


def test_a_group_that_is_full_of_bytes_passes_the_turn_on_too(rings: Rings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_PER_GROUP_MAX", 1000)
    rings.push(0, 3, "x" * 600)
    rings.push(1, 1)
    assert rings.group() == [0, 0]
    assert rings.group() == [1, 0]


def test_a_group_whose_time_is_over_passes_the_turn_on_too(rings: Rings) -> None:
    rings.push(0, 3)
    rings.push(1, 1)
    taken = [rings.group(ends_turn=True) for _ in range(5)]
    assert taken == [[0], [1], [0], [0], []]


class SlowDisk(FaultyFileSystem):
    """Each sync takes `sync_ms` of a test clock."""

    clock: TestClock | None = None
    sync_ms = 30

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        if self.clock is not None:
            self.clock.ms += self.sync_ms


def test_requests_that_are_synced_one_by_one_end_a_turn_in_time(tmp_path: Path) -> None:
    """So that the shard has a heartbeat, and others their turn, however many topics are deleted at once."""
    disk = SlowDisk()
    rig = Rig(str(tmp_path), disk)
    for number in range(40):
        rig.call(PutTopic(f"t{number}", TopicConfig(), False))
    disk.clock = rig.clock
    rig.replies.clear()
    for number in range(40):
        rig.post_call(DeleteTopic(f"t{number}", False))
    answered = [0]
    while len(rig.replies) < 40:
        began_ms = rig.clock.ms
        assert rig.shard.serve()
        assert rig.clock.ms - began_ms < TURN_MS + 2 * disk.sync_ms
        rig.take_replies()
        answered.append(len(rig.replies))
    assert all(more > fewer for fewer, more in pairwise(answered)), "each turn has done something"
    rig.close()


def test_topics_that_are_made_at_once_are_synced_at_once(tmp_path: Path) -> None:
    disk = SlowDisk()
    rig = Rig(str(tmp_path), disk)
    rig.call(PutTopic("known", TopicConfig(), False))
    disk.clock, began_ms = rig.clock, rig.clock.ms
    made = [rig.post_call(PutTopic(f"t{number}", TopicConfig(), False)) for number in range(500)]
    ensured = rig.post_call(EnsureTopic("e"))
    written = rig.post_append("t7", [b"1"])
    again = rig.post_call(PutTopic("t7", TopicConfig(), False))
    changed = rig.post_call(PutTopic("t8", TopicConfig(cap_records=5), False))
    rig.run()
    assert rig.clock.ms - began_ms <= 10 * disk.sync_ms
    assert [rig.replies[one].created for one in (*made, ensured)] == [True] * 501
    assert (rig.replies[written].first_seq, rig.replies[written].created) == (1, False)
    assert (rig.replies[again].created, rig.replies[changed].created) == (False, False)
    assert rig.hosted("t8").topic.config.cap_records == 5
    rig.restart_service()
    assert all(rig.exists(f"t{number}") for number in range(500))
    assert rig.hosted("t8").topic.config.cap_records == 5
    rig.close()


def test_a_topic_that_the_log_refuses_to_make_is_no_ones(tmp_path: Path) -> None:
    disk = FaultyFileSystem()
    rig = Rig(str(tmp_path), disk)
    rig.append("known", b"0")
    disk.arm(Fault(1, errno.ENOSPC, calls=frozenset({"pwritev"})))
    first, second = (rig.post_call(PutTopic("t", TopicConfig(cap_records=n), False)) for n in (1, 2))
    written = rig.post_append("u", [b"1"])
    rig.run()
    assert rig.replies[first].code == "storage_unavailable"
    assert (rig.replies[second].created, rig.hosted("t").topic.config.cap_records) == (True, 2)
    assert rig.replies[written].created
    rig.close()


def test_each_ring_keeps_its_own_order(rings: Rings) -> None:
    for peer in (0, 1, 2):
        rings.push(peer, 2 * GROUP)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while taken := [(peer, messages.head(message)[1], position) for peer, message, position in rings.outbox.requests()]:
        for peer, request_id, position in taken:
            seen[peer].append(request_id)
            rings.outbox.answer(peer, None, position)
        rings.outbox.flush()
    assert seen == {peer: list(range(1 + peer * 2 * GROUP, 1 + (peer + 1) * 2 * GROUP)) for peer in (0, 1, 2)}
