"""api §6 and the rules of routers: one test for each sentence that a client can see."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, diff_records, missing, ok, put, refused, state, whole, write, write_raw
from tests.contract.stream import follow
from tests.contract.timing import undisturbed
from tests.harness import Service, poll
from topics.core.names import owner_shard

GAVE_UP_MS = 1_990
"""A read of a dest waits for 2 s."""
DEFAULTS = {
    "preserve_node": True,
    "preserve_tag": True,
    "create_dest": True,
    "filter": None,
    "allow_cycle": False,
    "guarantee": "at_least_once",
}


def route(client: httpx.Client, name: str, source: str, dest: str, **fields: Any) -> dict[str, Any]:
    return ok(client.put(f"/v0/routers/{name}", json={"source": source, "dest": dest, **fields}))


def router(client: httpx.Client, name: str) -> dict[str, Any]:
    return ok(whole(lambda: client.get(f"/v0/routers/{name}")))


def in_time(*answers: dict[str, Any]) -> bool:
    """Return whether no read was held up for as long as a read waits for its dest to be brought up to date. A read that
    was held up may have gone on without that, and not all answers say so.
    """
    return all(answer["performance"]["server_total_ms"] < GAVE_UP_MS for answer in answers)


def caught_up(ask: Callable[[], httpx.Response]) -> dict[str, Any]:
    """The first answer in time, to what may be asked again."""
    return poll("an answer in time", lambda: answer if in_time(answer := ok(ask())) else None)


def data(client: httpx.Client, topic: str, **body: Any) -> list[Any]:
    return [record["data"] for record in diff(client, topic, limit=1000, **body)["records"]]


def wal_frames(client: httpx.Client) -> int:
    metrics = ok(client.get("/v0/metrics", headers={"Accept": "application/json"}))
    return int(metrics["topics_wal_frames_total"])


def left_out(client: httpx.Client) -> int:
    metrics = ok(client.get("/v0/metrics", headers={"Accept": "application/json"}))
    return int(metrics["topics_router_oversize_total"])


@pytest.fixture
def own() -> Iterator[Service]:
    with Service() as running:
        yield running


# --- PUT, GET, list, DELETE


def test_put_answers_the_whole_router(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    answer = client.put(f"/v0/routers/r>{topic}", json={"source": topic, "dest": f"{topic}.d"})
    assert answer.status_code == 201
    body = ok(answer)
    del body["performance"]
    assert body == {"router": f"r>{topic}", "created": True, "source": topic, "dest": f"{topic}.d", **DEFAULTS}
    again = client.put(f"/v0/routers/r>{topic}", json={"source": topic, "dest": f"{topic}.d"})
    assert again.status_code == 200
    assert ok(again)["created"] is False


def test_get_adds_forwarded_total(client: httpx.Client, topic: str) -> None:
    fields = {"preserve_node": False, "preserve_tag": False, "filter": ["tag", "Eq", "x"], "guarantee": "exactly_once"}
    route(client, topic, topic, f"{topic}.d", **fields)
    body = router(client, topic)
    del body["performance"]
    expected = {"router": topic, "source": topic, "dest": f"{topic}.d", **DEFAULTS, **fields}
    assert body == {**expected, "forwarded_total": 0, "lag": 0}


def test_an_unknown_router_is_404(client: httpx.Client, topic: str) -> None:
    assert refused(client.get(f"/v0/routers/{topic}"), 404, "router_not_found")["detail"] == {"router": topic}


def test_list_by_prefix_source_and_dest_in_pages(client: httpx.Client, topic: str) -> None:
    for at in range(7):
        route(client, f"{topic}.r{at}", f"{topic}.s{at % 2}", f"{topic}.d{at}")

    def names(**query: Any) -> list[str]:
        found = ok(client.get("/v0/routers", params={"prefix": topic, **query}))["routers"]
        return [one["router"].removeprefix(f"{topic}.") for one in found]

    assert names() == [f"r{at}" for at in range(7)]
    assert names(source=f"{topic}.s1") == ["r1", "r3", "r5"]
    assert names(dest=f"{topic}.d4") == ["r4"]
    assert names(source=f"{topic}.s1", dest=f"{topic}.d4") == []
    assert names(source=f"{topic}.s0", dest=f"{topic}.d4") == ["r4"]
    assert names(source=f"{topic}.s0", prefix=f"{topic}.r2") == ["r2"]
    seen: list[str] = []
    for filters in ({"prefix": topic}, {"source": f"{topic}.s0"}):
        query: dict[str, str | int] = {"page_size": 3, **filters}
        while True:
            page = ok(client.get("/v0/routers", params=query))
            assert all(one["forwarded_total"] == 0 for one in page["routers"])
            seen += [one["router"].removeprefix(f"{topic}.") for one in page["routers"]]
            if "next_cursor" not in page:
                break
            query["cursor"] = page["next_cursor"]
    assert seen == [*(f"r{at}" for at in range(7)), "r0", "r2", "r4", "r6"]
    refused(client.get("/v0/routers", params={"cursor": "x"}), 400, "invalid_request")


def test_delete_ends_forwarding_and_of_an_absent_one_is_200(client: httpx.Client, topic: str) -> None:
    def ends(name: str) -> bool:
        route(client, name, name, f"{name}.d")
        write(client, name, 1)
        gone = ok(client.delete(f"/v0/routers/{name}"))
        assert (gone["router"], gone["deleted"]) == (name, True)
        write(client, name, 2)
        if not in_time(gone):
            return False
        assert data(client, f"{name}.d") == [1]
        assert ok(client.delete(f"/v0/routers/{name}"))["deleted"] is False
        refused(client.get(f"/v0/routers/{name}"), 404, "router_not_found")
        return True

    undisturbed("a router to be deleted in time", topic, ends)


@pytest.mark.parametrize(
    "change",
    [
        {"source": None},
        {"dest": None},
        {"dest": "same"},
        {"dest": "no/topic"},
        {"source": ""},
        {"filter": ["tag", "Like", "x"]},
        {"filter": ["tag", "Glob", "x"]},
        {"filter": ["node", "Eq", "x"]},
        {"filter": 7},
        {"filter": "x" * 257},
        {"guarantee": "twice"},
        {"preserve_node": "yes"},
    ],
)
def test_what_is_not_a_router_is_400(client: httpx.Client, topic: str, change: dict[str, Any]) -> None:
    body = {"source": "same", "dest": f"{topic}.d"} | change
    body = {field: value for field, value in body.items() if value is not None}
    answer = refused(client.put(f"/v0/routers/{topic}", json=body), 400, "invalid_request")
    ((field, value),) = change.items()
    assert field in answer["message"]
    assert value is None or answer["detail"]["field"] == field
    refused(client.get(f"/v0/routers/{topic}"), 404, "router_not_found")
    missing(client, f"{topic}.d")


@pytest.mark.parametrize("name", ["-r", ">r", "r r", "r" * 256, "r%2Fr"])
def test_a_router_is_named_like_a_topic_or_with_a_greater_than(client: httpx.Client, topic: str, name: str) -> None:
    answer = client.put(f"/v0/routers/{name}", json={"source": topic, "dest": f"{topic}.d"})
    refused(answer, 400, "invalid_request")


def test_create_dest_false_and_no_dest_is_404_and_leaves_nothing(client: httpx.Client, topic: str) -> None:
    body = {"source": topic, "dest": f"{topic}.d", "create_dest": False}
    error = refused(client.put(f"/v0/routers/{topic}", json=body), 404, "topic_not_found")
    assert error["detail"] == {"topic": f"{topic}.d"}
    refused(client.get(f"/v0/routers/{topic}"), 404, "router_not_found")
    missing(client, f"{topic}.d")
    put(client, f"{topic}.d", cap_records=5)
    route(client, topic, topic, f"{topic}.d", create_dest=False)
    assert state(client, f"{topic}.d")["config"]["cap_records"] == 5


def test_the_source_may_come_later(client: httpx.Client, topic: str) -> None:
    put(client, f"{topic}.d")
    route(client, topic, topic, f"{topic}.d", create_dest=False)
    missing(client, topic)
    assert write(client, topic, 1, 2)["created"] is True
    assert data(client, f"{topic}.d") == [1, 2]


def test_both_ends_are_made_when_they_are_absent(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d")
    assert [state(client, name)["head_seq"] for name in (topic, f"{topic}.d")] == [0, 0]
    write(client, topic, 1)
    assert data(client, f"{topic}.d") == [1]


# --- what is forwarded


def test_what_is_committed_after_it_was_made(client: httpx.Client, topic: str) -> None:
    write(client, topic, "before")
    route(client, topic, topic, f"{topic}.d")
    write(client, topic, "after")
    assert data(client, f"{topic}.d") == ["after"]
    assert router(client, topic)["forwarded_total"] == 1


def test_in_the_order_of_the_source(client: httpx.Client, topic: str) -> None:
    dests = [f"{topic}.d{at}" for at in range(4)]
    for dest in dests:
        route(client, dest, topic, dest)
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda at: write(client, topic, *[[at, n] for n in range(5)]), range(40)))
    source = data(client, topic)
    assert len(source) == 200
    for dest in dests:
        assert data(client, dest) == source


def test_a_copy_has_its_own_seq_and_ts_and_the_very_bytes(client: httpx.Client, topic: str) -> None:
    write(client, f"{topic}.d", "own")
    route(client, topic, topic, f"{topic}.d")
    first_record = b'{"data": {"a":1.50,"a": [ 1e3 ]}, "tag":"t", "node":"n", "meta":{"k" : "v"}}'
    body = b'{"records":[' + first_record + b', {"data":"\\u00e9"}]}'
    ok(write_raw(client, topic, body))
    first, second = diff_records(client, f"{topic}.d", from_seq=1, include_tags=True)
    source = diff_records(client, topic, include_tags=True)
    assert (first.seq, second.seq) == (2, 3)
    assert first.ts >= source[0].ts
    assert (first.data, first.meta) == (b'{"a":1.50,"a": [ 1e3 ]}', b'{"k" : "v"}')
    assert (first.tag, first.node) == ("t", "n")
    assert (second.data, second.meta, second.tag, second.node) == (b'"\\u00e9"', None, None, None)


def test_node_and_tag_per_the_flags(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d", preserve_node=False)
    route(client, f"{topic}.2", topic, f"{topic}.e", preserve_tag=False)
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "node": "n", "tag": "t"}]}))
    (copy,) = diff_records(client, f"{topic}.d", include_tags=True)
    assert (copy.node, copy.tag) == (None, "t")
    (copy,) = diff_records(client, f"{topic}.e", include_tags=True)
    assert (copy.node, copy.tag) == ("n", None)
    assert data(client, f"{topic}.e", node="n") == []


@pytest.mark.parametrize(
    ("filter", "passed"),
    [
        (["tag", "Eq", "a"], [0]),
        (["tag", "Glob", "a*"], [0, 1]),
        ("a:*", [1]),
        ("b", [2]),
        ("*", [0, 1, 2]),
        ("none", []),
    ],
)
def test_a_filter_by_tag(client: httpx.Client, topic: str, filter: Any, passed: list[int]) -> None:
    route(client, topic, topic, f"{topic}.d", filter=filter)
    tags = ["a", "a:1", "b", None]
    records = [{"data": at} | ({} if tag is None else {"tag": tag}) for at, tag in enumerate(tags)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    assert data(client, f"{topic}.d") == passed
    assert router(client, topic)["filter"] == filter
    assert router(client, topic)["forwarded_total"] == len(passed)


def test_two_routers_of_one_source_into_one_dest(client: httpx.Client, topic: str) -> None:
    route(client, f"{topic}.1", topic, f"{topic}.d", filter="a")
    route(client, f"{topic}.2", topic, f"{topic}.d", filter="*")
    records = [{"data": 1, "tag": "a"}, {"data": 2, "tag": "b"}]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    assert data(client, f"{topic}.d") == [1, 1, 2]
    assert [router(client, f"{topic}.{at}")["forwarded_total"] for at in (1, 2)] == [1, 2]


def test_a_changed_router_applies_from_now_on(client: httpx.Client, topic: str) -> None:
    def applies(name: str) -> bool:
        route(client, name, name, f"{name}.d", filter="a")
        ok(client.post(f"/v0/topics/{name}", json={"records": [{"data": 1, "tag": "a"}, {"data": 2, "tag": "b"}]}))
        changed = route(client, name, name, f"{name}.d", filter="b")
        assert changed["created"] is False
        ok(client.post(f"/v0/topics/{name}", json={"records": [{"data": 3, "tag": "a"}, {"data": 4, "tag": "b"}]}))
        found, forwarded_total = data(client, f"{name}.d"), router(client, name)["forwarded_total"]
        led_on = route(client, name, name, f"{name}.e")
        write(client, name, 5)
        if not in_time(changed, led_on):
            return False
        assert (found, forwarded_total) == ([1, 4], 2)
        assert data(client, f"{name}.d") == [1, 4]
        assert data(client, f"{name}.e") == [5]
        assert router(client, name)["dest"] == f"{name}.e"
        return True

    undisturbed("a router to be changed in time", topic, applies)


def test_a_deleted_record_was_forwarded_and_its_copy_stays(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d")
    for at in range(20):
        write(client, topic, at)
        assert state(client, f"{topic}.d")["head_seq"] == at + 1
        ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": at + 2}))
    assert state(client, topic)["count"] == 0
    assert data(client, f"{topic}.d") == list(range(20))


def test_the_dest_decides_about_retention(client: httpx.Client, topic: str) -> None:
    put(client, f"{topic}.d", cap_records=2)
    route(client, topic, topic, f"{topic}.d")
    write(client, topic, *range(5))
    page = diff(client, f"{topic}.d")
    assert [record["data"] for record in page["records"]] == [3, 4]
    assert page["tombstone"]["reason"] == "cap"
    assert router(client, topic)["forwarded_total"] == 5
    assert state(client, topic)["count"] == 5


def test_a_full_reject_dest_holds_the_cursor_and_the_rest_follow(client: httpx.Client, topic: str) -> None:
    put(client, f"{topic}.d", cap_records=2, discard="reject")
    route(client, topic, topic, f"{topic}.d")
    write(client, topic, 1, 2, 3, 4)
    assert data(client, f"{topic}.d") == [1, 2]
    assert router(client, topic)["forwarded_total"] == 2
    ok(client.post(f"/v0/topics/{topic}.d/delete", json={"before_seq": 2}))
    assert data(client, f"{topic}.d") == [2, 3]
    assert router(client, topic)["forwarded_total"] == 3
    put(client, f"{topic}.d", cap_records=9, discard="reject")
    assert data(client, f"{topic}.d") == [2, 3, 4]
    assert diff(client, f"{topic}.d")["tombstone"] is None
    assert router(client, topic)["forwarded_total"] == 4


def test_a_source_that_expired_records_gives_a_source_trim_tombstone(client: httpx.Client, topic: str) -> None:
    put(client, topic, ttl_ms=150)
    put(client, f"{topic}.d", cap_records=1, discard="reject")
    write(client, f"{topic}.d", "full")
    route(client, topic, topic, f"{topic}.d")
    write(client, topic, 1, 2, 3)
    assert data(client, f"{topic}.d") == ["full"]  # found full: else the log would be read for what has expired
    poll("the source to expire", lambda: state(client, topic)["count"] == 0)
    put(client, topic, ttl_ms=0)  # what comes now stays until it is copied
    write(client, topic, "live")
    ok(client.post(f"/v0/topics/{topic}.d/delete", json={"before_seq": 2}))
    page = poll("the gap", lambda: (found := diff(client, f"{topic}.d", from_seq=1))["tombstone"] and found)
    tombstone = page["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("source_trim", 2, 4)
    assert tombstone["earliest_seq"] == 5
    assert [record["data"] for record in page["records"]] == ["live"]
    assert state(client, f"{topic}.d")["earliest_seq"] == 5


def test_a_source_that_evicted_records_gives_a_source_trim_tombstone(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=2)
    put(client, f"{topic}.d", cap_records=2, discard="reject")
    route(client, topic, topic, f"{topic}.d")
    write(client, topic, 0, 1)
    assert data(client, f"{topic}.d") == [0, 1]
    write(client, topic, 2, 3, 4, 5, 6)
    # What was not found full before there was room would copy all of them: the log has them still.
    assert data(client, f"{topic}.d") == [0, 1]
    put(client, f"{topic}.d", cap_records=9, discard="reject")
    first = diff(client, f"{topic}.d")
    assert ([record["data"] for record in first["records"]], first["tombstone"]) == ([0, 1], None)
    page = diff(client, f"{topic}.d", from_seq=first["next_from_seq"])
    tombstone = page["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("source_trim", 3, 5)
    if not page["records"]:
        page = diff(client, f"{topic}.d", from_seq=page["next_from_seq"])
    assert [(record["$seq"], record["data"]) for record in page["records"]] == [(6, 5), (7, 6)]


@pytest.mark.parametrize("durability", ["disk", "ephemeral"])
def test_what_was_deleted_while_it_waited_is_left_out(client: httpx.Client, topic: str, durability: str) -> None:
    dest = f"{topic}.d"
    put(client, topic, durability=durability)
    put(client, dest, cap_records=1, discard="reject")
    route(client, topic, topic, dest)

    def make_room() -> list[Any]:
        ok(client.post(f"/v0/topics/{dest}/delete", json={"before_seq": state(client, dest)["head_seq"] + 1}))
        return data(client, dest)

    write(client, topic, "first")
    assert data(client, dest) == ["first"]
    secret = [{"data": number, "tag": "secret"} for number in range(3)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": [*secret, {"data": "kept"}, *secret, {"data": "last"}]}))
    assert data(client, dest) == ["first"]
    assert ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "secret"}))["deleted"] == 6
    assert make_room() == ["kept"]
    assert make_room() == ["last"]
    write(client, topic, "before", "behind")
    assert data(client, dest) == ["last"]
    ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 11}))
    assert make_room() == ["behind"]
    # Nothing stands for what was deleted.
    read = diff(client, dest)
    assert (read["head_seq"], read["tombstone"]) == (4, None)
    assert router(client, topic)["forwarded_total"] == 4


@pytest.mark.long
@pytest.mark.parametrize("end", ["restart", "kill_shards", "kill_group"])
def test_what_was_deleted_while_it_waited_stays_out_whatever_ends(topic: str, end: str) -> None:
    with Service() as service:
        client, dests = service.client, [f"{topic}.d{at}" for at in range(3)]
        for dest in dests:
            put(client, dest, cap_records=3, discard="reject")
            route(client, dest, topic, dest)
        records = [{"data": at, "tag": "odd" if at % 2 else "even"} for at in range(9)]
        ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
        for dest in dests:
            assert data(client, dest) == [0, 1, 2]
        # 1 was copied before it was deleted: its copy is the dest's.
        ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "odd"}))
        if end == "kill_shards":
            for shard in range(service.shards):
                service.kill("walshard", shard)
        elif end == "restart":
            service.restart()
        else:
            service.kill_group()
            service.start()
        client = service.client
        for dest in dests:
            poll("the dest", lambda: client.get(f"/v0/topics/{dest}").status_code == 200)
            assert data(client, dest) == [0, 1, 2]
            put(client, dest, cap_records=9, discard="reject")
            assert data(client, dest) == [0, 1, 2, 4, 6, 8]
            assert diff(client, dest)["tombstone"] is None


@pytest.mark.parametrize("with_records", [True, False])
def test_what_waits_when_its_source_is_deleted_is_a_gap(client: httpx.Client, topic: str, with_records: bool) -> None:
    dest = f"{topic}.d"
    put(client, dest, cap_records=2, discard="reject")
    route(client, topic, topic, dest)
    write(client, topic, 1, 2, 3, 4, 5)
    assert data(client, dest) == [1, 2]
    if not with_records:
        # Room for two more, which are the last.
        ok(client.post(f"/v0/topics/{dest}/delete", json={"before_seq": 3}))
        assert data(client, dest) == [3, 4]
    ok(client.delete(f"/v0/topics/{topic}"))
    head_seq = 5
    page = diff(client, dest)
    assert [record["data"] for record in page["records"]] == ([1, 2] if with_records else [3, 4])
    first_lost_seq = page["records"][-1]["$seq"] + 1
    page = diff(client, dest, from_seq=page["next_from_seq"])
    tombstone = page["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == (
        "source_trim",
        first_lost_seq,
        head_seq,
    )
    assert (page["records"], page["head_seq"], page["caught_up"]) == ([], head_seq, True)
    put(client, dest, cap_records=9, discard="reject")
    assert write(client, dest, "own")["seqs"] == [head_seq + 1]


def test_what_a_dest_can_never_hold_is_a_gap_and_the_rest_follow(client: httpx.Client, topic: str) -> None:
    """The reason is not "full", which passes, but the one of record_too_large for a writer."""
    dest = f"{topic}.d"
    put(client, dest, cap_bytes=400, discard="reject")
    route(client, topic, topic, dest)
    refused(client.post(f"/v0/topics/{dest}", json={"records": [{"data": "x" * 500}]}), 400, "record_too_large")
    before = left_out(client)
    write(client, topic, "a", "x" * 500, "b")
    write(client, topic, "y" * 500)
    write(client, topic, "c")
    first = diff(client, dest)
    assert ([record["data"] for record in first["records"]], first["tombstone"]) == (["a"], None)
    second = diff(client, dest, from_seq=first["next_from_seq"])
    assert (second["tombstone"]["reason"], second["tombstone"]["gap_from"], second["tombstone"]["gap_to"]) == (
        *("cap", 2, 2),
    )
    seen = [(one["$seq"], one["data"]) for one in second["records"]]
    while not second["caught_up"]:
        second = diff(client, dest, from_seq=second["next_from_seq"])
        seen += [(one["$seq"], one["data"]) for one in second["records"]]
    assert seen == [(3, "b"), (5, "c")]
    assert router(client, topic)["forwarded_total"] == 3
    poll("the counter", lambda: left_out(client) - before == 2)
    ok(client.post(f"/v0/topics/{dest}/delete", json={"before_seq": 4}))
    assert state(client, dest)["earliest_seq"] == 5
    assert diff(client, dest)["tombstone"]["gap_to"] == 4


def test_what_a_dest_can_never_hold_comes_before_anything_it_holds(client: httpx.Client, topic: str) -> None:
    dest = f"{topic}.d"
    put(client, dest, cap_records=1, discard="reject")
    for name in ("1", "2"):
        route(client, f"{topic}.{name}", topic, dest, filter="both" if name == "2" else "*")
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "tag": "both"}, {"data": 2, "tag": "one"}]}))
    page = diff(client, dest)
    tombstone = page["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("cap", 1, 2)
    assert [(one["$seq"], one["data"]) for one in page["records"]] == [(3, 2)]
    assert [router(client, f"{topic}.{name}")["forwarded_total"] for name in ("1", "2")] == [1, 0]


def test_a_full_dest_still_holds_the_cursor_when_what_can_never_fit_comes_behind(
    client: httpx.Client, topic: str
) -> None:
    dest = f"{topic}.d"
    put(client, dest, cap_bytes=400, discard="reject")
    route(client, topic, topic, dest)
    write(client, topic, "a" * 150, "b" * 150, "x" * 500, "c")
    assert data(client, dest) == ["a" * 150]
    ok(client.post(f"/v0/topics/{dest}/delete", json={"before_seq": 2}))
    poll("the rest", lambda: state(client, dest)["head_seq"] == 4)
    page = diff(client, dest, from_seq=2)
    assert (page["tombstone"]["reason"], page["tombstone"]["gap_to"]) == ("cap", 3)
    assert data(client, dest, from_seq=3) == ["c"]


@pytest.mark.long
def test_a_read_that_could_not_be_brought_up_to_date_says_so() -> None:
    """The shard of the dest does not answer: the dest can be read as it is, and is not passed off as all there is."""
    source = next(f"s{n}" for n in range(100) if owner_shard(f"s{n}", 2) == 0)
    dest = next(f"d{n}" for n in range(100) if owner_shard(f"d{n}", 2) == 1)
    with Service(frontends=1) as service:
        client = service.client
        route(client, "r", source, dest)
        write(client, source, 1)
        assert data(client, dest) == [1]
        pid = service.pid_of("walshard", 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            write(client, source, 2)
            page = ok(client.post(f"/v0/topics/{dest}/diff", json={}))
            assert [one["data"] for one in page["records"]] == [1]
            assert page["performance"]["copies_pending"] is True
            assert ok(client.get(f"/v0/topics/{dest}"))["performance"]["copies_pending"] is True
            assert ok(client.get("/v0/routers/r"))["performance"]["copies_pending"] is True
            assert ok(client.get("/v0/topics", params={"prefix": dest}))["performance"]["copies_pending"] is True
            assert ok(client.get("/v0/routers"))["performance"]["copies_pending"] is True
            assert "copies_pending" not in diff(client, source)["performance"]
            assert "copies_pending" not in ok(client.get("/v0/topics", params={"prefix": source}))["performance"]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert data(client, dest) == [1, 2]
        os.kill(pid, signal.SIGSTOP)
        try:
            write(client, source, 3)
            ended = ok(client.delete("/v0/routers/r"))
            assert ended["deleted"] is True
            assert ended["performance"]["copies_pending"] is True, "who ends it hears that it had not copied everything"
        finally:
            os.kill(pid, signal.SIGCONT)


def test_exactly_once_writes_a_stable_key(client: httpx.Client, topic: str) -> None:
    route(client, f"{topic}>d", topic, f"{topic}.d", guarantee="exactly_once")
    route(client, f"{topic}>e", f"{topic}.d", f"{topic}.e", guarantee="exactly_once")
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "meta": {"k": "v"}}, {"data": 2}]}))
    first, second = diff(client, f"{topic}.d")["records"]
    origin = first["meta"]["_topics_router"]
    key = origin.pop("idempotency_key")
    assert origin == {"router": f"{topic}>d", "source_topic": topic, "source_seq": 1}
    assert first["meta"]["k"] == "v"
    assert set(second["meta"]) == {"_topics_router"}
    prefix = f"router:{topic}>d:"
    assert key.startswith(prefix)
    topic_id, epoch, seq = key.removeprefix(prefix).split(":")
    assert seq == "1"
    assert int(topic_id) > 0
    assert second["meta"]["_topics_router"]["idempotency_key"] == f"{prefix}{topic_id}:{epoch}:2"
    for at, record in enumerate(diff_records(client, f"{topic}.e"), 1):
        assert record.meta is not None
        assert record.meta.count(b"_topics_router") == 1
        meta = json.loads(record.meta)
        assert (meta["_topics_router"]["router"], meta["_topics_router"]["source_seq"]) == (f"{topic}>e", at)
        assert meta.get("k") == ("v" if at == 1 else None)
    assert diff(client, f"{topic}.d", include_meta=False)["records"][0].keys() == {"$seq", "$ts", "data"}


def test_clients_may_not_write_that_key(client: httpx.Client, topic: str) -> None:
    records = [{"data": 1, "meta": {"_topics_router": "x"}}]
    refused(client.post(f"/v0/topics/{topic}", json={"records": records}), 400, "invalid_request")
    missing(client, topic)


def test_direct_writes_interleave(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d")
    for at in range(10):
        write(client, topic, f"copy {at}")
        assert write(client, f"{topic}.d", f"own {at}", if_head_seq=state(client, f"{topic}.d")["head_seq"])
    assert data(client, f"{topic}.d") == [f"{whose} {at}" for at in range(10) for whose in ("copy", "own")]


@pytest.mark.long
@pytest.mark.parametrize("dest_class", ["ephemeral", "memory", "disk", "fsync"])
@pytest.mark.parametrize("source_class", ["ephemeral", "memory", "disk", "fsync"])
def test_between_all_classes(client: httpx.Client, topic: str, source_class: str, dest_class: str) -> None:
    put(client, topic, durability=source_class)
    put(client, f"{topic}.d", durability=dest_class)
    route(client, topic, topic, f"{topic}.d")
    for at in range(3):
        write(client, topic, at)
        assert data(client, f"{topic}.d") == list(range(at + 1))
    if dest_class == "ephemeral":
        return
    durable = poll("the copies to be durable", lambda: state(client, f"{topic}.d")["durable_seq"] == 3)
    assert durable


# --- reads catch up


def test_every_read_of_a_dest_catches_up(client: httpx.Client, topic: str) -> None:
    dest = f"{topic}.d"
    route(client, topic, topic, dest)
    for at in range(1, 41, 5):
        write(client, topic, at)
        assert diff(client, dest)["head_seq"] == at
        write(client, topic, at)
        assert state(client, dest)["head_seq"] == at + 1
        write(client, topic, at)
        watched = caught_up(lambda: client.post("/v0/watch", json={"topics": {dest: {"tail": True}}}))
        assert watched["topics"][dest]["from_seq"] == at + 2
        write(client, topic, at)
        (listed,) = caught_up(lambda: client.get("/v0/topics", params={"prefix": dest}))["topics"]
        assert listed["head_seq"] == at + 3
        write(client, topic, at)
        deleted = caught_up(lambda: client.post(f"/v0/topics/{dest}/delete", json={"before_seq": at + 5}))
        assert deleted["head_seq"] == at + 4
        assert router(client, topic)["forwarded_total"] == at + 4


def test_also_through_chains(client: httpx.Client, topic: str) -> None:
    names = [topic, *(f"{topic}.{at}" for at in range(5))]
    for source, dest in itertools.pairwise(names):
        route(client, dest, source, dest)
    for at in range(1, 30):
        write(client, topic, at)
        assert state(client, names[-1])["head_seq"] == at
    assert data(client, names[-1]) == list(range(1, 30))


def test_a_change_of_caps_is_behind_what_was_acknowledged_before_through_a_chain_too(
    client: httpx.Client, topic: str
) -> None:
    for at in range(10):
        source, between, dest = (f"{topic}.{at}.{name}" for name in "sab")
        route(client, f"{topic}.{at}.1", source, between)
        route(client, f"{topic}.{at}.2", between, dest)
        put(client, dest, cap_records=1)
        write(client, source, *range(5))
        answer = ok(client.put(f"/v0/topics/{dest}", json={"cap_records": 0}))
        page = diff(client, dest)
        if not in_time(answer):
            continue  # the machine is too busy, and the answer says so
        assert [one["$seq"] for one in page["records"]] == [5]
        assert page["tombstone"]["gap_to"] == 4


def test_watchers_of_a_dest_get_copies_that_nobody_asked_for(
    service: Service, client: httpx.Client, topic: str
) -> None:
    route(client, topic, topic, f"{topic}.d")
    route(client, f"{topic}.2", f"{topic}.d", f"{topic}.e")
    with follow(service, {f"{topic}.e": {}}) as stream:
        for at in range(20):
            write(client, topic, at)
        assert [record["data"] for record in stream.records(20)] == list(range(20))


def test_a_strong_watcher_gets_copies_once_they_are_durable(service: Service, client: httpx.Client, topic: str) -> None:
    put(client, topic, durability="fsync")
    route(client, topic, topic, f"{topic}.d")
    with follow(service, {f"{topic}.d": {}}, consistency="strong") as stream:
        write(client, topic, 1, 2)
        assert [record["data"] for record in stream.records(2)] == [1, 2]
    assert state(client, f"{topic}.d")["durable_seq"] == 2


def test_a_long_poll_ends_with_a_copy(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d")
    with ThreadPoolExecutor(1) as poller:
        waiting = poller.submit(data, client, f"{topic}.d", wait_ms=20_000)
        write(client, topic, "news")
        assert waiting.result(timeout=15) == ["news"]


# --- the graph


def test_a_dest_has_one_source(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d")
    body = {"source": f"{topic}.x", "dest": f"{topic}.d"}
    error = refused(client.put(f"/v0/routers/{topic}.2", json=body), 409, "topic_exists_incompatible")
    assert error["detail"]["reason"] == "router_dest_fan_in"
    refused(client.get(f"/v0/routers/{topic}.2"), 404, "router_not_found")
    missing(client, f"{topic}.x")


def test_a_cycle_is_refused_with_its_path(client: httpx.Client, topic: str) -> None:
    a, b, c = (f"{topic}.{name}" for name in "abc")
    route(client, f"{topic}>1", a, b)
    body = {"source": b, "dest": a}
    error = refused(client.put(f"/v0/routers/{topic}>2", json=body), 409, "router_cycle")
    assert error["detail"]["cycle"] == [b, a, b]
    refused(client.get(f"/v0/routers/{topic}>2"), 404, "router_not_found")
    route(client, f"{topic}>2", b, c)
    error = refused(client.put(f"/v0/routers/{topic}>3", json={"source": c, "dest": a}), 409, "router_cycle")
    assert error["detail"]["cycle"] == [c, a, b, c]


def test_a_cycle_that_is_allowed_ends(client: httpx.Client, topic: str) -> None:
    a, b = f"{topic}.a", f"{topic}.b"
    route(client, f"{topic}>1", a, b, allow_cycle=True)
    route(client, f"{topic}>2", b, a, allow_cycle=True)
    # The same edge again is never a cycle, whatever it says.
    route(client, f"{topic}>2", b, a)
    route(client, f"{topic}>2", b, a, allow_cycle=True)
    write(client, a, "x")
    heads = poll_settled(client, a, b)
    assert all(2 <= head <= 16 for head in heads), heads
    assert data(client, a) == ["x"] * heads[0]
    write(client, b, "y")
    later = poll_settled(client, a, b)
    assert all(head < after <= head + 16 for head, after in zip(heads, later, strict=True)), (heads, later)


def poll_settled(client: httpx.Client, *topics: str) -> list[int]:
    """Heads that have not changed over a second read, each of which catches up by one round."""
    seen: list[list[int]] = []

    def same() -> bool:
        seen.append([state(client, topic)["head_seq"] for topic in topics])
        return len(seen) > 20 and seen[-1] == seen[-20]

    poll("the cycle to end", same, 30.0)
    return seen[-1]


def test_creations_at_once_never_make_a_cycle_or_a_second_source(client: httpx.Client, topic: str) -> None:
    names = [f"{topic}.{at}" for at in range(4)]
    edges = [(a, b) for a in names for b in names if a != b]
    with ThreadPoolExecutor(8) as clients:
        answers = list(
            clients.map(
                lambda edge: client.put(
                    f"/v0/routers/{topic}>{edge[0][-1]}{edge[1][-1]}", json={"source": edge[0], "dest": edge[1]}
                ),
                edges,
            )
        )
    made = {edge for edge, answer in zip(edges, answers, strict=True) if answer.status_code == 201}
    for answer in answers:
        if answer.status_code != 201:
            assert answer.json()["error"]["code"] in ("router_cycle", "topic_exists_incompatible"), answer.text
    assert made
    sources = {dest: source for source, dest in made}
    assert len(sources) == len(made), "a dest with two sources"
    for start in sources:
        path, at = [start], start
        while at in sources:
            at = sources[at]
            assert at not in path, "a cycle"
            path.append(at)
    listed = ok(client.get("/v0/routers", params={"prefix": topic}))["routers"]
    assert {(one["source"], one["dest"]) for one in listed} == made


# --- topics that go


def test_deleting_a_topic_removes_its_routers(client: httpx.Client, topic: str) -> None:
    def removes(name: str) -> bool:
        route(client, f"{name}>1", name, f"{name}.d")
        route(client, f"{name}>2", f"{name}.d", f"{name}.e")
        route(client, f"{name}>3", f"{name}.e", f"{name}.f")
        write(client, name, 1)
        gone = ok(client.delete(f"/v0/topics/{name}.d"))
        assert gone["routers_removed"] == [f"{name}>1", f"{name}>2"]
        for at in (1, 2):
            refused(client.get(f"/v0/routers/{name}>{at}"), 404, "router_not_found")
        forwarded = data(client, f"{name}.f")
        write(client, f"{name}.d", "new")
        write(client, name, 2)
        assert data(client, f"{name}.d") == ["new"]
        if not in_time(gone):
            return False
        assert forwarded == [1], "what was acknowledged before is forwarded"
        assert data(client, f"{name}.e") == [1]
        assert ok(client.delete(f"/v0/topics/{name}.d"))["routers_removed"] == []
        return True

    undisturbed("a topic to be deleted in time", topic, removes)


def test_a_topic_that_is_not_empty_keeps_its_routers(client: httpx.Client, topic: str) -> None:
    route(client, topic, topic, f"{topic}.d")
    write(client, topic, 1)
    refused(client.delete(f"/v0/topics/{topic}.d", params={"if_empty": "true"}), 409, "topic_not_empty")
    write(client, topic, 2)
    assert data(client, f"{topic}.d") == [1, 2]


# --- limits and rights


@pytest.mark.long
def test_a_router_refused_for_the_cap_creates_no_topic() -> None:
    with Service(env={"TOPICS_MAX_ROUTERS": "2"}) as service:
        client = service.client
        for at in range(2):
            route(client, f"r{at}", "s", f"d{at}")
        error = refused(client.put("/v0/routers/r2", json={"source": "s", "dest": "d2"}), 429, "throttled")
        assert error["detail"] == {"limit": "max_routers", "max": 2}
        missing(client, "d2")
        assert route(client, "r1", "s", "d1", filter="x")["created"] is False
        ok(client.delete("/v0/routers/r0"))
        assert route(client, "r2", "s", "d2")["created"] is True
        metrics = ok(client.get("/v0/metrics", headers={"Accept": "application/json"}))
        assert metrics["topics_routers"] == service.status()["routers"] == 2


def test_a_topic_gets_copies_by_256_routers_at_most(client: httpx.Client, topic: str) -> None:
    for at in range(256):
        route(client, f"{topic}.{at}", topic, f"{topic}.d", filter=f"{at}")
    body = {"source": topic, "dest": f"{topic}.d", "filter": "more"}
    error = refused(client.put(f"/v0/routers/{topic}.more", json=body), 429, "throttled")
    assert error["detail"] == {"limit": "dest_routers", "max": 256}
    assert route(client, f"{topic}.255", topic, f"{topic}.d", filter="more")["created"] is False
    records = [{"data": at, "tag": tag} for at, tag in enumerate(("more", "0", "255"), 1)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    assert data(client, f"{topic}.d") == [1, 2]


def test_a_dest_refused_for_the_cap_leaves_no_router() -> None:
    with Service(env={"TOPICS_MAX_TOPICS": "1"}) as service:
        client = service.client
        put(client, "s")
        error = refused(client.put("/v0/routers/r", json={"source": "s", "dest": "d"}), 429, "throttled")
        assert error["detail"] == {"limit": "max_topics", "max": 1}
        refused(client.get("/v0/routers/r"), 404, "router_not_found")


def test_a_key_covers_router_source_and_dest() -> None:
    with Service(env={"TOPICS_API_KEYS": "all,in:rw+delete+admin:in."}) as service:
        root, inside = (
            httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {key}"}, timeout=20)
            for key in ("all", "in")
        )
        with root, inside:
            route(root, "in.r", "out.s", "in.d")
            route(root, "in.q", "in.s", "in.e")
            for source, dest in (("in.s", "out.d"), ("out.s", "in.d2")):
                body = {"source": source, "dest": dest}
                refused(inside.put("/v0/routers/in.new", json=body), 403, "forbidden")
            refused(inside.put("/v0/routers/out.new", json={"source": "in.s", "dest": "in.f"}), 403, "forbidden")
            refused(inside.put("/v0/routers/in.r", json={"source": "in.s", "dest": "in.d"}), 403, "forbidden")
            refused(inside.get("/v0/routers/in.r"), 403, "forbidden")
            refused(inside.delete("/v0/routers/in.r"), 403, "forbidden")
            assert [one["router"] for one in ok(inside.get("/v0/routers"))["routers"]] == ["in.q"]
            assert ok(inside.delete("/v0/routers/in.q"))["deleted"] is True
