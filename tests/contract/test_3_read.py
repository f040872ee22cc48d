"""api §3: diff, its paging, its limits, its long poll."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, diff_records, missing, ok, put, refused, state, write
from tests.harness import Service, poll

MIB = 1 << 20


def seqs(body: dict[str, Any]) -> list[int]:
    return [record["$seq"] for record in body["records"]]


# --- the answer


def test_the_answer_of_an_empty_topic(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    body = diff(client, topic)
    expected = {"topic": topic, "records": [], "next_from_seq": 0, "head_seq": 0, "earliest_seq": 1, "lag": 0}
    assert {key: body[key] for key in expected} == expected
    assert body["caught_up"] is True
    assert body["tombstone"] is None
    assert body["durable_seq"] == 0
    assert set(body) >= {*expected, "caught_up", "tombstone", "durable_seq", "performance"}


def test_the_answer_of_a_page(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(10))
    body = diff(client, topic, from_seq=2, limit=3)
    assert seqs(body) == [3, 4, 5]
    assert (body["next_from_seq"], body["head_seq"], body["earliest_seq"], body["lag"]) == (5, 10, 1, 5)
    assert body["caught_up"] is False
    assert diff(client, topic, from_seq=5)["caught_up"] is True


def test_from_seq_is_an_exclusive_lower_bound(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(3))
    assert [seqs(diff(client, topic, from_seq=n)) for n in range(4)] == [[1, 2, 3], [2, 3], [3], []]


def test_a_cursor_at_the_head_gets_nothing_and_no_tombstone(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(3))
    body = diff(client, topic, from_seq=3)
    assert (body["records"], body["tombstone"], body["caught_up"], body["lag"]) == ([], None, True, 0)


def test_a_cursor_that_nobody_was_given_counts_as_the_head(client: httpx.Client, topic: str) -> None:
    """Beyond the head of a topic whose name never had another: no gap, and `next_from_seq` puts it right."""
    write(client, topic, *range(3))
    body = diff(client, topic, from_seq=1000)
    assert (body["records"], body["tombstone"], body["next_from_seq"], body["caught_up"]) == ([], None, 3, True)


def test_diff_never_creates(client: httpx.Client, topic: str) -> None:
    refused(client.post(f"/v0/topics/{topic}/diff", json={}), 404, "topic_not_found")
    missing(client, topic)


def test_diff_is_a_read(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    assert state(client, topic)["last_read_ts"] is None
    diff(client, topic)
    # Read recency crosses processes by shared memory, best effort.
    poll("the read to be seen", lambda: state(client, topic)["last_read_ts"] is not None)


# --- limits


@pytest.mark.parametrize(
    ("limit", "delivered"),
    [(None, 256), (0, 256), (1, 1), (256, 256), (257, 257), (1000, 1000), (5000, 1000), (2**64 - 1, 1000)],
)
def test_limit(client: httpx.Client, topic: str, limit: int | None, delivered: int) -> None:
    write(client, topic, *range(1200))
    body = diff(client, topic, **({} if limit is None else {"limit": limit}))
    assert seqs(body) == list(range(1, delivered + 1))
    assert body["next_from_seq"] == delivered


def test_paging_reads_everything_once(client: httpx.Client, topic: str) -> None:
    for start in range(0, 1000, 40):
        write(client, topic, *range(start, start + 40))
    got: list[int] = []
    cursor = 0
    while True:
        body = diff(client, topic, from_seq=cursor, limit=37)
        got += [record["data"] for record in body["records"]]
        cursor = body["next_from_seq"]
        if body["caught_up"]:
            break
    assert got == list(range(1000))


def test_max_batch_bytes_bounds_a_page_but_for_its_first_record(client: httpx.Client, topic: str) -> None:
    write(client, topic, *["x" * 1000] * 10)
    assert seqs(diff(client, topic, max_batch_bytes=1)) == [1]
    some = seqs(diff(client, topic, max_batch_bytes=5000))
    assert some == list(range(1, len(some) + 1))
    assert 3 <= len(some) <= 5
    for ample in (0, 100_000, 2**64 - 1):
        assert len(seqs(diff(client, topic, max_batch_bytes=ample))) == 10


def test_max_batch_bytes_is_1_mib_by_default_and_8_mib_at_most(client: httpx.Client, topic: str) -> None:
    for _ in range(20):
        write(client, topic, "x" * 600_000)
    assert seqs(diff(client, topic)) == [1]
    assert seqs(diff(client, topic, max_batch_bytes=0)) == [1]
    assert 10 <= len(seqs(diff(client, topic, max_batch_bytes=1 << 40))) <= 13
    body = diff(client, topic, from_seq=19)
    assert (seqs(body), body["caught_up"]) == ([20], True)


# --- what a record shows


def test_include_flags(client: httpx.Client, topic: str) -> None:
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, "tag": "t", "meta": {"k": "v"}}]}))

    def keys(**flags: bool) -> set[str]:
        return set(diff(client, topic, **flags)["records"][0])

    assert keys() == {"$seq", "$ts", "data", "meta"}
    assert keys(include_tags=True) == {"$seq", "$ts", "data", "meta", "$tag"}
    assert keys(include_meta=False) == {"$seq", "$ts", "data"}
    assert keys(include_tags=True, include_meta=False) == {"$seq", "$ts", "data", "$tag"}


def test_meta_is_left_out_exactly(client: httpx.Client, topic: str) -> None:
    data = '{"meta":{"k":"v"},"a":"\\",\\"meta\\":{"}'
    body = '{"records":[{"data":' + data + ',"meta":{"m":"},\\"data\\":"}}]}'
    client.post(f"/v0/topics/{topic}", content=body.encode(), headers={"Content-Type": "application/json"})
    for include_meta in (True, False):
        record = diff_records(client, topic, include_meta=include_meta)[0]
        assert record.data == data.encode()
        assert (record.meta is not None) == include_meta


@pytest.mark.parametrize("flag", ["include_tags", "include_meta"])
@pytest.mark.parametrize("value", [1, "true", None])
def test_flags_are_booleans(client: httpx.Client, topic: str, flag: str, value: Any) -> None:
    put(client, topic)
    error = refused(client.post(f"/v0/topics/{topic}/diff", json={flag: value}), 400, "invalid_request")
    assert flag in error["message"]


# --- from_ts


def test_from_ts_starts_at_the_first_record_that_is_as_late(client: httpx.Client, topic: str) -> None:
    for n in range(4):
        write(client, topic, n)
        let_a_ms_pass(client, topic)
    stamps = [record["$ts"] for record in diff(client, topic)["records"]]
    for index, stamp in enumerate(stamps):
        assert seqs(diff(client, topic, from_ts=stamp)) == list(range(index + 1, 5))
        assert seqs(diff(client, topic, from_ts=stamp + 1)) == list(range(index + 2, 5))
    assert seqs(diff(client, topic, from_ts=0)) == [1, 2, 3, 4]
    body = diff(client, topic, from_ts=stamps[-1] + 1)
    assert (body["caught_up"], body["next_from_seq"], body["tombstone"]) == (True, 4, None)


def let_a_ms_pass(client: httpx.Client, topic: str) -> None:
    """Returns when the service's clock, as a second topic's records show it, is past the last record of `topic`."""
    last_ts = state(client, topic)["last_write_ts"]
    clock = f"{topic}.clock"
    poll("the clock to move on", lambda: write(client, clock, 0) and state(client, clock)["last_write_ts"] > last_ts)


def test_from_ts_with_a_limit(client: httpx.Client, topic: str) -> None:
    write(client, topic, *range(10))
    stamp = diff(client, topic)["records"][0]["$ts"]
    assert seqs(diff(client, topic, from_ts=stamp, limit=2)) == [1, 2]


def test_a_long_poll_from_a_ts_yet_to_come_waits_for_it(service: Service, topic: str) -> None:
    """It starts at the first record with $ts >= from_ts: those before it, written while it waits, are not that."""
    for attempt in range(3):
        name = f"{topic}.{attempt}"
        write(service.client, name, "long ago")
        from_ts = state(service.client, name)["last_write_ts"] + 300
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.url, timeout=35) as own:
            waiting = pool.submit(diff, own, name, from_ts=from_ts, wait_ms=20_000)
            while write(service.client, name, "meanwhile") and state(service.client, name)["last_write_ts"] < from_ts:
                pass
            delivered = waiting.result()["records"]
        assert min(record["$ts"] for record in delivered) >= from_ts


# --- long poll


def test_a_long_poll_returns_when_a_record_comes(service: Service, topic: str) -> None:
    put(service.client, topic)
    waited_ms: list[float] = []
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.url, timeout=35) as own:
        for n in range(20):
            waiting = pool.submit(diff, own, topic, from_seq=n, wait_ms=20_000)
            write(service.client, topic, n)
            body = waiting.result()
            assert seqs(body) == [n + 1]
            assert body["caught_up"] is True
            waited_ms.append(body["performance"]["server_total_ms"])
    # By the server's own clock: nobody sat until the deadline.
    assert max(waited_ms) < 15_000


def test_a_long_poll_at_its_deadline_answers_the_caught_up_shape(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    body = diff(client, topic, from_seq=1, wait_ms=120)
    assert body["performance"]["server_total_ms"] >= 100
    expected = {"records": [], "next_from_seq": 1, "head_seq": 1, "earliest_seq": 1, "lag": 0, "tombstone": None}
    assert {key: body[key] for key in expected} == expected
    assert body["caught_up"] is True


def test_every_long_poll_ends_at_its_deadline(service: Service, topic: str) -> None:
    """No long poll waits for ever. Some did, when the loop's clock was a rounding error before their deadline."""
    write(service.client, topic, 1)

    def wait(_: int) -> list[bool]:
        with httpx.Client(base_url=service.url, timeout=15) as own:
            return [diff(own, topic, from_seq=1, wait_ms=wait_ms)["caught_up"] for wait_ms in range(1, 60)]

    with ThreadPoolExecutor(4) as pool:
        assert all(all(ended) for ended in pool.map(wait, range(4)))


