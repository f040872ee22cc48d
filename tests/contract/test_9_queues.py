"""api §9 and rules "Queues", a test a sentence, over HTTP."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, diff_records, missing, ok, put, refused, state, write, write_raw
from tests.contract.stream import follow
from tests.contract.timing import now_ms, undisturbed, until_ms
from tests.contract.working import Work, ask, claim, counts, queue, seqs, until_counts
from tests.harness import Service, poll
from topics.core.leases import PEEK_LOOK_MAX
from topics.frontend.queues.dead_letter_moves import EXAMINED_MAX
from topics.frontend.queues.queue_routes import LOOKS_MAX

FOREVER_MS = 3_600_000
TIMEOUT_S = 20.0
"""Time-out of the tests' own clients: longer than any process is held up."""
CARRIED_MS = 950
"""An answer to a claim that took less has waited until jobs were with the dead letters: it does for a second."""


def post(client: httpx.Client, topic: str, verb: str, **body: Any) -> httpx.Response:
    return client.post(f"/v0/topics/{topic}/{verb}", json=body)


# -- a queue is a topic


def test_diff_and_watch_read_a_queue_and_touch_no_lease(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3)
    (job,) = claim(client, topic, lease_ms=FOREVER_MS)
    assert [record["$seq"] for record in diff(client, topic)["records"]] == [1, 2, 3]
    with follow(service, {topic: {}}) as stream:
        assert [record["data"] for record in stream.records(3)] == [1, 2, 3]
    assert counts(client, topic) == (2, 1, 0)
    assert ask(client, topic, "ack", 1, lease_ids=[job["lease_id"]])["acked"] == 1


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("claim", {}),
        ("ack", {"seqs": [1]}),
        ("nack", {"seqs": [1]}),
        ("extend", {"seqs": [1], "lease_ms": 1000}),
        ("redrive", {"from": "somewhere-else"}),
        ("peek", {}),
    ],
)
def test_on_a_log_it_is_409_and_on_a_missing_topic_404(
    client: httpx.Client, topic: str, verb: str, body: dict[str, Any]
) -> None:
    put(client, topic)
    refused(post(client, topic, verb, node="w", **body), 409, "not_a_queue")
    error = refused(post(client, f"{topic}-not", verb, node="w", **body), 404, "topic_not_found")
    assert error["detail"]["topic"] == f"{topic}-not"
    missing(client, f"{topic}-not")


