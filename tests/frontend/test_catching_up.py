"""Reads of what routers copy into (api §6) that cannot be brought up to date: the answer says so. The shard is the
test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.frontend.hosting import Hosting, Written
from tests.frontend.test_app import Frontend, on_loop
from tests.frontend.test_claims import Shard
from topics.core.routers import Router, RouterRegistry, RouterSpec
from topics.frontend.reads.catching_up import CatchingUp
from topics.frontend.shards import arenas
from topics.shm.queue_messages import CursorGet, CursorList, CursorReply
from topics.shm.router_memory import RouterProgress, RouterTableWriter
from topics.shm.topic_messages import CatchUp, CaughtUp, PutTopic, PutTopicReply


def chain(hosting: Hosting, *names: str) -> None:
    """Topics of which each is copied into the next; none of the routers has begun."""
    for name in names:
        hosting.make(name)
        hosting.write(name, [Written(b"1")])
    routers = [
        Router(id, 1, f"r{id}", RouterSpec(source, dest)) for id, (source, dest) in enumerate(pairwise(names), 1)
    ]
    RouterTableWriter(hosting.shared.router_table).store_all(routers)


async def read(frontend: Frontend, shard: Shard, name: str, *replies: tuple[str, CaughtUp]) -> dict[str, Any]:
    """The `performance` of a read for which the shard was asked just this, and answered it."""
    asked = asyncio.create_task(frontend.ask("POST", f"/v0/topics/{name}/diff", {}))
    for dest, reply in replies:
        request_id, call = await shard.told(CatchUp)
        assert call == CatchUp(dest)
        shard.answer(request_id, reply)
    status, _, answer = await asked
    assert (status, [record["data"] for record in answer["records"]]) == (200, [1])
    performance: dict[str, Any] = answer["performance"]
    return performance


def test_a_read_of_what_could_not_be_copied_says_so(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        assert "copies_pending" not in await read(frontend, shard, "b", ("b", CaughtUp(True, False)))
        assert (await read(frontend, shard, "b", ("b", CaughtUp(True, True))))["copies_pending"] is True

    chain(hosting, "a", "b")
    on_loop(hosting, test)


def test_a_read_through_a_cursor_says_so_too(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        asked = asyncio.create_task(frontend.ask("POST", "/v0/topics/b/cursors/c/read", {"checkpoint": False}))
        shard.answer((await shard.told(CatchUp))[0], CaughtUp(True, True))
        cursor = CursorReply("c", "at_least_once", 1, 0, 0, 1)
        shard.answer((await shard.told(CursorGet))[0], CursorList([cursor]))
        status, _, answer = await asked
        assert (status, answer["performance"].get("copies_pending")) == (200, True)

    chain(hosting, "a", "b")
    on_loop(hosting, test)


def test_who_copies_from_what_could_not_be_copied_goes_on_and_says_so(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        found = await read(frontend, shard, "c", ("b", CaughtUp(True, True)), ("c", CaughtUp(True, False)))
        assert found["copies_pending"] is True
        found = await read(frontend, shard, "c", ("b", CaughtUp(True, False)), ("c", CaughtUp(True, False)))
        assert "copies_pending" not in found

    chain(hosting, "a", "b", "c")
    on_loop(hosting, test)


def test_a_change_of_a_topic_waits_for_what_comes_over_a_chain_and_says_what_could_not_be_copied(
    hosting: Hosting,
) -> None:
    """Records that were acknowledged before came behind the change, and met caps that they should not."""

    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        for pending in (False, True):
            asked = asyncio.create_task(frontend.ask("PUT", "/v0/topics/c", {"cap_records": 7}))
            for dest in ("b", "c"):
                request_id, call = await shard.told(CatchUp)
                assert call == CatchUp(dest)
                shard.answer(request_id, CaughtUp(True, pending))
            request_id, change = await shard.told(PutTopic)
            shard.answer(request_id, PutTopicReply(False, change.config))
            status, _, answer = await asked
            assert (status, answer["config"]["cap_records"]) == (200, 7)
            assert answer["performance"].get("copies_pending", False) is pending

    chain(hosting, "a", "b", "c")
    on_loop(hosting, test)


def test_a_source_that_could_not_be_read_at_this_moment_is_asked_for_again(hosting: Hosting) -> None:
    async def test(frontend: Frontend) -> None:
        shard = Shard(frontend)
        not_at_hand = CaughtUp(False, True)
        found = await read(frontend, shard, "b", ("b", not_at_hand), ("b", not_at_hand), ("b", CaughtUp(True, False)))
        assert "copies_pending" not in found

    chain(hosting, "a", "b")
    on_loop(hosting, test)


class Sights:
    """Routers into topics that have all copies, or none; counts the looks at their sources."""

    def __init__(self, count: int, behind: bool) -> None:
        self.dests = [f"dest-{number}" for number in range(count)]
        self.looks = self.asked = 0
        self._registry = RouterRegistry()
        for id, dest in enumerate(self.dests, 1):
            self._registry.put(Router(id, 1, f"r{id}", RouterSpec("source", dest)))
        self._behind = behind
        self.shards, self.arenas = 1, self

    async def renewed(self, shards: Sequence[int]) -> None:
        assert (list(shards), self.looks) == ([0], 0), "all names are known before the first look"

    def registry(self) -> RouterRegistry:
        return self._registry

    def find(self, name: str) -> object:
        self.looks += name == "source"
        return SimpleNamespace(view=SimpleNamespace(topic_id=7, head_seq=3))

    def progress(self, _shard: int, router_id: int) -> RouterProgress:
        return RouterProgress(router_id, 1, 7, 2 if self._behind else 3, 0)

    def owner(self, name: str) -> int:
        return 0

    async def ask(self, request: CatchUp) -> CaughtUp:
        self.asked += 1
        return CaughtUp(True, False)


@pytest.mark.parametrize("behind", [False, True])
def test_waits_for_many_topics_begin_while_others_have_their_turns(
    monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    sights, seen = Sights(200, behind), [0]

    async def test() -> bool:
        part: Any = sights
        waiting = asyncio.create_task(CatchingUp(part, part, part).wait_for_all(["other", *sights.dests]))
        while not waiting.done():
            await asyncio.sleep(0)
            seen.append(sights.looks)
        return waiting.result()

    assert asyncio.run(test())
    assert sights.asked == (200 if behind else 0)
    assert max(after - before for before, after in pairwise(seen)) <= 3


class Hastening(Sights):
    """a is copied into b, and b into c. As soon as one of the routers was looked at, a record is in a and in b."""

    def __init__(self) -> None:
        super().__init__(0, behind=False)
        for id, (source, dest) in enumerate(pairwise("abc"), 1):
            self._registry.put(Router(id, 1, f"r{id}", RouterSpec(source, dest)))
        self._looked_at: set[str] = set()

    def find(self, name: str) -> object:
        return SimpleNamespace(view=SimpleNamespace(topic_id=ord(name), head_seq=2 if self._looked_at else 1))

    def progress(self, _shard: int, router_id: int) -> RouterProgress:
        source = "ab"[router_id - 1]
        copied = 2 if self._looked_at and source == "a" else 1
        self._looked_at.add(source)
        return RouterProgress(router_id, 1, ord(source), copied, 0)


def test_a_record_that_passes_while_a_list_looks_is_waited_for() -> None:
    sights: Any = Hastening()
    assert asyncio.run(CatchingUp(sights, sights, sights).wait_for_all(["c"]))
    assert sights.asked, "c lacks what b has had since"
