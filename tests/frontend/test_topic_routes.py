"""List cursors, lists in slices, read recency."""

from __future__ import annotations

import asyncio
import base64
import gc
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from tests.frontend.hosting import Hosting, Written
from tests.frontend.live import Live, on_loop
from topics.core.errors import TopicsError, topic_not_found
from topics.core.keys import ANYONE
from topics.core.names import check_router_name, check_topic_name
from topics.core.routers import Router, RouterRegistry, RouterSpec
from topics.frontend.entry.wire import name_after, name_cursor
from topics.frontend.live.step_cache import KnownTopics
from topics.frontend.reads.catching_up import CatchingUp, RouterSight
from topics.frontend.reads.files import LogFiles
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.routes import topic_ranking
from topics.frontend.routes.router_routes import SLICE_ROUTERS, RouterRoutes
from topics.frontend.routes.topic_ranking import RankedTopic
from topics.frontend.routes.topic_routes import TopicRoutes
from topics.frontend.shards import arenas
from topics.frontend.shards.gateway import Gateway
from topics.shm.memory import SharedObject
from topics.shm.queue_messages import CursorGet, CursorPut
from topics.shm.recency import Recency, RecencyWriter
from topics.shm.shm_names import SHM_ROOT
from topics.storage import layout

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,254}", fullmatch=True)


@pytest.mark.long
@given(NAMES)
def test_a_cursor_leads_back_to_its_name(name: str) -> None:
    assert name_after(name_cursor(name), check_topic_name) == name


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: base64.urlsafe_b64encode(raw).decode()))
def test_any_other_cursor_is_refused(text: str) -> None:
    with pytest.raises(TopicsError) as refused:
        name_after(text, check_topic_name)
    assert refused.value.code == "invalid_request"


@given(NAMES, st.data())
def test_a_damaged_cursor_is_refused(name: str, data: st.DataObject) -> None:
    """A byte is missing, added or changed; the result may still be base64 of a name."""
    cursor = name_cursor(name)
    at = data.draw(st.integers(0, len(cursor) - 1))
    other = data.draw(st.sampled_from("AZaz09-_").filter(lambda character: character != cursor[at]))
    for damaged in (cursor[:at], cursor[:at] + other + cursor[at + 1 :], cursor + other, cursor + "="):
        if damaged:
            with pytest.raises(TopicsError, match="cursor"):
                name_after(damaged, check_topic_name)


def test_no_cursor_is_the_beginning() -> None:
    assert name_after(None, check_topic_name) == ""


class Counted(TopicRoutes):
    """Lists of topics that are all there and none of which has expired; it counts what it has looked at."""

    def __init__(self) -> None:
        self.looked = 0
        self.known = cast(KnownTopics, SimpleNamespace(reader=self))

    def find(self, name: str) -> TopicRef:
        self.looked += 1
        return cast(TopicRef, SimpleNamespace(name=name, config=SimpleNamespace(is_synced=True)))

    def has_expired(self, ref: TopicRef) -> bool:
        return False

    def _shown(self, ref: TopicRef, touch: bool) -> dict[str, Any]:
        self.looked += 1
        return {"topic": ref.name}


def test_a_thousand_topics_are_listed_while_others_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    routes, names, seen = Counted(), [f"t-{number}" for number in range(1000)], []

    async def test() -> dict[str, dict[str, Any]]:
        listing = asyncio.create_task(routes.entries(names, touch=False))
        while not listing.done():
            seen.append(routes.looked)
            await asyncio.sleep(0)
        return listing.result()

    entries = asyncio.run(test())
    assert [entry["topic"] for entry in entries.values()] == names
    assert entries["t-0"] == {"topic": "t-0", "durable": True}
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2


class Expired(Counted):
    """Lists of topics all of whose records have expired, and the first of which is deleted meanwhile."""

    def has_expired(self, ref: TopicRef) -> bool:
        return True

    async def evicted(self, ref: TopicRef) -> TopicRef:
        self.looked += 1
        if ref.name == "t-0":
            raise topic_not_found(ref.name)
        return ref


def test_a_thousand_topics_that_have_expired_are_listed_while_others_have_their_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    routes, names, seen = Expired(), [f"t-{number}" for number in range(1000)], []

    async def test() -> list[str]:
        listing = asyncio.create_task(routes.entries(names, touch=False))
        while not listing.done():
            seen.append(routes.looked)
            await asyncio.sleep(0)
        return list(listing.result())

    assert asyncio.run(test()) == names[1:]
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 3