def test_work_on_a_log_is_409_and_on_a_missing_topic_404(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    refused(client.get(f"/v0/topics/{topic}/work?node=w"), 409, "not_a_queue")
    refused(client.get(f"/v0/topics/{topic}-not/work?node=w"), 404, "topic_not_found")


# -- claim


def test_a_claim_gives_the_record_and_its_lease(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue", lease_ms=45_000)
    body = b'{"records":[{"data":{"b": 1.50,"b":2},"tag":"t","meta":{"k":"v"}},{"data":"\\u00e9"}]}'
    ok(write_raw(client, topic, body))
    answer = post(client, topic, "claim", node="w", max=2)
    assert b'"data":{"b": 1.50,"b":2}' in answer.content
    assert b'"data":"\\u00e9"' in answer.content
    first, second = ok(answer)["claimed"]
    assert set(first) == {"$seq", "lease_id", "deadline", "$ts", "$tag", "deliveries", "data", "meta"}
    assert set(second) == {"$seq", "lease_id", "deadline", "$ts", "deliveries", "data"}
    assert (first["$tag"], first["meta"], first["deliveries"]) == ("t", {"k": "v"}, 1)
    assert re.fullmatch(r"lease_[0-9a-f]+", first["lease_id"])
    assert first["lease_id"] != second["lease_id"]
    assert 0 <= first["deadline"] - first["$ts"] - 45_000 < 20_000
    assert ok(answer)["ready"] == 0


def test_one_job_by_default_ascending_by_seq_and_each_to_one_only(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(10))
    assert seqs(claim(client, topic)) == [1]
    assert seqs(claim(client, topic, node="other", max=4)) == [2, 3, 4, 5]
    assert seqs(claim(client, topic, max=100)) == [6, 7, 8, 9, 10]
    assert claim(client, topic) == []


def test_max_is_clamped_to_1000(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    for _ in range(2):
        write(client, topic, *range(600))
    assert len(claim(client, topic, max=2**63)) == 1000
    assert len(claim(client, topic, max=2**63)) == 200


def test_lease_ms_is_clamped(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2)
    (short,) = claim(client, topic, lease_ms=0)
    until_ms(short["deadline"])
    assert seqs(claim(client, topic, lease_ms=2**63)) == [1]
    (long,) = claim(client, topic, lease_ms=2**63)
    assert long["deadline"] - long["$ts"] >= 86_400_000 - 20_000
    assert long["deadline"] - long["$ts"] <= 86_400_000 + 20_000


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"node": ""},
        {"node": "x" * 129},
        {"node": 7},
        {"node": "w", "max": -1},
        {"node": "w", "max": 1.5},
        {"node": "w", "max": "1"},
        {"node": "w", "max": 2**64},
        {"node": "w", "lease_ms": -1},
    ],
)
def test_a_claim_that_makes_no_sense_is_400(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    queue(client, topic, 1)
    refused(client.post(f"/v0/topics/{topic}/claim", json=body), 400, "invalid_request")
    assert counts(client, topic) == (1, 0, 0)


def test_a_claim_on_an_empty_queue_writes_nothing_to_the_log(client: httpx.Client, topic: str) -> None:
    def alone(name: str) -> bool:
        queue(client, name, leases_durable=True)
        before = wal_frames(client)
        for _ in range(20):
            assert claim(client, name, max=10) == []
        return wal_frames(client) == before

    undisturbed("20 claims without a frame in the log", topic, alone)


def test_a_claim_without_durable_leases_writes_nothing_to_the_log(client: httpx.Client, topic: str) -> None:
    def alone(name: str) -> bool:
        queue(client, name, *range(20))
        before = wal_frames(client)
        for _ in range(20):
            assert len(claim(client, name)) == 1
        return wal_frames(client) == before

    undisturbed("20 claims without a frame in the log", topic, alone)


def wal_frames(client: httpx.Client) -> int:
    """Return the frames of the whole service: work that earlier tests left may still go on."""
    metrics = ok(client.get("/v0/metrics", headers={"Accept": "application/json"}))
    frames: int = metrics["topics_wal_frames_total"]
    return frames


# -- ack


def test_an_ack_deletes_the_job(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(5))
    claim(client, topic, max=3)
    answer = ask(client, topic, "ack", 1, 3)
    assert (answer["acked"], answer["skipped"], answer["ready"], answer["in_flight"]) == (2, [], 2, 1)
    assert [record.seq for record in diff_records(client, topic)] == [2, 4, 5]
    now = state(client, topic)
    assert (now["earliest_seq"], now["count"], now["head_seq"]) == (2, 3, 5)
    assert diff(client, topic)["tombstone"] is None


def test_the_last_ack_leaves_an_empty_topic(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3)
    claim(client, topic, max=3)
    for seq in (2, 3, 1):
        ask(client, topic, "ack", seq)
    now = state(client, topic)
    assert (now["earliest_seq"], now["count"], now["bytes"]) == (4, 0, 0)


def test_what_is_not_leased_to_the_node_is_skipped_in_request_order(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(6))
    claim(client, topic, node="mine", max=2)
    claim(client, topic, node="other", max=2)
    answer = ask(client, topic, "ack", 9, 4, 2, 5, 3, 2, node="mine")
    assert (answer["acked"], answer["skipped"]) == (1, [9, 4, 5, 3, 2])
    assert ask(client, topic, "ack", 2, node="mine")["skipped"] == [2]


def test_lease_ids_are_a_fence(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, lease_ms=100)
    old = claim(client, topic, max=2)
    until_ms(old[0]["deadline"])
    new = claim(client, topic, max=2, lease_ms=FOREVER_MS)
    assert [job["deliveries"] for job in new] == [2, 2]
    stale = ask(client, topic, "ack", 1, 2, lease_ids=[old[0]["lease_id"], "nonsense"])
    assert (stale["acked"], stale["skipped"]) == (0, [1, 2])
    mixed = ask(client, topic, "ack", 1, 2, lease_ids=[new[0]["lease_id"], old[1]["lease_id"]])
    assert (mixed["acked"], mixed["skipped"]) == (1, [2])


@pytest.mark.parametrize("verb", ["nack", "extend"])
def test_lease_ids_fence_nack_and_extend_as_well(client: httpx.Client, topic: str, verb: str) -> None:
    queue(client, topic, 1, 2)
    first, second = claim(client, topic, max=2, lease_ms=FOREVER_MS)
    wrong = [second["lease_id"], first["lease_id"]]
    assert ask(client, topic, verb, 1, 2, lease_ids=wrong, lease_ms=100)["skipped"] == [1, 2]
    assert ask(client, topic, verb, 1, 2, node="other", lease_ms=100)["skipped"] == [1, 2]
    assert counts(client, topic) == (0, 2, 0)
    right = [first["lease_id"], second["lease_id"]]
    assert ask(client, topic, verb, 1, 2, lease_ids=right, lease_ms=FOREVER_MS)["skipped"] == []
    assert counts(client, topic) == ((2, 0, 0) if verb == "nack" else (0, 2, 0))


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_lease_ids_must_have_the_length_of_seqs(client: httpx.Client, topic: str, verb: str) -> None:
    queue(client, topic, 1, 2)
    claim(client, topic, max=2)
    body = {"node": "w", "seqs": [1, 2], "lease_ids": ["lease_0000000000000000"], "lease_ms": 1000}
    refused(client.post(f"/v0/topics/{topic}/{verb}", json=body), 400, "invalid_request")


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_more_than_1000_seqs_are_refused(client: httpx.Client, topic: str, verb: str) -> None:
    queue(client, topic, 1)
    body = {"node": "w", "seqs": list(range(1, 1002)), "lease_ms": 1000}
    refused(client.post(f"/v0/topics/{topic}/{verb}", json=body), 400, "batch_too_large")
    body["seqs"] = list(range(1, 1001))
    assert ok(client.post(f"/v0/topics/{topic}/{verb}", json=body))["skipped"] == list(range(1, 1001))


@pytest.mark.parametrize("bad", [{"seqs": []}, {"seqs": [-1]}, {"seqs": ["1"]}, {"seqs": [2**64]}, {"seqs": 1}, {}])
@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_seqs_that_make_no_sense_are_400(client: httpx.Client, topic: str, verb: str, bad: dict[str, Any]) -> None:
    queue(client, topic, 1)
    refused(post(client, topic, verb, node="w", lease_ms=1000, **bad), 400, "invalid_request")


# -- nack and extend


def test_a_nacked_job_comes_again_before_all_others(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(4))
    claim(client, topic, max=2)
    answer = ask(client, topic, "nack", 2, 7)
    assert (answer["nacked"], answer["skipped"], answer["ready"], answer["in_flight"]) == (1, [7], 3, 1)
    (again,) = claim(client, topic, node="other")
    assert (again["$seq"], again["deliveries"]) == (2, 2)


def test_a_delayed_nack_is_in_neither_count_until_its_time(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    claim(client, topic, lease_ms=FOREVER_MS)
    started_ms = now_ms()
    answer = ask(client, topic, "nack", 1, delay_ms=300)
    assert (answer["nacked"], answer["ready"], answer["in_flight"]) == (1, 0, 0)
    while not claim(client, topic):
        shown = counts(client, topic)
        if now_ms() < started_ms + 290:
            assert shown == (0, 0, 0)
    assert now_ms() >= started_ms + 299


def test_extend_sets_now_plus_lease_ms_and_counts_no_delivery(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2)
    (first,) = claim(client, topic, lease_ms=20_000)
    (second,) = claim(client, topic, lease_ms=100)
    answer = ask(client, topic, "extend", 1, 9, lease_ms=FOREVER_MS)
    assert (answer["extended"], answer["skipped"]) == (1, [9])
    assert set(answer["deadlines"]) == {"1"}
    later_ms = answer["deadlines"]["1"] - first["deadline"]
    assert FOREVER_MS - 20_000 <= later_ms < FOREVER_MS, "from now on, not from where it ended"
    until_ms(second["deadline"])
    assert seqs(claim(client, topic, max=2)) == [2]
    ask(client, topic, "nack", 1)
    assert claim(client, topic)[0]["deliveries"] == 2


def test_extend_needs_lease_ms_and_clamps_it(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1)
    claim(client, topic)
    refused(post(client, topic, "extend", node="w", seqs=[1]), 400, "invalid_request")
    deadline = ask(client, topic, "extend", 1, lease_ms=2**63)["deadlines"]["1"]
    assert deadline <= now_ms() + 86_400_000


# -- expiry


def test_an_expired_lease_makes_the_job_ready_and_its_ack_is_skipped(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2)
    claim(client, topic, lease_ms=FOREVER_MS)
    assert counts(client, topic) == (1, 1, 0)
    until_ms(ask(client, topic, "extend", 1, lease_ms=100)["deadlines"]["1"])
    until_counts(client, topic, 2, 0, 0)
    assert ask(client, topic, "ack", 1)["skipped"] == [1]
    assert seqs(claim(client, topic, node="other")) == [1]


def test_reclaimed_jobs_come_before_fresh_ones_and_an_answer_is_ascending(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(6))
    claim(client, topic, max=4)
    ask(client, topic, "nack", 4)
    ask(client, topic, "nack", 2)
    assert seqs(claim(client, topic, max=1)) == [2]
    assert seqs(claim(client, topic, max=2)) == [4, 5]


# -- the window


def test_20_jobs_and_4_claimers_of_10_inside_one_window_are_5_each(client: httpx.Client, topic: str) -> None:
    window_ms = 400

    def in_time(name: str) -> bool:
        queue(client, name, *range(20), claim_jitter_ms=window_ms)
        began_ms = now_ms()
        with ThreadPoolExecutor(4) as pool:
            claimed = list(pool.map(lambda n: claim(client, name, node=f"w{n}", max=10), range(4)))
        assert sorted(seq for jobs in claimed for seq in seqs(jobs)) == list(range(1, 21))
        for jobs in claimed:
            assert seqs(jobs) == sorted(seqs(jobs))
        if now_ms() >= began_ms + 2 * window_ms:
            return False  # somebody may have come late, and into a second window
        assert [len(jobs) for jobs in claimed] == [5] * 4
        return True

    undisturbed("four claims within one window", topic, in_time)


def test_a_window_without_jobs_answers_with_none(client: httpx.Client, topic: str) -> None:
    queue(client, topic, claim_jitter_ms=50)
    assert claim(client, topic) == []


def test_a_claimer_that_is_gone_takes_nothing_from_its_window(
    service: Service, client: httpx.Client, topic: str
) -> None:
    # Long enough for a stream to notice that they are gone.
    queue(client, topic, *range(4), claim_jitter_ms=3000)
    body = json.dumps({"node": "gone", "max": 4, "lease_ms": FOREVER_MS}).encode()
    head = f"POST /v0/topics/{topic}/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(4):
        with socket.create_connection(("127.0.0.1", service.port)) as gone:
            gone.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (head.encode(), len(body), body))
    found: list[dict[str, Any]] = []
    poll("the others to get every job", lambda: found.extend(claim(client, topic, max=4)) or len(found) == 4, 30.0)
    assert {(job["$seq"], job["deliveries"]) for job in found} == {(seq, 1) for seq in (1, 2, 3, 4)}


# -- dead letters


def until_dead(client: httpx.Client, topic: str, count: int) -> None:
    """Claims until so many jobs are dead letters, and gets none. One claim brings them there, but answers after a
    second though one of them may still be on its way.
    """
    poll("all to be dead letters", lambda: claim(client, topic) == [] and counts(client, topic)[2] == count)


def test_the_delivery_after_the_last_allowed_one_is_a_move_to_the_dead_letters(
    client: httpx.Client, topic: str
) -> None:
    dead = f"{topic}-dead"
    put(client, topic, type="queue", lease_ms=100, max_deliveries=2, dead_letter=dead)
    body = {"records": [{"data": {"x": 1}, "tag": "t", "node": "n", "meta": {"k": "v"}}]}
    ok(client.post(f"/v0/topics/{topic}", json=body))
    for delivery in (1, 2):
        (job,) = claim(client, topic)
        assert job["deliveries"] == delivery
        until_ms(job["deadline"])
    missing(client, dead)
    until_dead(client, topic, 1)
    assert counts(client, topic) == (0, 0, 1)
    assert state(client, topic)["count"] == 0
    (record,) = diff_records(client, dead, include_tags=True)
    assert (record.data, record.tag, record.node) == (b'{"x":1}', "t", "n")
    assert record.meta is not None
    assert json.loads(record.meta) == {
        "k": "v",
        "$dead_letter_from": topic,
        "$dead_letter_deliveries": "2",
        "$dead_letter_src_seq": "1",
        "$dead_letter_job_key": f"{topic}:{state(client, topic)['epoch']}:1",
    }


def test_many_dead_letters_come_there_in_whatever_order_they_fail(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}-dead"
    queue(client, topic, *range(120), max_deliveries=1, dead_letter=dead)
    jobs = seqs(claim(client, topic, max=120))
    for part in (jobs[50::7], jobs[:50], jobs):
        ask(client, topic, "nack", *part)
        assert claim(client, topic, max=1) == []
    poll("all to be there", lambda: claim(client, topic) == [] and counts(client, topic) == (0, 0, 120))
    assert sorted(int(record.data) for record in diff_records(client, dead)) == list(range(120))


def test_without_a_dead_letter_topic_a_job_is_never_thrown_away(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, max_deliveries=1)
    for delivery in (1, 2, 3):
        (job,) = claim(client, topic)
        assert job["deliveries"] == delivery
        ask(client, topic, "nack", 1)


def test_a_dead_letter_that_cannot_be_written_stays_in_the_queue(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}-full"
    put(client, dead, discard="reject", cap_records=1)
    write(client, dead, "in the way")
    queue(client, topic, "precious", max_deliveries=1, dead_letter=dead)
    claim(client, topic)
    ask(client, topic, "nack", 1)
    assert claim(client, topic) == []
    assert state(client, topic)["count"] == 1
    until_counts(client, topic, 1, 0, 0)
    ok(client.post(f"/v0/topics/{dead}/delete", json={"before_seq": 2}))
    poll("the job to be in the dead letters", lambda: claim(client, topic) == [] and counts(client, topic)[2] == 1)
    assert [record.data for record in diff_records(client, dead)] == [b'"precious"']
    assert state(client, topic)["count"] == 0


def test_a_queue_cannot_be_its_own_dead_letter_topic(client: httpx.Client, topic: str) -> None:
    body = {"type": "queue", "dead_letter": topic}
    refused(client.put(f"/v0/topics/{topic}", json=body), 400, "invalid_request")


def test_redrive_moves_dead_letters_back(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}-dead"
    put(client, topic, type="queue", max_deliveries=1, dead_letter=dead)
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": n, "meta": {"n": str(n)}} for n in range(5)]}))
    claim(client, topic, max=5)
    ask(client, topic, "nack", 1, 2, 3, 4, 5)
    assert claim(client, topic, max=5) == []
    write(client, dead, "not a dead letter of ours")
    first = ok(post(client, topic, "redrive", **{"from": dead, "max": 2}))
    assert (first["topic"], first["from"], first["redriven"]) == (topic, dead, 2)
    jobs = claim(client, topic, max=10)
    key = f"{topic}:{state(client, topic)['epoch']}"
    assert [(job["$seq"], job["data"], job["meta"], job["deliveries"]) for job in jobs] == [
        (6, 0, {"n": "0", "$job_key": f"{key}:1"}, 1),
        (7, 1, {"n": "1", "$job_key": f"{key}:2"}, 1),
    ]
    assert ok(post(client, topic, "redrive", **{"from": dead}))["redriven"] == 3
    assert ok(post(client, topic, "redrive", **{"from": dead}))["redriven"] == 0
    assert [record.data for record in diff_records(client, dead)] == [b'"not a dead letter of ours"']
    assert len(claim(client, topic, max=10)) == 3


def dead_jobs(client: httpx.Client, topic: str, count: int) -> None:
    """Wait until so many more jobs of a queue (`max_deliveries` 1) are dead letters."""
    dead = counts(client, topic)[2] + count
    write(client, topic, *range(count))
    ask(client, topic, "nack", *seqs(claim(client, topic, max=count)))
    poll("all to be dead letters", lambda: claim(client, topic) == [] and counts(client, topic) == (0, 0, dead))


def test_the_key_of_a_job_survives_dead_letters_of_dead_letters_and_every_redrive(
    client: httpx.Client, topic: str
) -> None:
    names = [topic, f"{topic}.b", f"{topic}.c"]
    for at, name in enumerate(names[:2]):
        put(client, name, type="queue", max_deliveries=1, dead_letter=names[at + 1])
    write(client, topic, "before")
    ask(client, topic, "ack", *seqs(claim(client, topic)))
    dead_jobs(client, topic, 1)
    for _ in range(2):
        (job,) = claim(client, names[1])
        assert job["meta"]["$dead_letter_from"] == topic
        dead_before = counts(client, names[1])[2]
        ask(client, names[1], "nack", job["$seq"])
        until_dead(client, names[1], dead_before + 1)
        (dead,) = diff(client, names[2])["records"]
        assert dead["meta"]["$dead_letter_from"] == names[1]
        assert ok(post(client, names[1], "redrive", **{"from": names[2]}))["redriven"] == 1
        assert ok(post(client, topic, "redrive", **{"from": names[1]}))["redriven"] == 1
        (job,) = claim(client, topic)
        assert job["meta"] == {"$job_key": f"{topic}:{state(client, topic)['epoch']}:2"}
        dead_before = counts(client, topic)[2]
        ask(client, topic, "nack", job["$seq"])
        until_dead(client, topic, dead_before + 1)


@pytest.mark.parametrize("name", ["$dead_letter_from", "$dead_letter_job_key", "$dead_letter_before", "$job_key"])
def test_clients_may_not_write_what_says_where_a_job_was(client: httpx.Client, topic: str, name: str) -> None:
    records = [{"data": 1, "meta": {"$of_ours": "fine"}}, {"data": 1, "meta": {name: "x"}}]
    error = refused(client.post(f"/v0/topics/{topic}", json={"records": records}), 400, "invalid_request")
    assert error["detail"]["field"] == f"records[1].meta.{name}"
    missing(client, topic)


def test_a_job_that_a_router_brought_with_its_origin_goes_to_the_dead_letters_and_back(
    client: httpx.Client, topic: str
) -> None:
    work, dead = f"{topic}.work", f"{topic}.dead"
    put(client, topic)
    put(client, work, type="queue", max_deliveries=1, dead_letter=dead)
    route = {"source": topic, "dest": work, "guarantee": "exactly_once"}
    ok(client.put(f"/v0/routers/{topic}", json=route))
    write(client, topic, "x")
    (job,) = poll("the router's copy", lambda: claim(client, work) or None)
    ask(client, work, "nack", job["$seq"])
    poll("it to be dead", lambda: claim(client, work) == [] and counts(client, work) == (0, 0, 1))
    assert diff(client, dead)["records"][0]["meta"]["_topics_router"] == job["meta"]["_topics_router"]
    assert ok(post(client, work, "redrive", **{"from": dead}))["redriven"] == 1
    assert claim(client, work)[0]["meta"]["_topics_router"] == job["meta"]["_topics_router"]


@pytest.mark.parametrize("on_ack", ["keep", "delete"])
def test_a_redrive_leaves_dead_letters_that_are_done_or_somebodys_work(
    client: httpx.Client, topic: str, on_ack: str
) -> None:
    dead = f"{topic}.dead"
    put(client, dead, type="queue", on_ack=on_ack)
    put(client, topic, type="queue", max_deliveries=1, dead_letter=dead)
    dead_jobs(client, topic, 4)
    assert seqs(claim(client, dead, max=3)) == [1, 2, 3]
    ask(client, dead, "ack", 1)
    ask(client, dead, "nack", 3, delay_ms=FOREVER_MS)
    answer = ok(post(client, topic, "redrive", **{"from": dead}))
    assert answer["redriven"] == 2
    assert len(claim(client, topic, max=9)) == 2
    assert counts(client, dead) == (0, 1, 0)
    assert [one["$seq"] for one in diff(client, dead)["records"]] == ([1, 2] if on_ack == "keep" else [2])
    assert ask(client, dead, "ack", 2)["acked"] == 1


def test_a_dead_letter_that_does_not_fit_back_is_a_job_of_its_topic_again(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}.dead"
    put(client, dead, type="queue")
    put(client, topic, type="queue", max_deliveries=1, dead_letter=dead, cap_records=2, discard="reject")
    dead_jobs(client, topic, 2)
    write(client, topic, "in the way")
    assert refused(post(client, topic, "redrive", **{"from": dead}), 422, "topic_full")["detail"]["redriven"] == 1
    poll("the other to be free", lambda: counts(client, dead) == (1, 0, 0))
    assert seqs(claim(client, dead, max=9)) == [2]


@pytest.mark.parametrize("type", ["log", "queue"])
def test_redrives_at_once_bring_each_dead_letter_once_and_count_it_once(
    client: httpx.Client, topic: str, type: str
) -> None:
    dead = f"{topic}.dead"
    put(client, dead, type=type)
    put(client, topic, type="queue", max_deliveries=1, dead_letter=dead)
    dead_jobs(client, topic, 200)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ok(post(client, topic, "redrive", **{"from": dead, "max": 200})), range(4)))
    left = state(client, dead)["count"]
    assert sum(answer["redriven"] for answer in answers) == 200 - left
    # Some may have passed over what another one was just bringing.
    ok(post(client, topic, "redrive", **{"from": dead, "max": 200}))
    assert sorted(job["data"] for job in claim(client, topic, max=500)) == list(range(200))


