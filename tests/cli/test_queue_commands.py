"""`topics queue`: jobs through pipes."""

from __future__ import annotations

import pytest

from tests.cli.shell import Shell, values
from tests.contract.timing import now_ms
from tests.harness import poll
from topics.client import Client, NewRecord


@pytest.fixture
def mails(topics: Client, topic: str) -> str:
    topics.put_topic(topic, type="queue", max_deliveries=1, dead_letter=f"{topic}.dead")
    topics.append(topic, ["ann", "bob", "cy"])
    return topic


def counts(shell: Shell, queue: str) -> dict[str, int]:
    (answer,) = values(shell.ok("queue", queue, "counts"))
    return dict(answer)


def test_claim_work_ack_is_a_pipeline(shell: Shell, mails: str) -> None:
    claimed = shell.ok("queue", mails, "claim", "--max", "2")
    first, second = values(claimed)
    assert (first["$seq"], first["data"], first["deliveries"]) == (1, "ann", 1)
    assert first["lease_id"] != second["lease_id"]
    assert first["deadline"] > first["$ts"]
    assert counts(shell, mails) == {"ready": 1, "in_flight": 2, "dead_lettered": 0, "scheduled": 0}
    assert values(shell.ok("queue", mails, "ack", given=claimed)) == [{"acked": 2, "skipped": []}]
    assert [one["data"] for one in values(shell.ok("queue", mails, "peek"))] == ["cy"]


def test_jobs_go_back_to_whom_they_are_leased(shell: Shell, mails: str) -> None:
    jobs = shell.ok("queue", mails, "claim", "--node", "a") + shell.ok("queue", mails, "claim", "--node", "b")
    assert [one["node"] for one in values(jobs)] == ["a", "b"]
    assert values(shell.ok("queue", mails, "ack", given=jobs)) == [{"acked": 2, "skipped": []}]


def test_a_lease_that_is_another_is_refused(shell: Shell, mails: str) -> None:
    (job,) = values(shell.ok("queue", mails, "claim", "--node", "a"))
    name = f"{job['$seq']}:{job['lease_id']}"
    for wrong in ((name,), ("1:lease_0000000000000001", "--node", "a"), (f"2:{job['lease_id']}", "--node", "a")):
        done = shell.run("queue", mails, "ack", *wrong)
        assert done.returncode == 1
        assert values(done.stdout) == [{"acked": 0, "skipped": [int(wrong[0][0])]}]
        assert "not leased to this node" in done.stderr
    assert values(shell.ok("queue", mails, "ack", name, "--node", "a")) == [{"acked": 1, "skipped": []}]


@pytest.mark.long
def test_extend_and_nack(shell: Shell, topics: Client, mails: str) -> None:
    (job,) = values(shell.ok("queue", mails, "claim", "--lease-ms", "86400000"))
    name = f"{job['$seq']}:{job['lease_id']}"
    assert values(shell.ok("queue", mails, "extend", name, "--lease-ms", "100")) == [{"extended": 1, "skipped": []}]
    # With a lease of a day it would not come back by itself.
    poll("the lease to end", lambda: counts(shell, mails)["in_flight"] == 0, 30.0)

    topics.append(f"{mails}.b", ["dee"], config={"type": "queue"})
    (job,) = values(shell.ok("queue", f"{mails}.b", "claim"))
    name = f"{job['$seq']}:{job['lease_id']}"
    assert values(shell.ok("queue", f"{mails}.b", "nack", name)) == [{"nacked": 1, "skipped": []}]
    claimed = shell.ok("queue", f"{mails}.b", "claim")
    assert values(claimed)[0]["deliveries"] == 2
    shell.ok("queue", f"{mails}.b", "nack", "--delay-ms", "3600000", given=claimed)
    assert counts(shell, f"{mails}.b") == {"ready": 0, "in_flight": 0, "dead_lettered": 0, "scheduled": 1}
    assert shell.ok("queue", f"{mails}.b", "claim") == ""


