"""api §1, §3.2, §3.3: what caps and ttl take, when, and how it is said."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, missing, ok, put, refused, state, write
from tests.contract.timing import now_ms, undisturbed, until_ms
from tests.harness import Service, poll

FRAME_BYTES = 46
"""Bytes of a record beside its data and their key (docs/storage-format.md), for sums that leave room."""


def gap(page: dict[str, Any]) -> tuple[str, int, int] | None:
    found = page["tombstone"]
    return None if found is None else (found["reason"], found["gap_from"], found["gap_to"])


def seqs(page: dict[str, Any]) -> list[int]:
    return [record["$seq"] for record in page["records"]]


# --- caps


def test_a_cap_of_three_and_five_writes(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=3)
    for number in range(5):
        write(client, topic, number)
    answer = state(client, topic)
    assert (answer["earliest_seq"], answer["count"]) == (3, 3)
    read = diff(client, topic)
    assert read["tombstone"] == {
        "gap_from": 1,
        "gap_to": 2,
        "reason": "cap",
        "missed_estimate": 2,
        "earliest_seq": 3,
        "head_seq": 5,
    }
    assert [record["$seq"] for record in read["records"]] == [3, 4, 5]
    assert diff(client, topic, from_seq=2)["tombstone"] is None


def test_expiry_shows_without_a_write(client: httpx.Client, topic: str) -> None:
    put(client, topic, ttl_ms=150)
    write(client, topic, 1, 2, 3)
    poll("the records to expire", lambda: state(client, topic)["count"] == 0)
    answer = state(client, topic)
    assert (answer["count"], answer["bytes"], answer["earliest_seq"]) == (0, 0, 4)
    put(client, topic, ttl_ms=0)  # the next one stays, however late it is looked at
    write(client, topic, 4)
    assert gap(diff(client, topic)) == ("ttl", 1, 3)


def test_a_reject_topic_refuses_before_any_seq_is_given(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=2, discard="reject")
    write(client, topic, 1, 2)
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 3}]}), 422, "topic_full")
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 0}] * 3}), 400, "record_too_large")
    ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 2}))
    assert write(client, topic, 3)["first_seq"] == 3


def test_a_batch_larger_than_what_is_left_takes_the_oldest(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=4)
    write(client, topic, 1, 2, 3)
    assert write(client, topic, 4, 5, 6)["seqs"] == [4, 5, 6]
    page = diff(client, topic)
    assert (gap(page), seqs(page)) == (("cap", 1, 2), [3, 4, 5, 6])


def test_a_batch_larger_than_the_cap_keeps_its_last_ones(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=2)
    write(client, topic, 0)
    assert write(client, topic, 1, 2, 3, 4)["seqs"] == [2, 3, 4, 5]
    page = diff(client, topic)
    assert (gap(page), seqs(page)) == (("cap", 1, 3), [4, 5])
    assert state(client, topic)["count"] == 2


def test_cap_bytes_counts_data_meta_and_framing(client: httpx.Client, topic: str) -> None:
    probe = f"{topic}.probe"
    write(client, probe, "x" * 100)
    one_bytes = state(client, probe)["bytes"]
    assert 100 < one_bytes <= 102 + FRAME_BYTES + len('"data":')
    put(client, topic, cap_bytes=3 * one_bytes)
    for _ in range(3):
        write(client, topic, "x" * 100)
    assert (gap(diff(client, topic)), state(client, topic)["bytes"]) == (None, 3 * one_bytes)
    write(client, topic, "x" * 101)
    page = diff(client, topic)
    assert (gap(page), seqs(page)) == (("cap", 1, 2), [3, 4])
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "meta": {"k": "v" * 300}}]}))
    assert state(client, topic)["bytes"] <= 3 * one_bytes


def test_whichever_cap_is_hit_first(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=10, cap_bytes=400)
    for _ in range(8):
        write(client, topic, "x" * 100)
    assert state(client, topic)["count"] == 2
    put(client, topic, cap_records=1, cap_bytes=400)
    assert state(client, topic)["count"] == 1


def test_a_reject_topic_refuses_by_its_bytes_too(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_bytes=400, discard="reject")
    write(client, topic, "x" * 200)
    error = refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": "x" * 200}]}), 422, "topic_full")
    assert error["detail"] == {"cap_bytes": 400}
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": "x" * 500}]}), 400, "record_too_large")
    assert state(client, topic)["head_seq"] == 1


def test_a_tightened_cap_takes_what_is_stored(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(5))
    put(client, topic, cap_records=2)
    page = diff(client, topic)
    assert (gap(page), seqs(page), state(client, topic)["count"]) == (("cap", 1, 3), [4, 5], 2)
    put(client, topic)
    assert gap(diff(client, topic)) == ("cap", 1, 3), "a wider cap brings nothing back"


def test_a_record_that_a_cap_took_was_given_a_seq_all_the_same(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_bytes=50)
    assert write(client, topic, "x" * 200)["seqs"] == [1]
    answer = state(client, topic)
    assert (answer["head_seq"], answer["earliest_seq"], answer["count"], answer["bytes"]) == (1, 2, 0, 0)
    assert gap(diff(client, topic)) == ("cap", 1, 1)


# --- ttl


def test_a_tightened_ttl_takes_what_is_stored(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1, 2)
    put(client, topic, ttl_ms=1)
    page = poll("the records to expire", lambda: (found := diff(client, topic))["tombstone"] and found)
    assert (gap(page), page["records"], page["earliest_seq"]) == (("ttl", 1, 2), [], 3)


@pytest.mark.parametrize("ttl_ms", [0, 86_400_000])
def test_a_longer_ttl_brings_nothing_back(client: httpx.Client, topic: str, ttl_ms: int) -> None:
    names = [f"{topic}.{number}" for number in range(8)]
    for name in names:
        put(client, name, ttl_ms=100)
        write(client, name, 1, 2, 3)
    for name in names:
        # A diff tells nobody else: what it saw is not in the log when the new configuration comes.
        poll("the records to expire", lambda: diff(client, name)["earliest_seq"] == 4)
        put(client, name, ttl_ms=ttl_ms)
        page = diff(client, name)
        assert (gap(page), page["earliest_seq"], page["records"]) == (("ttl", 1, 3), 4, []), name
        answer = state(client, name)
        assert (answer["earliest_seq"], answer["count"], answer["bytes"]) == (4, 0, 0)


def test_a_gap_of_both_kinds_is_mixed(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=3)
    write(client, topic, *range(5))
    assert gap(diff(client, topic)) == ("cap", 1, 2)
    put(client, topic, cap_records=3, ttl_ms=1)
    poll("the rest to expire", lambda: state(client, topic)["count"] == 0)
    assert gap(diff(client, topic)) == ("mixed", 1, 5)
    assert gap(diff(client, topic, from_seq=3)) == ("ttl", 4, 5)


def write_and_outlive(client: httpx.Client, topic: str, ttl_ms: int) -> None:
    """Two records whose time is over, of which the service has not been asked since."""
    write(client, topic, 1, 2)
    until_ms(now_ms() + ttl_ms + 5)


@pytest.mark.parametrize("attempt", range(4))  # the shard's own sweep, once a second, may be first
def test_what_has_expired_takes_no_room(client: httpx.Client, topic: str, attempt: int) -> None:
    """Floors are exact at every answer, also that to a write: nobody has read since."""
    for name, cap in ((f"{topic}.{attempt}r", {"cap_records": 2}), (f"{topic}.{attempt}b", {"cap_bytes": 130})):
        put(client, name, discard="reject", ttl_ms=100, **cap)
        write_and_outlive(client, name, 100)
        assert write(client, name, 3)["seqs"] == [3]

    def staged(name: str) -> bool:
        put(client, name, discard="reject", ttl_ms=100, cap_records=2)
        write_and_outlive(client, name, 100)
        asked_ms = now_ms()
        answer = client.post(f"/v0/stage/{name}", json={"txn": "t", "records": [{"data": 3}]})
        if answer.status_code == 422 and now_ms() >= asked_ms + 200:
            return False  # a frontend waits 250 ms for the shard to evict, then goes by what that has said before
        assert ok(answer)["count"] == 1
        return True

    undisturbed("a stage that its shard hears of in time", topic, staged)


@pytest.mark.parametrize(
    ("cap_records", "count", "gaps"),
    [(3, 5, [("mixed", 1, 4), ("mixed", 2, 4), ("cap", 3, 4)]), (2, 2, [("ttl", 1, 2), ("ttl", 2, 2), None])],
)
@pytest.mark.parametrize("attempt", range(4))
def test_a_cap_takes_nothing_that_had_expired(
    client: httpx.Client, topic: str, attempt: int, cap_records: int, count: int, gaps: list[Any]
) -> None:
    def in_time(name: str) -> bool:
        put(client, name, ttl_ms=100, cap_records=cap_records)
        write_and_outlive(client, name, 100)
        written_ms = now_ms()
        write(client, name, *range(count))
        told = [gap(diff(client, name, from_seq=cursor)) for cursor in range(3)]
        if now_ms() > written_ms + 100:
            return False  # the new ones may have expired, too
        assert told == gaps
        return True

    undisturbed("the gaps, before anything else expires", topic, in_time)


# --- floors and tombstones


def test_a_gap_made_of_deletions_is_silent(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(6))
    ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 4}))
    page = diff(client, topic)
    assert (gap(page), page["earliest_seq"], seqs(page)) == (None, 4, [4, 5, 6])


def test_deletions_do_not_make_a_later_gap_longer_than_what_was_lost(client: httpx.Client, topic: str) -> None:
    """Popping slots that were deleted does not move evict_floor."""
    put(client, topic, cap_records=3)
    write(client, topic, 1, 2, 3)
    ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 3}))
    write(client, topic, 4, 5)
    assert gap(diff(client, topic)) is None, "nobody lost anything: two were deleted, three live"
    write(client, topic, 6)
    assert gap(diff(client, topic)) == ("cap", 1, 3)


def test_reading_goes_on_behind_the_gap_and_is_told_once(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=3)
    write(client, topic, *range(9))
    page = diff(client, topic, limit=1)
    assert (gap(page), page["tombstone"]["missed_estimate"], seqs(page)) == (("cap", 1, 6), 6, [7])
    page = diff(client, topic, from_seq=page["next_from_seq"])
    assert (gap(page), seqs(page)) == (None, [8, 9])


def test_where_a_cursor_must_be_to_have_lost_something(client: httpx.Client, topic: str) -> None:
    """Iff from_seq + 1 < evict_floor."""
    put(client, topic, cap_records=2)
    write(client, topic, *range(6))
    assert [gap(diff(client, topic, from_seq=n)) for n in range(7)] == [
        *(("cap", n, 4) for n in (1, 2, 3, 4)),
        *(None, None, None),
    ]


def test_who_begins_at_a_time_is_told_of_what_may_be_as_late(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=2)
    for n in range(6):
        write(client, topic, n)
        until_ms(now_ms() + 2)
    stamps = [record["$ts"] for record in diff(client, topic)["records"]]
    for from_ts in (0, stamps[0] - 1, stamps[0]):
        page = diff(client, topic, from_ts=from_ts)
        assert (gap(page), seqs(page)) == (("cap", 1, 4), [5, 6])
        resolved = ok(client.post("/v0/watch", json={"topics": {topic: {"from_ts": from_ts}}}))["topics"][topic]
        assert resolved["from_seq"] == 0
    page = diff(client, topic, from_ts=stamps[0] + 1)
    assert (gap(page), seqs(page)) == (None, [6])


def test_earliest_never_decreases(client: httpx.Client, topic: str) -> None:
    put(client, topic, cap_records=2)
    seen = []
    for n in range(12):
        write(client, topic, n)
        if n % 4 == 3:
            ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": n}))
        if n == 8:
            put(client, topic, cap_records=100)
        seen.append(state(client, topic)["earliest_seq"])
    assert seen == sorted(seen)
    assert all(earliest <= n + 2 for n, earliest in enumerate(seen))


@pytest.mark.long
@pytest.mark.parametrize("end", ["restart", "kill_group"])
def test_floors_and_reasons_outlive_restarts(end: str) -> None:
    with Service() as own:
        client = own.client
        put(client, "capped", cap_records=2)
        write(client, "capped", *range(5))
        put(client, "rejecting", cap_records=2, discard="reject")
        write(client, "rejecting", 1, 2)
        put(client, "aged", ttl_ms=1)
        write(client, "aged", 1, 2)
        poll("the records to expire", lambda: state(client, "aged")["count"] == 0)
        before = [(gap(diff(client, name)), state(client, name)["earliest_seq"]) for name in ("capped", "aged")]
        assert before == [(("cap", 1, 3), 4), (("ttl", 1, 2), 3)]
        last_ts = {name: state(client, name)["last_write_ts"] for name in ("capped", "aged")}
        own.kill_group() if end == "kill_group" else None
        own.restart()
        client = own.client
        assert [(gap(diff(client, name)), state(client, name)["earliest_seq"]) for name in ("capped", "aged")] == before
        for name, ts in last_ts.items():
            found = [gap(diff(client, name, from_ts=from_ts)) for from_ts in (0, ts, ts + 1)]
            assert found == [gap(diff(client, name))] * 2 + [None]
        refused(client.post("/v0/topics/rejecting", json={"records": [{"data": 3}]}), 422, "topic_full")
        assert write(client, "capped", "next")["first_seq"] == 6


# --- auto_create


def test_a_write_whose_configuration_forbids_it_creates_nothing(client: httpx.Client, topic: str) -> None:
    body = {"records": [{"data": 1}], "config": {"auto_create": False}}
    refused(client.post(f"/v0/topics/{topic}", json=body), 404, "topic_not_found")
    missing(client, topic)
    put(client, topic, auto_create=False)
    assert write(client, topic, 1)["created"] is False