class ManyRouters(RouterRoutes):
    """A thousand routers, none of which has begun; it counts its looks at them."""

    def __init__(self, count: int) -> None:
        self.looked, self.is_learned = 0, False
        registry = RouterRegistry()
        for id in range(count):
            registry.put(Router(id, 1, f"r-{id:04}", RouterSpec("source", f"dest-{id}")))
        self.sight = cast(RouterSight, SimpleNamespace(registry=lambda: registry, progress=self._progress))
        self.reader = cast(TopicReader, SimpleNamespace(find=lambda _name: None))
        self.gateway = cast(Gateway, SimpleNamespace(owner=lambda _name: 0, arenas=SimpleNamespace(learn=self._learn)))
        self.catching_up = cast(CatchingUp, SimpleNamespace(wait_for_all=self._wait))

    async def _learn(self, _slices: object) -> None:
        assert not self.looked, "the first look for a name would learn all new ones at once"
        self.is_learned = True

    def _progress(self, _shard: int, _id: int) -> None:
        self.looked += 1

    async def _wait(self, _names: object) -> bool:
        return True


async def list_routers(routes: RouterRoutes, query: dict[str, str], size: int, caller: Any = ANYONE) -> dict[str, Any]:
    """Return the page behind the fourth router."""
    endpoint: Any = RouterRoutes.list_all

    async def page(*_: object) -> tuple[int, str]:
        return size, "r-0003"

    request: Any = SimpleNamespace(query=QueryParams(query), caller=caller, list_page=page)
    answer: dict[str, Any] = (await endpoint.__wrapped__(routes, request)).answer
    return answer


def test_a_thousand_routers_are_listed_while_others_have_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "SLICE_S", 0)  # however fast this machine is
    routes, seen = ManyRouters(1500), list[int]()

    async def test() -> dict[str, Any]:
        listing = asyncio.create_task(list_routers(routes, {}, 1000))
        while not listing.done():
            seen.append(routes.looked)
            await asyncio.sleep(0)
        return listing.result()

    answer = asyncio.run(test())
    assert routes.is_learned
    assert [one["router"] for one in answer["routers"]] == [f"r-{id:04}" for id in range(4, 1004)]
    assert name_after(answer["next_cursor"], check_router_name) == "r-1003"
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 2


@pytest.mark.parametrize("query", [{}, {"source": "source"}, {"prefix": "r-", "source": "source"}])
def test_a_page_of_routers_is_a_look_at_few_of_them(query: dict[str, str]) -> None:
    looked = set[str]()

    def covers(name: str) -> bool:
        if name.startswith("r-"):
            looked.add(name)
        return True

    answer = asyncio.run(list_routers(ManyRouters(3 * SLICE_ROUTERS), query, 100, SimpleNamespace(covers=covers)))
    assert [one["router"] for one in answer["routers"]] == [f"r-{id:04}" for id in range(4, 104)]
    assert len(looked) <= SLICE_ROUTERS