def test_claim_waits_for_a_job(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic, type="queue")
    assert shell.ok("queue", topic, "claim", "--wait-s", "0.1") == ""
    due_ms = now_ms() + 4_000
    topics.append(topic, [NewRecord("later", delay_ms=4_000)])
    assert counts(shell, topic)["ready"] == 0 or now_ms() >= due_ms
    (job,) = values(shell.ok("queue", topic, "claim", "--wait-s", "50"))
    assert job["data"] == "later"


def test_redrive_brings_dead_letters_back(shell: Shell, mails: str) -> None:
    shell.ok("queue", mails, "nack", given=shell.ok("queue", mails, "claim", "--max", "3"))
    assert shell.ok("queue", mails, "claim") == ""  # the second delivery is the move
    poll("the move", lambda: counts(shell, mails)["dead_lettered"] == 3)
    dead = f"{mails}.dead"
    assert values(shell.ok("queue", mails, "redrive", "--max", "2")) == [{"redriven": 2, "from": dead}]
    assert values(shell.ok("queue", mails, "redrive", "--from", dead)) == [{"redriven": 1, "from": dead}]
    assert {one["data"] for one in values(shell.ok("queue", mails, "peek"))} == {"ann", "bob", "cy"}
    assert len(values(shell.ok("queue", mails, "peek", "-n", "1"))) == 1


def test_peek_says_where_each_job_stands(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic, type="queue", on_ack="keep")
    topics.append(topic, range(1_500))
    queue = topics.queue(topic)
    queue.ack(queue.claim(12).claimed)
    (job,) = values(shell.ok("queue", topic, "claim", "--node", "w"))
    first, second = values(shell.ok("queue", topic, "peek", "-n", "2"))
    said = (first["$seq"], first["data"], first["state"], first["deliveries"], first["node"], first["deadline"])
    assert said == (13, 12, "leased", 1, "w", job["deadline"])
    assert (second["$seq"], second["state"], second["deliveries"]) == (14, "waiting", 0)
    done = values(shell.ok("queue", topic, "peek", "--state", "done", "-n", "100"))
    assert [one["$seq"] for one in done] == [*range(1, 13)]
    behind = values(shell.ok("queue", topic, "peek", "--from-seq", "14", "-n", "2000"))
    assert [one["$seq"] for one in behind] == [*range(15, 1_501)]


@pytest.mark.long
def test_redrive_takes_as_many_requests_as_it_needs(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic, type="queue", max_deliveries=1, dead_letter=f"{topic}.dead")
    topics.append(topic, range(1_100))
    queue = topics.queue(topic)
    for _ in range(2):
        queue.nack(queue.claim(1_000).claimed)
    poll(
        "all to be dead letters",
        lambda: queue.claim(1_000).claimed == [] and counts(shell, topic)["dead_lettered"] == 1_100,
    )
    assert values(shell.ok("queue", topic, "redrive")) == [{"redriven": 1_100, "from": f"{topic}.dead"}]
    jobs = shell.ok("queue", topic, "claim", "--max", "1000") + shell.ok("queue", topic, "claim", "--max", "1000")
    assert values(shell.ok("queue", topic, "ack", given=jobs)) == [{"acked": 1_100, "skipped": []}]


def test_what_is_no_queue_and_what_is_no_job(shell: Shell, topics: Client, mails: str) -> None:
    topics.put_topic(f"{mails}.log")
    for verb in ("counts", "peek", "claim", "redrive"):
        done = shell.run("queue", f"{mails}.log", verb)
        assert done.returncode == 1
        assert f"topics queue {verb}: not_a_queue: " in done.stderr
    job = shell.ok("queue", mails, "claim")
    done = shell.run("queue", mails, "ack", given=job + '{"$seq": 2}\n')
    assert done.returncode == 2
    assert values(done.stdout) == [{"acked": 1, "skipped": []}]
    assert "line 2: is not a job like" in done.stderr
    assert values(shell.ok("queue", mails, "ack")) == [{"acked": 0, "skipped": []}]


def test_where_the_service_is_may_be_said_on_either_side(shell: Shell, mails: str) -> None:
    nowhere = ("--url", "http://127.0.0.1:1", "--patience-s", "0")
    assert shell.run("queue", *nowhere, mails, "counts").returncode == 3
    assert shell.run("queue", mails, "counts", *nowhere).returncode == 3
