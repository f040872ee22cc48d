"""Queues with `leases_durable` that routers copy into: a lease is never in the log before its job is."""

from __future__ import annotations

import pytest

from tests.walshard.rig import Rig
from tests.walshard.test_queues import MINUTE_MS, claim, counts, queue
from tests.walshard.test_routing import FullDisk, put, route
from topics.shm.queue_messages import Claim, Waiting, WorkOpen
from topics.storage.layout import group_dir

WINDOW_MS = 50


@pytest.fixture
def fs() -> FullDisk:
    return FullDisk()


def wait_for_copies(rig: Rig, window: bool) -> None:
    """Somebody waits for jobs of `q`, of which there are none yet, to be copied from `a`."""
    put(rig, "a")
    queue(rig, 0, leases_durable=True, claim_jitter_ms=WINDOW_MS if window else 0)
    route(rig, "r", "a", "q")
    if window:
        assert rig.call(Claim("q", "w", 2, MINUTE_MS, 7)) == Waiting(WINDOW_MS)
    else:
        rig.call(WorkOpen("q", 7, "w", 2, MINUTE_MS))


@pytest.mark.parametrize("window", [False, True], ids=["stream", "window"])
@pytest.mark.parametrize("end", ["boot", "restart_service"])
def test_leases_of_copies_outlive_a_restart(rig: Rig, window: bool, end: str) -> None:
    wait_for_copies(rig, window)
    rig.append("a", b"1", b"2")
    if window:
        rig.clock.ms += WINDOW_MS
        rig.run()
    assert [dealt.seqs for dealt in rig.dealt] == [[1, 2]]
    getattr(rig, end)()
    rig.run()
    assert counts(rig) == (0, 2, 0)
    rig.append("a", b"3")
    if not window:
        assert claim(rig, 5, node="other").seqs == [3]


def test_a_stream_waits_for_leases_that_cannot_be_logged(rig: Rig, fs: FullDisk) -> None:
    wait_for_copies(rig, window=False)
    rig.post_append("a", [b"1", b"2"])
    assert rig.step()
    assert counts(rig) == (2, 0, 0), "they are copied, and not dealt yet"
    fs.full_dir = group_dir(rig.settings.data_dir, 0, 1)
    rig.run()
    assert rig.read("q") == [(1, b"1"), (2, b"2")]
    assert counts(rig) == (2, 0, 0)
    assert not any(dealt.seqs for dealt in rig.dealt)
    rig.dealt.clear()
    fs.full_dir = None
    due_ms = rig.shard.next_tick_ms
    assert due_ms is not None
    assert due_ms > rig.clock.ms, "it is tried over and over"
    rig.clock.ms = due_ms
    rig.run()
    rig.outbox.flush()
    rig.take_replies()
    assert [dealt.seqs for dealt in rig.dealt] == [[1, 2]]
    rig.boot()
    assert counts(rig) == (0, 2, 0)


def test_a_claim_whose_window_ends_is_refused_if_leases_cannot_be_logged(rig: Rig, fs: FullDisk) -> None:
    """ "None" would say that there are none."""
    wait_for_copies(rig, window=True)
    rig.append("a", b"1", b"2")
    assert counts(rig) == (2, 0, 0)
    fs.full_dir = group_dir(rig.settings.data_dir, 0, 1)
    rig.clock.ms += WINDOW_MS
    rig.run()
    assert [(dealt.stream, dealt.seqs, dealt.refused) for dealt in rig.dealt] == [(7, [], True)]
    fs.full_dir = None
    rig.dealt.clear()
    rig.call(Claim("q", "w", 2, MINUTE_MS, 8))
    rig.clock.ms += WINDOW_MS
    rig.run()
    assert [(dealt.stream, dealt.seqs, dealt.refused) for dealt in rig.dealt] == [(8, [1, 2], False)]