def test_a_redrive_says_where_it_stopped_and_looks_at_so_many_records_at_most(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}.dead"
    put(client, topic, type="queue", max_deliveries=1, dead_letter=dead)
    dead_jobs(client, topic, 3)
    for _ in range(EXAMINED_MAX // 1000):
        write(client, dead, *[0] * 1000)
    dead_jobs(client, topic, 1)
    first = ok(post(client, topic, "redrive", **{"from": dead, "max": 2}))
    assert (first["redriven"], first["next_from_seq"]) == (2, 2)
    second = ok(post(client, topic, "redrive", **{"from": dead, "max": 2, "from_seq": 2}))
    assert second["redriven"] == 2
    write(client, dead, *[0] * 1000)
    third = ok(post(client, topic, "redrive", **{"from": dead}))
    assert third["redriven"] == 0
    assert third["next_from_seq"] >= EXAMINED_MAX
    last = ok(post(client, topic, "redrive", **{"from": dead, "from_seq": third["next_from_seq"]}))
    assert (last["redriven"], last.get("next_from_seq")) == (0, None)


def test_a_redrive_into_a_full_queue_says_so_and_how_many_are_back(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}-dead"
    queue(client, topic, *range(3), max_deliveries=1, dead_letter=dead, cap_records=3, discard="reject")
    claim(client, topic, max=3)
    ask(client, topic, "nack", 1, 2, 3)
    assert claim(client, topic, max=3) == []
    write(client, topic, "first", "second")
    error = refused(post(client, topic, "redrive", **{"from": dead}), 422, "topic_full")
    assert error["detail"] == {"cap_records": 3, "redriven": 1}
    assert [job["data"] for job in claim(client, topic, max=10)] == ["first", "second", 0]
    assert [record.data for record in diff_records(client, dead)] == [b"1", b"2"]


def test_redriven_jobs_of_an_order_key_are_in_flight_one_by_one(client: httpx.Client, topic: str) -> None:
    dead = f"{topic}-dead"
    put(client, topic, type="queue", max_deliveries=1, dead_letter=dead)
    records = [{"data": n, "order_key": "k", "meta": {"n": str(n)}} for n in range(3)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    for seq in (1, 2):
        assert seqs(claim(client, topic)) == [seq]
        ask(client, topic, "nack", seq)
    assert seqs(claim(client, topic, max=9)) == [3]
    ask(client, topic, "nack", 3, delay_ms=0)
    assert [one["meta"]["$dead_letter_order_key"] for one in diff(client, dead)["records"]] == ["k", "k"]
    assert ok(post(client, topic, "redrive", **{"from": dead}))["redriven"] == 2
    put(client, topic, type="queue")
    for seq, n in ((3, "2"), (4, "0"), (5, "1")):
        (job,) = claim(client, topic, max=9)
        assert (job["$seq"], job["meta"]["n"]) == (seq, n)
        assert ask(client, topic, "ack", seq)["acked"] == 1
    assert state(client, topic)["count"] == 0


def test_a_claim_gets_what_waits_behind_nothing_but_dead_letters(client: httpx.Client, topic: str) -> None:
    def in_time(name: str) -> bool:
        put(client, name, type="queue", max_deliveries=1, dead_letter=f"{name}-dead")
        records = [{"data": n, "order_key": "k"} for n in range(3)]
        ok(client.post(f"/v0/topics/{name}", json={"records": records}))
        for expected in ([1], [2], [3], []):
            answer = ok(post(client, name, "claim", node="w", max=9))
            if answer["performance"]["server_total_ms"] >= CARRIED_MS:
                return False
            assert seqs(answer["claimed"]) == expected
            if expected:
                ask(client, name, "nack", *expected)
        assert counts(client, name) == (0, 0, 3)
        return True

    undisturbed("claims that wait until the dead letters are there", topic, in_time)


# -- scheduled jobs, order, kept jobs [+]


def test_a_scheduled_job_is_ready_at_its_time(client: httpx.Client, topic: str) -> None:
    def in_time(name: str) -> bool:
        queue(client, name)
        due_ms = now_ms() + 400
        records = [{"data": "at", "deliver_at": due_ms}, {"data": "in", "delay_ms": 400}, {"data": "now"}]
        ok(client.post(f"/v0/topics/{name}", json={"records": records}))
        got = [job["data"] for job in claim(client, name, max=10, lease_ms=FOREVER_MS)]
        shown = counts(client, name)
        if now_ms() >= due_ms - 20:
            return False  # the others may have been ready, too
        assert (got, shown) == (["now"], (0, 1, 0))
        until_counts(client, name, 2, 1, 0)
        assert now_ms() >= due_ms
        assert [job["data"] for job in claim(client, name, max=10)] == ["at", "in"]
        return True

    undisturbed("jobs that are seen before their time", topic, in_time)


def test_of_an_order_key_one_job_is_in_flight_and_they_come_in_order(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    records = [{"data": f"{key}{n}", "order_key": key} for n in range(3) for key in "ab"] + [{"data": "free"}]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    jobs = claim(client, topic, max=10)
    assert [job["data"] for job in jobs] == ["a0", "b0", "free"]
    assert counts(client, topic) == (0, 3, 0)
    ask(client, topic, "nack", jobs[0]["$seq"])
    assert [job["data"] for job in claim(client, topic, max=10)] == ["a0"]
    answer = ask(client, topic, "ack", jobs[0]["$seq"], jobs[1]["$seq"])
    assert (answer["ready"], counts(client, topic)[0]) == (2, 2)
    assert [job["data"] for job in claim(client, topic, max=10)] == ["a1", "b1"]


@pytest.mark.parametrize("on_ack", ["delete", "keep"])
def test_an_ack_counts_what_it_makes_ready(client: httpx.Client, topic: str, on_ack: str) -> None:
    """It left out the next job of an order key: a worker that asks for jobs only while some are ready stopped there."""
    put(client, topic, type="queue", on_ack=on_ack)
    jobs: list[dict[str, Any]] = [{"data": 1, "order_key": key} for key in "abcabd"]
    jobs[3] |= {"delay_ms": FOREVER_MS}
    ok(client.post(f"/v0/topics/{topic}", json={"records": [*jobs, {"data": 1, "order_key": "c", "tag": "gone"}]}))
    assert seqs(claim(client, topic, max=10, lease_ms=FOREVER_MS)) == [1, 2, 3, 6]
    ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "gone"}))
    for seq, ready in ((1, 0), (3, 0), (6, 0), (2, 1)):  # behind a a delayed job, behind c a deleted one, behind b one
        assert (ask(client, topic, "ack", seq)["ready"], counts(client, topic)[0]) == (ready, ready)


