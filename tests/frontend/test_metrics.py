"""The metrics of a frontend over a real arena: bounded, in slices, and there while nothing else is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.frontend.hosting import Hosting, Written
from topics.core.errors import TopicsError
from topics.core.keys import KeyRing, KeyScope
from topics.frontend.entry import limits
from topics.frontend.entry.access import Access, KeyLimits
from topics.frontend.operators import exposition
from topics.frontend.operators import service_routes as module
from topics.frontend.operators.exposition import Family
from topics.frontend.operators.figures import ServiceFigures
from topics.frontend.operators.service_routes import MetricsRoute
from topics.frontend.shards import arenas
from topics.settings import load
from topics.shm.control import Role
from topics.shm.durations import Route
from topics.shm.quotas import KeyCounts


def route(hosting: Hosting, topics_max: int = 100) -> MetricsRoute:
    figures = ServiceFigures(hosting.shared.control, hosting.shared.durations, hosting.clock.now_ms)
    return MetricsRoute(figures, hosting.arenas, 1, topics_max)


async def scrape(metrics: MetricsRoute, accept: bytes = b"") -> bytes:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("a GET has no body")

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"headers": [(b"accept", accept)]}
    unlimited = KeyLimits(KeyCounts(memoryview(bytearray(KeyCounts.size_bytes(1))).cast("Q"), 1, 0), load({}, {}))
    Access(KeyRing(()), unlimited).admit(scope, KeyScope.READ)
    await metrics.get(scope, receive, send)
    assert sent[0]["status"] == 200
    body: bytes = sent[1]["body"]
    return body


def of_topics(text: bytes, name: str) -> dict[str, float]:
    (family,) = [f for f in text_string_to_metric_families(text.decode()) if f.name == f"topics_topic_{name}"]
    return {sample.labels["topic"]: sample.value for sample in family.samples}


def plain(text: bytes, name: str) -> float:
    (sample,) = [s for f in text_string_to_metric_families(text.decode()) for s in f.samples if s.name == name]
    return float(sample.value)


def test_series_of_topics_are_bounded_by_name_and_the_bound_is_told(hosting: Hosting) -> None:
    for n in range(10):
        hosting.make(f"t{n}")
        hosting.write(f"t{n}", [Written(b"1")] * n)
    text = asyncio.run(scrape(route(hosting, 4)))
    assert of_topics(text, "head_seq") == {"t0": 0, "t1": 1, "t2": 2, "t3": 3}
    assert plain(text, "topics_topic_metrics_truncated") == 1
    text = asyncio.run(scrape(route(hosting, 10)))
    assert of_topics(text, "earliest_seq") == {f"t{n}": 1 for n in range(10)}
    assert of_topics(text, "records_live") == {f"t{n}": n for n in range(10)}
    assert plain(text, "topics_topic_metrics_truncated") == 0
    text = asyncio.run(scrape(route(hosting, 0)))
    assert b"topics_topic_head_seq" not in text
    assert plain(text, "topics_topic_metrics_truncated") == 1


def test_few_scrapes_are_made_at_once(hosting: Hosting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds however many ask: each scrape has all its series in memory, and takes slices of a millisecond."""
    monkeypatch.setattr(arenas, "SLICE_S", 0.0)
    for n in range(3 * module.PAGE_TOPICS):
        hosting.make(f"t{n}")
    metrics = route(hosting, 1000)
    at_once = limits.SCRAPES.most_bytes // module.ANSWER_BYTES
    making = most = 0
    series = metrics._topic_families

    async def counted(*arguments: Any) -> list[Family]:
        nonlocal making, most
        making += 1
        most = max(most, making)
        try:
            return await series(*arguments)
        finally:
            making -= 1

    monkeypatch.setattr(metrics, "_topic_families", counted)

    async def main() -> list[bytes]:
        scrapes = [asyncio.create_task(scrape(metrics)) for _ in range(5 * at_once)]
        await asyncio.sleep(0)
        scrapes.pop(0).cancel()  # in nobody's way, wherever it is
        scrapes.pop().cancel()
        return await asyncio.gather(*scrapes)

    texts = asyncio.run(main())
    assert most == at_once
    assert {len(of_topics(text, "head_seq")) for text in texts} == {3 * module.PAGE_TOPICS}


