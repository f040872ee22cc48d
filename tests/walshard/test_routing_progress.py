"""What a shard, and others, know of how far its routers are, and of what keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.walshard.rig import Rig
from tests.walshard.test_routing import feeds, put, route
from topics.shm.router_board import RouterBoard


def test_a_router_is_shown_at_the_head_of_its_source_as_soon_as_that_is_made(rig: Rig) -> None:
    route(rig, "r", "a", "b")
    (feed,) = feeds(rig).by_dest.values()
    (router,) = feed.registered()
    board = RouterBoard(rig.shared.router_boards[0])
    shown = board.find(router.id)
    assert shown is not None
    assert shown.source_topic_id == 0, "the source does not exist yet"
    put(rig, "a")
    source, shown = rig.view("a"), board.find(router.id)
    assert source is not None
    assert shown is not None
    assert (shown.source_topic_id, shown.source_seq) == (source.topic_id, source.head_seq)


@pytest.mark.parametrize("end", ["boot", "restart_service"])
def test_a_dest_that_was_ephemeral_gets_nothing_twice(rig: Rig, end: str) -> None:
    """Its cursor was in RAM alone, where nobody looks for that of a durable one."""
    put(rig, "a")
    put(rig, "b", durability="ephemeral")
    route(rig, "r", "a", "b")
    rig.append("a", b"1", b"2", b"3")
    put(rig, "b", durability="disk")
    getattr(rig, end)()
    rig.append("a", b"4")
    kept = [] if end == "restart_service" else [(1, b"1"), (2, b"2"), (3, b"3")]
    assert rig.read("b") == [*kept, (4, b"4")]


def test_copies_become_durable_with_their_originals_while_their_router_waits(tmp_path: Path) -> None:
    frame_bytes = 93
    rig = Rig(str(tmp_path), max_total_bytes=str(3 * frame_bytes + 20))
    try:
        put(rig, "a")
        route(rig, "r", "a", "b")
        rig.append("a", b"1" * 40)
        rig.append("a", b"2" * 40)
        assert rig.cell.get("bytes_live") == 3 * frame_bytes, "there is no room for the second copy"
        for _ in range(3):
            rig.clock.ms += 1_000
            rig.shard.sync_in_background()
            rig.shard.sweep()
            rig.run()
        source, dest = rig.view("a"), rig.view("b")
        assert source is not None
        assert dest is not None
        assert (source.head_seq, source.durable_seq) == (2, 2)
        assert (dest.head_seq, dest.durable_seq) == (1, 1)
    finally:
        rig.close()