@pytest.mark.parametrize("extra", [{"deliver_at": 5}, {"delay_ms": 5}, {"order_key": "k"}])
def test_job_attributes_are_for_queues(client: httpx.Client, topic: str, extra: dict[str, Any]) -> None:
    put(client, topic)
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, **extra}]}), 409, "not_a_queue")
    assert state(client, topic)["head_seq"] == 0


@pytest.mark.parametrize("config", [None, {"ttl_ms": 1000}])
def test_a_job_for_no_topic_says_that_there_is_none(client: httpx.Client, topic: str, config: Any) -> None:
    """It said that the topic is a log."""
    body = {"records": [{"data": 1, "delay_ms": 5}], "config": config}
    error = refused(client.post(f"/v0/topics/{topic}", json=body), 409, "not_a_queue")
    assert "does not exist" in error["message"]
    assert '{"type": "queue"}' in error["message"]
    assert client.get(f"/v0/topics/{topic}").status_code == 404
    ok(client.post(f"/v0/topics/{topic}", json=body | {"config": {"type": "queue"}}))


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"deliver_at": 1, "delay_ms": 1}, "delay_ms"),
        ({"order_key": "k" * 257}, "order_key"),
        ({"deliver_at": 2**62}, "deliver_at"),
        ({"delay_ms": 2**62}, "delay_ms"),
    ],
)
def test_job_attributes_that_make_no_sense_are_400(
    client: httpx.Client, topic: str, extra: dict[str, Any], field: str
) -> None:
    queue(client, topic)
    answer = client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, **extra}]})
    assert refused(answer, 400, "invalid_request")["detail"]["field"] == f"records[0].{field}"