def test_so_many_scrapes_may_wait_and_the_next_one_is_refused(
    hosting: Hosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = limits.SCRAPES.most_bytes // module.ANSWER_BYTES
    monkeypatch.setattr(limits, "SCRAPES", limits.SCRAPES._replace(most_count=at_once + 3))
    monkeypatch.setattr(arenas, "SLICE_S", 0.0)
    hosting.make("t")
    metrics = route(hosting, 1000)

    async def main() -> None:
        for _ in range(2):  # the one that was there before counts no longer
            scrapes = [asyncio.create_task(scrape(metrics)) for _ in range(at_once + 3)]
            await asyncio.sleep(0)
            with pytest.raises(TopicsError) as refused:
                await scrape(metrics)
            assert refused.value.code == "throttled"
            assert refused.value.detail is not None
            assert refused.value.detail["limit"] == "scrapes"
            scrapes.pop().cancel()
            await asyncio.gather(*scrapes)

    asyncio.run(main())


@pytest.mark.parametrize("accept", [b"", b"application/json"])
def test_a_scrape_of_ten_thousand_topics_lets_others_have_their_turn(hosting: Hosting, accept: bytes) -> None:
    """The work between two turns of the loop is bounded, in topics read and in series rendered."""
    topics = 10_000
    for n in range(topics):
        hosting.make(f"topic-{n:05}")
    turns = 0

    async def main() -> bytes:
        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        beside = asyncio.create_task(others())
        body = await scrape(route(hosting, topics), accept)
        beside.cancel()
        return body

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(arenas, "SLICE_S", 0.0)
        body = asyncio.run(main())
    pages = topics / module.PAGE_TOPICS
    pieces = 4 * topics / exposition.PIECE_SAMPLES
    assert turns >= pages + pieces
    if accept:
        assert len(msgspec.json.decode(body)["topics_topic_head_seq"]) == topics
    else:
        assert len(of_topics(body, "head_seq")) == topics


@pytest.mark.parametrize(
    "act",
    [
        lambda hosting: hosting.retire("topic-01"),
        lambda hosting: [hosting.retire(f"topic-{n:02}") for n in range(1, 100)],
        lambda hosting: [hosting.make(f"topic-{n:02}x") for n in range(100)],
    ],
    ids=["one goes", "most go", "many come"],
)
def test_topics_that_come_and_go_meanwhile_disturb_no_others(
    hosting: Hosting, act: Callable[[Hosting], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_TOPICS", 7)
    monkeypatch.setattr(arenas, "SLICE_S", 0.0)
    for n in range(101):
        hosting.make(f"topic-{n:02}")

    async def main() -> bytes:
        scraping = asyncio.create_task(scrape(route(hosting, 1000)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        act(hosting)
        return await scraping

    found = of_topics(asyncio.run(main()), "head_seq")
    assert {"topic-00", "topic-100"} <= set(found)
    assert {f"topic-{n:02}" for n in range(101)} & set(hosting.topics) <= set(found)


def test_it_answers_before_any_shard_has_recovered(hosting: Hosting) -> None:
    hosting.make("t")
    cell = hosting.shared.control.cell(Role.WALSHARD, 0)
    cell.set("generation", 0)
    cell.set("progress_ppm", 250_000)
    text = asyncio.run(scrape(route(hosting)))
    assert (plain(text, "topics_ready"), plain(text, "topics_recovery_progress")) == (0, 0.25)
    assert b"topics_topic_head_seq" not in text
    cell.set("generation", 1)
    text = asyncio.run(scrape(route(hosting)))
    assert (plain(text, "topics_ready"), plain(text, "topics_recovery_progress")) == (1, 1)
    assert of_topics(text, "head_seq") == {"t": 0}


def test_times_of_requests_are_those_of_all_frontends_in_seconds(hosting: Hosting) -> None:
    hosting.shared.durations.observe(0, Route.DIFF, 1500)
    hosting.shared.durations.observe(0, Route.DIFF, 2048)
    body = asyncio.run(scrape(route(hosting), b"application/json"))
    totals = msgspec.json.decode(body)
    assert (totals["topics"], totals["queue_topics"]) == (totals["topics_topics"], totals["topics_queue_topics"])
    assert set(totals["wal"]) == {"frames", "bytes", "fsyncs"}
    assert totals["wal"]["bytes"] == totals["topics_wal_bytes_written_total"]
    diff = msgspec.json.decode(body)["topics_request_duration_seconds"]["diff"]
    assert (diff["count"], diff["sum"]) == (2, 0.003548)
    assert (diff["buckets"]["0.001024"], diff["buckets"]["0.002048"], diff["buckets"]["+Inf"]) == (0, 2, 2)
