"""A delete in turns that does not come to its end says so: nobody is told that nothing was done (api §5)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.frontend.live import Live, on_loop, until
from topics.core.errors import TopicsError
from topics.frontend.routes.topic_routes import delete_in_turns
from topics.shm.topic_messages import DeleteRecords


def test_one_that_the_end_of_a_stop_cuts_is_left_open(tmp_path: Path) -> None:
    """`shutting_down` says that nothing was done, and a client sends it again by itself: to take what came since."""

    async def test(live: Live) -> None:
        await live.write("t", 3)
        live.shard_up = False
        deleting = asyncio.create_task(delete_in_turns(live.gateway, DeleteRecords("t", 3, None, b"")))
        await until(lambda: len(live.gateway.pending) == 1)
        deleting.cancel()
        with pytest.raises(TopicsError) as left_open:
            await deleting
        assert (left_open.value.code, left_open.value.detail) == (
            "shard_unavailable",
            {"deleted": 0, "reason": "shutting_down"},
        )
        live.shard_up = True
        await until(lambda: live.reader.get("t").view.records == 1)

    on_loop(tmp_path, test)