@pytest.mark.parametrize("extra", [{"delay_ms": -1}, {"deliver_at": 2**64}])
def test_times_that_are_no_counts_are_400(client: httpx.Client, topic: str, extra: dict[str, Any]) -> None:
    queue(client, topic)
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 1, **extra}]}), 400, "invalid_request")


def test_on_ack_keep_leaves_acked_jobs_readable(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(4), on_ack="keep")
    claim(client, topic, max=2)
    answer = ask(client, topic, "ack", 1, 2)
    assert (answer["acked"], answer["ready"], answer["in_flight"]) == (2, 2, 0)
    assert [record.seq for record in diff_records(client, topic)] == [1, 2, 3, 4]
    assert seqs(claim(client, topic, max=10)) == [3, 4]
    assert ask(client, topic, "ack", 1)["skipped"] == [1]
    assert counts(client, topic) == (0, 2, 0)
    assert state(client, topic)["config"]["on_ack"] == "keep"


def test_kept_jobs_give_way_before_a_write_is_refused(client: httpx.Client, topic: str) -> None:
    queue(client, topic, "a", "b", "c", on_ack="keep", discard="reject", cap_records=3)
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": "d"}]}), 422, "topic_full")
    claim(client, topic, max=3)
    ask(client, topic, "ack", 2, 3)
    assert state(client, topic)["count"] == 3
    write(client, topic, "d")
    assert [record.seq for record in diff_records(client, topic)] == [1, 3, 4], (
        "the oldest that was acked, and no other"
    )
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": n} for n in "ef"]}), 422, "topic_full")
    assert [record.seq for record in diff_records(client, topic)] == [1, 3, 4], "it would not have been enough"
    write(client, topic, "e")
    answer = diff(client, topic)
    assert [record["$seq"] for record in answer["records"]] == [1, 4, 5]
    assert answer["tombstone"] is None
    assert counts(client, topic) == (2, 1, 0)
    ask(client, topic, "ack", 1)
    assert seqs(claim(client, topic, max=9)) == [4, 5]
    ask(client, topic, "ack", 4)
    write(client, topic, "f", "g")
    answer = diff(client, topic)
    assert ([record["$seq"] for record in answer["records"]], answer["tombstone"]) == ([5, 6, 7], None)
    assert (answer["earliest_seq"], counts(client, topic)) == (5, (2, 1, 0))


