"""api §2: `producer`, a fenced and gap-free writer, whose state goes with the log."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, head_seq, missing, ok, put, refused, state
from tests.contract.socket_client import Socket
from tests.harness import Service


def send(
    client: httpx.Client, topic: str, epoch: int, n: int, *data: Any, id: str = "p", **more: Any
) -> httpx.Response:
    producer = {"id": id, "epoch": epoch, "n": n}
    records = [{"data": value} for value in data or (f"{epoch}.{n}",)]
    return client.post(f"/v0/topics/{topic}", json={"records": records, "producer": producer, **more})


def stored(client: httpx.Client, topic: str) -> list[Any]:
    return [record["data"] for record in diff(client, topic, limit=1000)["records"]]


def test_writes_in_their_order_are_appended(client: httpx.Client, topic: str) -> None:
    for n in range(5):
        answer = ok(send(client, topic, 1, n))
        assert (answer["first_seq"], answer["deduped"]) == (n + 1, False)
    assert stored(client, topic) == [f"1.{n}" for n in range(5)]


def test_a_repeated_n_is_deduped(client: httpx.Client, topic: str) -> None:
    ok(send(client, topic, 1, 1, "a", "b"))
    ok(send(client, topic, 1, 2, "c"))
    for n, seqs in ((1, [1, 2]), (2, [3])):
        answer = send(client, topic, 1, n, "something", "else")
        assert answer.status_code == 200
        body = ok(answer)
        assert (body["seqs"], body["deduped"], body["created"], body["head_seq"]) == (seqs, True, False, 3)
    assert stored(client, topic) == ["a", "b", "c"]


def test_a_skipped_n_is_409_out_of_order(client: httpx.Client, topic: str) -> None:
    ok(send(client, topic, 1, 7))
    error = refused(send(client, topic, 1, 9), 409, "out_of_order")
    assert error["detail"] == {"producer": "p", "epoch": 1, "n": 7}
    assert head_seq(client, topic) == 1
    ok(send(client, topic, 1, 8))
    ok(send(client, topic, 1, 9))
    assert stored(client, topic) == ["1.7", "1.8", "1.9"]


def test_who_has_begun_is_refused_if_no_write_of_its_epoch_is_known(client: httpx.Client, topic: str) -> None:
    """It was taken for the next write if it counted from 0."""
    ok(send(client, topic, 1, 1))
    for id, epoch in (("new", 5), ("p", 2)):
        for n in (0, 1, 2, 9):
            producer = {"id": id, "epoch": epoch, "n": n, "begun": True}
            body = {"records": [{"data": 1}], "producer": producer}
            error = refused(client.post(f"/v0/topics/{topic}", json=body), 409, "out_of_order")
            assert error["detail"] == {"producer": id, "epoch": epoch, "n": 0}
            assert f"had an answer in epoch {epoch}" in error["message"]
            assert "was committed" not in error["message"]
    for n in (2, 2, 3):
        producer = {"id": "p", "epoch": 1, "n": n, "begun": True}
        ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": n}], "producer": producer}))
    assert stored(client, topic) == ["1.1", 2, 3]


def test_a_lower_epoch_is_409_fenced_its_repeats_as_well(client: httpx.Client, topic: str) -> None:
    ok(send(client, topic, 1, 1))
    ok(send(client, topic, 2, 1))
    for n in (1, 2):
        error = refused(send(client, topic, 1, n), 409, "fenced")
        assert error["detail"] == {"producer": "p", "epoch": 2, "n": 1}
    assert stored(client, topic) == ["1.1", "2.1"]


@pytest.mark.parametrize("first", [0, 1, 3, 2**64 - 1])
def test_a_new_epoch_counts_from_anywhere(client: httpx.Client, topic: str, first: int) -> None:
    ok(send(client, topic, 1, 1))
    ok(send(client, topic, 2**64 - 1, first))
    if first < 2**64 - 1:
        refused(send(client, topic, 2**64 - 1, first + 2), 409, "out_of_order")
        ok(send(client, topic, 2**64 - 1, first + 1))


def test_an_old_number_whose_seqs_are_forgotten_is_not_appended_again(client: httpx.Client, topic: str) -> None:
    put(client, topic, idempotency_window_ms=0)
    for n in (1, 2, 3):
        ok(send(client, topic, 1, n))
    # Only the last one is known for longer than the window.
    assert ok(send(client, topic, 1, 3))["deduped"] is True
    answer = send(client, topic, 1, 1)
    if answer.status_code != 200:  # it may have been the same millisecond
        assert refused(answer, 409, "out_of_order")["detail"]["n"] == 3
    assert head_seq(client, topic) == 3


def test_producers_and_topics_do_not_know_of_each_other(client: httpx.Client, topic: str) -> None:
    ok(send(client, topic, 5, 5, id="one"))
    ok(send(client, topic, 1, 1, id="other"))
    ok(send(client, topic, 1, 1, id="é\u0000"))
    ok(send(client, f"{topic}.2", 1, 1, id="one"))
    assert head_seq(client, topic) == 3


def test_a_refused_write_takes_no_number(client: httpx.Client, topic: str) -> None:
    ok(send(client, topic, 1, 1))
    refused(send(client, topic, 1, 2, if_head_seq=9), 409, "head_mismatch")
    refused(send(client, topic, 2, 1, if_head_seq=9), 409, "head_mismatch")
    assert ok(send(client, topic, 1, 2, if_head_seq=1))["first_seq"] == 2


def test_it_creates_no_topic_when_it_may_not(client: httpx.Client, topic: str) -> None:
    refused(send(client, topic, 1, 1, create=False), 404, "topic_not_found")
    missing(client, topic)


@pytest.mark.parametrize(
    "producer",
    [
        {},
        {"id": "p", "epoch": 1},
        {"id": "p", "n": 1},
        {"epoch": 1, "n": 1},
        {"id": "", "epoch": 1, "n": 1},
        {"id": "x" * 129, "epoch": 1, "n": 1},
        {"id": 5, "epoch": 1, "n": 1},
        {"id": "p", "epoch": -1, "n": 1},
        {"id": "p", "epoch": 1, "n": 1.5},
        {"id": "p", "epoch": 1, "n": 2**64},
        {"id": "p", "epoch": 2**64, "n": 1},
        "p",
        [],
    ],
    ids=str,
)
def test_what_is_no_producer_is_refused(client: httpx.Client, topic: str, producer: Any) -> None:
    body = {"records": [{"data": 1}], "producer": producer}
    refused(client.post(f"/v0/topics/{topic}", json=body), 400, "invalid_request")
    missing(client, topic)


def test_no_idempotency_key_beside_it(client: httpx.Client, topic: str) -> None:
    refused(send(client, topic, 1, 1, idempotency_key="k"), 400, "invalid_request")
    body = {"records": [{"data": 1}], "producer": {"id": "p", "epoch": 1, "n": 1}}
    refused(client.post(f"/v0/topics/{topic}", json=body, headers={"Idempotency-Key": "k"}), 400, "invalid_request")
    missing(client, topic)


def test_over_a_websocket_too(service: Service, topic: str) -> None:
    with Socket(service) as ws:
        for n, code in ((1, None), (2, None), (2, None), (4, "out_of_order")):
            answer = ws.ask("publish", topic=topic, records=[{"data": n}], producer={"id": "p", "epoch": 1, "n": n})
            assert answer.get("code") == code
    assert stored(service.client, topic) == [1, 2]


def test_of_instances_that_write_at_once_the_last_one_wins_and_leaves_no_gap(service: Service, topic: str) -> None:
    """Each instance repeats what is not answered and ends when it is fenced; requests of one group see each other."""
    put(service.client, topic)

    def instance(epoch: int) -> list[int]:
        done: list[int] = []
        with httpx.Client(base_url=service.url, timeout=20) as own:
            for n in range(40):
                for _ in range(2):  # each write twice: the second is a repeat
                    answer = send(own, topic, epoch, n)
                    if answer.status_code == 409:
                        assert answer.json()["error"]["code"] == "fenced"
                        return done
                    ok(answer)
                done.append(n)
        return done

    with ThreadPoolExecutor(6) as pool:
        acked = dict(zip(range(1, 7), pool.map(instance, range(1, 7)), strict=True))
    assert acked[6] == list(range(40))
    written = [tuple(map(int, value.split("."))) for value in stored(service.client, topic)]
    assert len(set(written)) == len(written)
    epochs = [epoch for epoch, _ in written]
    assert epochs == sorted(epochs), "nobody wrote after a higher epoch had"
    for epoch, numbers in acked.items():
        mine = [n for of, n in written if of == epoch]
        assert mine == list(range(len(mine)))
        assert mine[: len(numbers)] == numbers


@pytest.mark.long
@pytest.mark.parametrize("durability", ["disk", "fsync"])
@pytest.mark.parametrize("end", ["restart", "kill_group", "shards"])
def test_where_it_is_outlives_restarts_with_and_without_a_snapshot(durability: str, end: str) -> None:
    env = {"TOPICS_CHECKPOINT_INTERVAL_MS": "20", "TOPICS_CHECKPOINT_WAL_BYTES": "64KiB"}
    with Service(env=env) as service:
        client = service.client
        put(client, "t", durability=durability, idempotency_window_ms=0)
        for n in (1, 2):
            ok(send(client, "t", 3, n))
        for life in range(3):
            n = 3 + life
            ok(send(client, "t", 3, n))
            if end == "kill_group":
                service.kill_group()
            elif end == "shards":
                service.stop()
                service.shards = 1 + life
            service.restart()
            client = service.client
            answer = ok(send(client, "t", 3, n))
            assert (answer["deduped"], answer["seqs"]) == (True, [n])
            refused(send(client, "t", 2, 1), 409, "fenced")
            refused(send(client, "t", 3, n + 2), 409, "out_of_order")
        assert state(client, "t")["head_seq"] == 5


@pytest.mark.long
def test_of_an_ephemeral_topic_it_outlives_a_crash_of_its_shard() -> None:
    with Service(shards=1) as service:
        client = service.client
        put(client, "t", durability="ephemeral")
        ok(send(client, "t", 3, 1))
        service.wait_healed(service.kill("walshard"))
        assert ok(send(client, "t", 3, 1))["deduped"] is True
        refused(send(client, "t", 2, 1), 409, "fenced")