def test_a_long_poll_with_something_to_deliver_does_not_wait(client: httpx.Client, topic: str) -> None:
    write(client, topic, 1)
    body = diff(client, topic, wait_ms=2**63)
    assert seqs(body) == [1]
    assert body["performance"]["server_total_ms"] < 15_000


def test_a_long_poll_is_not_ended_by_filtered_records(service: Service, topic: str) -> None:
    put(service.client, topic)
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=service.url, timeout=35) as own:
        waiting = pool.submit(diff, own, topic, wait_ms=20_000, node="me")
        for n in range(5):
            write(service.client, topic, n, node="me")
        write(service.client, topic, "for me", node="other")
        body = waiting.result()
        assert [record["data"] for record in body["records"]] == ["for me"]
        filtered = diff(own, topic, from_seq=0, wait_ms=50, node=["me", "other"])
    assert filtered["records"] == []
    assert (filtered["next_from_seq"], filtered["caught_up"]) == (6, True)


def test_many_long_polls_on_many_topics(service: Service, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(12)]
    for name in names:
        put(service.client, name)

    def wait(name: str) -> dict[str, Any]:
        with httpx.Client(base_url=service.url, timeout=35) as own:
            return diff(own, name, wait_ms=20_000)

    with ThreadPoolExecutor(len(names)) as pool:
        waiting = {name: pool.submit(wait, name) for name in names}
        for name in names:
            write(service.client, name, name)
        assert {name: [r["data"] for r in future.result()["records"]] for name, future in waiting.items()} == {
            name: [name] for name in names
        }


# --- depth


def test_reading_across_many_log_files(client: httpx.Client, topic: str) -> None:
    """The service's log files hold 1 MiB: a topic that spans eight reads as one."""
    expected = [f"{n:05}" + "x" * 900 for n in range(8000)]
    for start in range(0, 8000, 500):
        write(client, topic, *expected[start : start + 500])
    got: list[str] = []
    while len(got) < len(expected):
        page = diff(client, topic, from_seq=len(got), limit=1000)["records"]
        assert [record["$seq"] for record in page] == list(range(len(got) + 1, len(got) + len(page) + 1))
        got += [record["data"] for record in page]
    assert got == expected