def test_kept_jobs_give_way_to_bytes_and_to_what_a_router_brings(client: httpx.Client, topic: str) -> None:
    source = f"{topic}-source"
    put(client, source)
    queue(client, topic, on_ack="keep", discard="reject", cap_bytes=5000)
    ok(client.put(f"/v0/routers/{topic}-r", json={"source": source, "dest": topic}))
    write(client, topic, "x" * 2000, "y" * 2000)
    write(client, source, "z" * 2000, "z" * 2000)
    assert seqs(claim(client, topic, max=9)) == [1, 2]
    ask(client, topic, "ack", 1)
    poll("the first copy to come", lambda: seqs(claim(client, topic, max=9)) == [3] or None)
    assert [record.seq for record in diff_records(client, topic)] == [2, 3]
    ask(client, topic, "ack", 2, 3)
    poll("the second copy to come", lambda: seqs(claim(client, topic, max=9)) == [4] or None)
    write(client, topic, "w" * 2000)
    assert [record.seq for record in diff_records(client, topic)] == [4, 5]


def test_on_ack_is_shown_only_when_it_is_not_the_default(client: httpx.Client, topic: str) -> None:
    assert "on_ack" not in put(client, topic, type="queue", on_ack="delete")["config"]


# -- retention


def test_a_cap_evicts_unclaimed_jobs_with_a_tombstone(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3, 4, 5, cap_records=3)
    assert counts(client, topic) == (3, 0, 0)
    tombstone = diff(client, topic)["tombstone"]
    assert (tombstone["reason"], tombstone["gap_from"], tombstone["gap_to"]) == ("cap", 1, 2)
    assert seqs(claim(client, topic, max=10)) == [3, 4, 5]


def test_a_leased_job_that_was_evicted_is_skipped_by_its_ack(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3, cap_records=3)
    claim(client, topic, max=2)
    write(client, topic, 4)
    assert counts(client, topic) == (2, 1, 0)
    assert ask(client, topic, "ack", 1, 2)["skipped"] == [1]
    assert counts(client, topic) == (2, 0, 0)


def test_expired_jobs_are_not_handed_out(client: httpx.Client, topic: str) -> None:
    def in_time(name: str) -> bool:
        queue(client, name, "old", ttl_ms=150)
        until_ms(now_ms() + 151)
        written_ms = now_ms()
        write(client, name, "new")
        got = [job["data"] for job in claim(client, name, max=10)]
        tombstone = diff(client, name)["tombstone"]
        if now_ms() > written_ms + 150:
            return False  # the new one may have expired as well
        assert got == ["new"]
        assert (tombstone["reason"], tombstone["gap_to"]) == ("ttl", 1)
        return True

    undisturbed("a claim between the end of one job and that of the next", topic, in_time)


def test_expired_jobs_count_nowhere_though_nobody_touches_the_queue(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, 3)
    (leased,) = claim(client, topic, lease_ms=FOREVER_MS)
    ttl_ms = now_ms() - leased["$ts"] + 300
    put(client, topic, type="queue", ttl_ms=ttl_ms)
    until_ms(leased["$ts"] + ttl_ms + 1)
    # A state does not wait for long until the shard has evicted what expired.
    poll("the jobs to go", lambda: state(client, topic)["count"] == 0)
    assert counts(client, topic) == (0, 0, 0)
    assert ask(client, topic, "ack", 1)["skipped"] == [1]


def test_a_deleted_job_leaves_the_queue(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue")
    records = [{"data": n, "tag": "odd" if n % 2 else "even"} for n in range(6)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    claim(client, topic, max=3)
    ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "even"}))
    assert counts(client, topic) == (2, 1, 0)
    assert ask(client, topic, "ack", 1, 2, 3)["skipped"] == [1, 3]
    assert [job["data"] for job in claim(client, topic, max=10)] == [3, 5]


def test_a_queue_that_rejects_has_room_again_after_an_ack(client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, discard="reject", cap_records=2)
    refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 3}]}), 422, "topic_full")
    claim(client, topic)
    ask(client, topic, "ack", 1)
    assert write(client, topic, 3)["first_seq"] == 3


# -- peek [+]


def peek(client: httpx.Client, topic: str, **body: Any) -> dict[str, Any]:
    answer = ok(post(client, topic, "peek", **body))
    assert answer["topic"] == topic
    assert answer["count"] == len(answer["jobs"])
    return answer


def states(client: httpx.Client, topic: str, **body: Any) -> dict[int, str]:
    return {job["$seq"]: job["state"] for job in peek(client, topic, **body)["jobs"]}