def test_a_shard_that_does_not_answer_is_asked_once_for_the_cursors_of_all_its_topics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for once for each topic, an hour for the most there may be, and everybody who sorts behind it.
    The ranking was then kept for 50 times as long as that had taken.
    """
    monkeypatch.setattr(topic_ranking, "KEPT_MIN_S", 0.001)
    monkeypatch.setattr(topic_ranking, "KEPT_TIMES", 500)

    async def test(live: Live) -> None:
        asked = list[str]()
        submit = live.gateway.submit

        def count(shard: int, request: Any, *more: Any, **options: Any) -> Any:
            asked.extend([request.name] * isinstance(request, CursorGet))
            return submit(shard, request, *more, **options)

        monkeypatch.setattr(live.gateway, "submit", count)
        for name in ("a", "b", "c"):
            await live.write(name)
            await live.gateway.call(0, CursorPut(name, "c", None, None, 0, False))

        ranking = topic_ranking.TopicRanking(live.arenas, live.gateway)

        async def until_lags_are(lag: int | None) -> None:
            while [one.lag for one in (await ranking.best(QueryParams("sort=lag"), ("",), 10))[0]] != [lag] * 3:
                await asyncio.sleep(0.001)

        await until_lags_are(1)
        asked.clear()
        live.shard_up, live.gateway.shard_wait_s = False, 0.3
        await until_lags_are(None)
        assert asked == ["a"]
        live.shard_up, live.gateway.shard_wait_s = True, 60.0
        await until_lags_are(1)

    on_loop(tmp_path, test)


def test_the_garbage_collector_passes_over_ranked_topics() -> None:
    """A pass keeps up to 100,000 of them: looking at all of these took the loop 70 ms."""
    assert not gc.is_tracked(RankedTopic("t", 1.0, 1, 1, None, None, "log", ()))


def test_reads_of_all_frontends_count(identity: str) -> None:
    shards, frontends = 3, 2
    readers = Recency(identity, frontends, shards)
    assert readers.last_read_ms(0, 0, 1) == 0
    first, second = (RecencyWriter(identity, frontend, shards) for frontend in range(frontends))
    first.touch(2, 70_000, 11, 500)
    second.touch(2, 70_000, 11, 400)
    second.touch(1, 70_000, 12, 900)
    assert readers.last_read_ms(2, 70_000, 11) == 500
    assert readers.last_read_ms(1, 70_000, 12) == 900
    second.touch(2, 70_000, 11, 600)
    assert readers.last_read_ms(2, 70_000, 11) == 600
    assert readers.last_read_ms(0, 70_000, 11) == 0
    assert readers.last_read_ms(2, 2**20 - 1, 11) == 0  # not backed by memory, and not touched


def test_a_slot_given_to_another_topic_was_not_read(identity: str) -> None:
    writer, reader = RecencyWriter(identity, 0, 1), Recency(identity, 1, 1)
    writer.touch(0, 5, 11, 500)
    assert reader.last_read_ms(0, 5, 12) == 0
    writer.touch(0, 5, 12, 600)
    assert (reader.last_read_ms(0, 5, 11), reader.last_read_ms(0, 5, 12)) == (0, 600)


def test_recency_outlives_its_frontend(identity: str) -> None:
    RecencyWriter(identity, 0, 1).touch(0, 5, 11, 500)
    again = RecencyWriter(identity, 0, 1)
    assert Recency(identity, 1, 1).last_read_ms(0, 5, 11) == 500
    again.touch(0, 9000, 12, 700)
    reader = Recency(identity, 1, 1)
    assert (reader.last_read_ms(0, 5, 11), reader.last_read_ms(0, 9000, 12)) == (500, 700)


def test_a_frontend_that_was_killed_while_it_made_its_table_has_a_successor(identity: str) -> None:
    """Between the two calls that make the object and give it a size."""
    Path(SHM_ROOT, f"topics-{identity}-recency-0").touch()
    reader = Recency(identity, 1, 1)
    assert reader.last_read_ms(0, 5, 11) == 0
    RecencyWriter(identity, 0, 1).touch(0, 5, 11, 500)
    assert reader.last_read_ms(0, 5, 11) == 500


def test_recency_without_memory_is_not_noted(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    writer, reader = RecencyWriter(identity, 0, 1), Recency(identity, 1, 1)
    monkeypatch.setattr(SharedObject, "reserve", full)
    writer.touch(0, 5, 11, 500)
    assert reader.last_read_ms(0, 5, 11) == 0
    monkeypatch.undo()
    writer.touch(0, 5, 11, 600)
    assert reader.last_read_ms(0, 5, 11) == 600


def test_log_files_are_mapped_anew_when_they_grow_and_let_go_when_many(hosting: Hosting, tmp_path: object) -> None:
    hosting.make("t")
    sizes = {}
    for hosting.file_no in (1, 2, 3):
        hosting.write("t", [Written(b"1")])
        sizes[hosting.file_no] = hosting.topics["t"].topic.live_bytes // hosting.file_no
    files = LogFiles(str(tmp_path), hosting.shared.ram_dir, 1, maps_max=2)
    first = files.get(0, False, 1, sizes[1])
    assert files.get(0, False, 1, sizes[1]) is first
    with pytest.raises(EOFError):
        files.get(0, False, 1, sizes[1] + 1)
    hosting.file_no = 1
    hosting.write("t", [Written(b"2")])
    grown = files.get(0, False, 1, sizes[1] + 1)
    assert len(grown) > len(first)
    for file_no in (2, 3):
        files.get(0, False, file_no, sizes[2])
    assert files.get(0, False, 1, sizes[1]) is not grown
    with pytest.raises(FileNotFoundError):
        files.get(0, True, 1, 1)
    assert layout.log_path(layout.group_dir(str(tmp_path), 0, 1), 1).startswith(str(tmp_path))