def test_a_peek_says_of_every_job_where_it_stands_and_touches_no_lease(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue", on_ack="keep")
    at_ms = now_ms() + FOREVER_MS
    records: list[dict[str, Any]] = [{"data": n, "tag": "t", "node": "n", "meta": {"k": "v"}} for n in range(5)]
    records += [{"data": "at", "deliver_at": at_ms}, {"data": "in", "delay_ms": FOREVER_MS}]
    records += [{"data": "first", "order_key": "k"}, {"data": "second", "order_key": "k"}]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    jobs = claim(client, topic, node='a "worker"', max=4)
    ask(client, topic, "ack", 1, node='a "worker"')
    ask(client, topic, "nack", 2, node='a "worker"')
    ask(client, topic, "nack", 3, node='a "worker"', delay_ms=FOREVER_MS)
    before = counts(client, topic)
    assert state(client, topic)["queue"]["scheduled"] == 3
    answer = peek(client, topic)
    seen = {job["$seq"]: job for job in answer["jobs"]}
    assert list(seen) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert "next_from_seq" not in answer
    record = {"data": 3, "$tag": "t", "$node": "n", "meta": {"k": "v"}, "$seq": 4, "$ts": jobs[3]["$ts"]}
    assert seen[4] == record | {
        "state": "leased",
        "deliveries": 1,
        "node": 'a "worker"',
        "deadline": jobs[3]["deadline"],
    }
    assert (seen[2]["state"], seen[2]["deliveries"]) == ("waiting", 1)
    assert (seen[3]["state"], seen[3]["deliveries"]) == ("scheduled", 1)
    assert at_ms - FOREVER_MS / 2 < seen[3]["deliver_at"]
    assert (seen[5]["state"], seen[5]["deliveries"]) == ("waiting", 0)
    assert (seen[6]["state"], seen[6]["deliver_at"]) == ("scheduled", at_ms)
    assert (seen[7]["state"], seen[7]["deliver_at"]) == ("scheduled", seen[7]["$ts"] + FOREVER_MS)
    assert (seen[8]["state"], seen[8]["order_key"]) == ("waiting", "k")
    assert (seen[9]["state"], seen[9]["order_key"]) == ("behind", "k")
    assert states(client, topic, state="done") == {1: "done"}
    assert states(client, topic, state="leased") == {4: "leased"}
    assert counts(client, topic) == before
    assert ask(client, topic, "ack", 4, node='a "worker"', lease_ids=[jobs[3]["lease_id"]])["acked"] == 1


def test_a_peek_goes_on_where_it_stopped(client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(10))
    claim(client, topic, max=5)
    first = peek(client, topic, max=4)
    assert ([job["$seq"] for job in first["jobs"]], first["next_from_seq"]) == ([1, 2, 3, 4], 4)
    assert list(states(client, topic, from_seq=4)) == [5, 6, 7, 8, 9, 10]
    last = peek(client, topic, state="waiting", max=5)
    assert ([job["$seq"] for job in last["jobs"]], last.get("next_from_seq")) == ([6, 7, 8, 9, 10], None)
    assert states(client, topic, from_seq=10) == states(client, topic, from_seq=2**64 - 1) == {}


def test_a_peek_looks_at_so_many_records_at_most_and_says_where_to_go_on(client: httpx.Client, topic: str) -> None:
    looked = PEEK_LOOK_MAX * LOOKS_MAX
    put(client, topic, type="queue")
    for _ in range(looked // 1000 + 1):
        write(client, topic, *[0] * 1000)
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": "later", "delay_ms": FOREVER_MS}]}))
    found = peek(client, topic, state="scheduled")
    assert (found["jobs"], found["next_from_seq"]) == ([], looked)
    (job,) = peek(client, topic, state="scheduled", from_seq=looked)["jobs"]
    assert job["data"] == "later"


def test_a_peek_passes_over_what_is_done(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue", on_ack="keep")
    for _ in range(PEEK_LOOK_MAX * LOOKS_MAX // 1000 + 1):
        write(client, topic, *[0] * 1000)
        ask(client, topic, "ack", *seqs(claim(client, topic, max=1000)))
    write(client, topic, "the first that is there")
    answer = peek(client, topic, max=1)
    assert [job["data"] for job in answer["jobs"]] == ["the first that is there"]


def test_a_peek_that_is_longer_than_an_answer_is_cut(client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue")
    for _ in range(12):
        write(client, topic, "x" * 1_000_000)
    answer = peek(client, topic)
    assert 1 < answer["count"] < 12
    assert answer["next_from_seq"] == answer["jobs"][-1]["$seq"]
    assert list(states(client, topic, from_seq=answer["next_from_seq"]))[-1] == 12


@pytest.mark.parametrize("body", [{"state": "lost"}, {"max": -1}, {"from_seq": "1"}])
def test_a_peek_that_makes_no_sense_is_400(client: httpx.Client, topic: str, body: dict[str, Any]) -> None:
    put(client, topic, type="queue")
    error = refused(post(client, topic, "peek", **body), 400, "invalid_request")
    assert next(iter(body)) in json.dumps(error)


# -- /work


def test_work_sends_jobs_as_events_and_opens_with_retry(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic, {"n": 1}, 2)
    with Work(service.url, topic, max=1) as work:
        assert work.response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert work.response.headers["cache-control"] == "no-store"
        assert work.response.headers["x-accel-buffering"] == "no"
        assert work.next().raw == b"retry: 2000"
        frame = work.event("job")
        assert frame.id == "1"
        assert set(frame.json) == {"topic", "$seq", "lease_id", "deadline", "$ts", "deliveries", "data"}
        assert (frame.json["topic"], frame.json["data"]) == (topic, {"n": 1})
        assert counts(client, topic) == (1, 1, 0)


def test_work_keeps_up_to_max_jobs_and_refills_on_ack(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(10))
    with Work(service.url, topic, max=3) as work:
        first = work.jobs(3)
        assert seqs(first) == [1, 2, 3]
        until_counts(client, topic, 7, 3, 0)
        ask(client, topic, "ack", 2, lease_ids=[first[1]["lease_id"]])
        assert seqs(work.jobs(1)) == [4]
        assert counts(client, topic) == (6, 3, 0)


def test_work_refills_on_an_ack_through_any_frontend(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic, *range(40))
    with Work(service.url, topic, max=1) as work:
        for seq in range(1, 41):
            assert seqs(work.jobs(1)) == [seq]
            # A connection of its own: the kernel gives it to either frontend.
            with httpx.Client(base_url=service.url, timeout=TIMEOUT_S) as other:
                assert ask(other, topic, "ack", seq)["acked"] == 1
    until_counts(client, topic, 0, 0, 0)


def test_work_leases_for_lease_ms_or_for_the_queues_own(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic, 1, 2, lease_ms=500_000)
    for asked_ms, lease_ms in ((None, 500_000), (2**63, 86_400_000)):
        query: dict[str, Any] = {} if asked_ms is None else {"lease_ms": asked_ms}
        with Work(service.url, topic, headers=None, **query) as work:
            before_ms = now_ms()
            (job,) = work.jobs(1)
            assert -20_000 < job["deadline"] - before_ms - lease_ms < 20_000
            assert ask(client, topic, "ack", job["$seq"], lease_ids=[job["lease_id"]])["acked"] == 1


def test_work_gets_a_job_again_that_its_consumer_nacked_or_let_expire(
    service: Service, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, "job")
    with Work(service.url, topic, lease_ms=200) as work:
        (first,) = work.jobs(1)
        nacked = ask(client, topic, "nack", 1, lease_ids=[first["lease_id"]])["nacked"]
        assert nacked == 1 or now_ms() >= first["deadline"]
        (second,) = work.jobs(1)
        (third,) = work.jobs(1)  # nobody said anything
        assert now_ms() >= second["deadline"]
        assert [job["deliveries"] for job in (first, second, third)] == [1, 2, 3]
        assert len({job["lease_id"] for job in (first, second, third)}) == 3


def test_work_gets_jobs_that_are_written_later(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with Work(service.url, topic, max=2) as work:
        for n in range(1, 4):
            write(client, topic, n)
            assert [job["data"] for job in work.jobs(1)] == [n]
            ask(client, topic, "ack", n)


def test_work_gets_jobs_whose_lease_is_over_or_whose_time_has_come(
    service: Service, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, "once", lease_ms=150)
    claim(client, topic, node="lost")
    ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": "later", "delay_ms": 300}]}))
    with Work(service.url, topic, max=2, lease_ms=FOREVER_MS) as work:
        (again,) = work.jobs(1)
        assert (again["data"], again["deliveries"]) == ("once", 2)
        assert work.jobs(1)[0]["data"] == "later"


def test_when_the_connection_drops_its_leases_are_released_at_once(
    service: Service, client: httpx.Client, topic: str
) -> None:
    queue(client, topic, *range(4))
    with Work(service.url, topic, max=3, lease_ms=FOREVER_MS) as work:
        work.jobs(3)
        assert counts(client, topic) == (1, 3, 0)
    until_counts(client, topic, 4, 0, 0)
    assert [job["deliveries"] for job in claim(client, topic, max=4)] == [2, 2, 2, 1]


def test_work_is_idle_with_heartbeats(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with Work(service.url, topic, heartbeat_ms=20) as work:
        assert work.next().raw == b"retry: 2000"
        assert re.fullmatch(rb": hb \d{13}", work.next().raw)


def test_work_ends_when_the_queue_is_deleted(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    with Work(service.url, topic) as work:
        ok(client.delete(f"/v0/topics/{topic}"))
        assert work.event("topic-deleted").json == {"topic": topic, "reason": "deleted"}
        with pytest.raises(StopIteration):
            work.next()


def test_work_deals_evenly_among_streams(service: Service, client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    streams = [Work(service.url, topic, node=f"w{n}", max=10) for n in range(4)]
    try:
        write(client, topic, *range(20))
        shares = [seqs(stream.jobs(5)) for stream in streams]
    finally:
        for stream in streams:
            stream.close()
    assert sorted(seq for share in shares for seq in share) == list(range(1, 21))


def test_work_brings_jobs_to_the_dead_letters(service: Service, client: httpx.Client, topic: str) -> None:
    dead = f"{topic}-dead"
    queue(client, topic, "bad", "good", max_deliveries=1, dead_letter=dead)
    with Work(service.url, topic, max=1) as work:
        work.jobs(1)
        ask(client, topic, "nack", 1)
        assert work.jobs(1)[0]["data"] == "good"
        until_counts(client, topic, 0, 1, 1)
    assert [record.data for record in diff_records(client, dead)] == [b'"bad"']


@pytest.mark.parametrize("query", ["", "node=", "node=w&max=x", "node=w&lease_ms=-1"])
def test_work_that_makes_no_sense_is_400(client: httpx.Client, topic: str, query: str) -> None:
    queue(client, topic)
    refused(client.get(f"/v0/topics/{topic}/work?{query}"), 400, "invalid_request")


def test_work_needs_event_stream_and_has_no_head(client: httpx.Client, topic: str) -> None:
    queue(client, topic)
    path = f"/v0/topics/{topic}/work?node=w"
    refused(client.get(path, headers={"Accept": "application/json"}), 406, "not_acceptable")
    assert client.head(path).status_code == 405


def test_a_job_with_line_breaks_is_one_event(service: Service, client: httpx.Client, topic: str) -> None:
    put(client, topic, type="queue")
    ok(write_raw(client, topic, b'{"records":[{"data":{\n"a":\r\n1}}]}'))
    with Work(service.url, topic) as work:
        assert work.jobs(1)[0]["data"] == {"a": 1}


# -- state and figures


def test_the_state_of_a_log_has_no_queue_block(client: httpx.Client, topic: str) -> None:
    put(client, topic)
    assert "queue" not in state(client, topic)


def test_metrics_count_jobs_per_queue_and_leases_of_all(client: httpx.Client, topic: str) -> None:
    def alone(name: str) -> bool:
        queue(client, name, *range(5))
        before = leases_of_all(client)
        claim(client, name, max=2, lease_ms=FOREVER_MS)
        now = leases_of_all(client)
        text = client.get("/v0/metrics").text
        assert f'topics_topic_queue_ready{{topic="{name}"}} 3' in text
        assert f'topics_topic_queue_in_flight{{topic="{name}"}} 2' in text
        assert f'topics_topic_queue_dead_lettered{{topic="{name}"}} 0' in text
        return now == before + 2

    undisturbed("two leases more, while no lease of an earlier test ends", topic, alone)


def leases_of_all(client: httpx.Client) -> int:
    metrics = ok(client.get("/v0/metrics", headers={"Accept": "application/json"}))
    leases: int = metrics["topics_queue_leases_in_flight"]
    return leases


# -- many workers


def test_many_workers_over_http_and_work_do_every_job_once_and_share_them(
    service: Service, client: httpx.Client, topic: str
) -> None:
    """The bounded sample of 200 workers: nothing lost, nothing twice while no lease ends, nobody left out."""
    jobs, streams, pollers = 600, 6, 6
    queue(client, topic, *range(jobs), lease_ms=FOREVER_MS, claim_jitter_ms=5)
    done: dict[str, list[int]] = {}
    lock = threading.Lock()
    # Who has had some waits for the others: one whose frontend was stopped for a moment would find nothing left.
    all_have_some = threading.Barrier(streams + pollers)

    def finish(http: httpx.Client, node: str, got: list[dict[str, Any]]) -> None:
        answer = ask(http, topic, "ack", *seqs(got), node=node, lease_ids=[job["lease_id"] for job in got])
        assert answer["acked"] == len(got), answer
        with lock:
            is_first = node not in done
            done.setdefault(node, []).extend(seqs(got))
        if is_first:
            all_have_some.wait(30)

    def left() -> int:
        with lock:
            return jobs - sum(map(len, done.values()))

    def stream(n: int) -> None:
        with (
            httpx.Client(base_url=service.url, timeout=TIMEOUT_S) as http,
            Work(service.url, topic, node=f"s{n}", max=4) as work,
        ):
            while (frame := work.event()).event == "job":
                finish(http, f"s{n}", [frame.json])

    def polling(n: int) -> None:
        with httpx.Client(base_url=service.url, timeout=TIMEOUT_S) as http:
            while left():
                got = claim(http, topic, node=f"p{n}", max=4)
                if got:
                    finish(http, f"p{n}", got)

    threads = [threading.Thread(target=stream, args=(n,), daemon=True) for n in range(streams)]
    threads += [threading.Thread(target=polling, args=(n,), daemon=True) for n in range(pollers)]
    for thread in threads:
        thread.start()
    poll("every job to be done", lambda: not left() or None, 60)
    finished = sorted(seq for seqs_done in done.values() for seq in seqs_done)
    assert finished == list(range(1, jobs + 1))
    assert len(done) == streams + pollers, {node: len(of) for node, of in done.items()}
    until_counts(client, topic, 0, 0, 0)

    def ended(some: list[threading.Thread]) -> None:
        for thread in some:
            thread.join(20)
            assert not thread.is_alive()

    ended(threads[streams:])  # before there is no queue any more to claim from
    ok(client.delete(f"/v0/topics/{topic}"))
    ended(threads[:streams])


# -- a queue that a router copies into


@pytest.mark.long
def test_jobs_that_a_router_brought_stay_done_over_a_restart() -> None:
    with Service(shards=2, frontends=1) as service:
        put(service.client, "jobs", type="queue")
        ok(service.client.put("/v0/routers/r", json={"source": "events", "dest": "jobs"}))
        write(service.client, "events", *range(6))
        assert state(service.client, "jobs")["head_seq"] == 6
        jobs = claim(service.client, "jobs", max=4)
        assert [job["data"] for job in jobs] == [0, 1, 2, 3]
        ask(service.client, "jobs", "ack", 1, 3)
        assert ok(service.client.put("/v0/topics/jobs/cursors/c", json={"from_seq": 4}))["created"]
        for stop in (service.stop, service.kill_group):
            stop()
            service.start()
            assert [record.seq for record in diff_records(service.client, "jobs")] == [2, 4, 5, 6]
        assert seqs(claim(service.client, "jobs", max=10)) == [2, 4, 5, 6]
        answer = ok(service.client.post("/v0/topics/jobs/cursors/c/read", json={}))
        assert [record["data"] for record in answer["records"]] == [4, 5]
