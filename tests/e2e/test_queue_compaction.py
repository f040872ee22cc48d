"""Queues and cursors of a service whose log is cut all the time, killed as a whole: what was done stays done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import ok, put, state, write
from tests.contract.working import Work, ask, claim, seqs, until_counts
from tests.e2e.test_compaction import EAGER, compactor, data_files, quiet, recovered
from tests.e2e.test_kill_points import verify
from tests.harness import Service, poll

HOUR_MS = 3_600_000
JOBS = 600


def fill(client: httpx.Client, topic: str) -> None:
    for first in range(1, JOBS + 1, 100):
        write(client, topic, *[f"{n:04d}" + "x" * 300 for n in range(first, first + 100)])


def ack(client: httpx.Client, topic: str, jobs: list[dict[str, Any]]) -> None:
    answer = ask(client, topic, "ack", *seqs(jobs), lease_ids=[job["lease_id"] for job in jobs])
    assert answer["acked"] == len(jobs)


def read(client: httpx.Client, topic: str, cursor: str, limit: int) -> list[int]:
    """Return the next records of a reader of a named cursor."""
    answer = ok(client.post(f"/v0/topics/{topic}/cursors/{cursor}/read", json={"limit": limit}))
    return [record["$seq"] for record in answer["records"]]


@pytest.mark.parametrize("shards_after", [1, 3])
def test_what_was_acked_nacked_leased_and_read_is_so_after_every_kill(shards_after: int) -> None:
    with Service(shards=1, frontends=1, env=EAGER) as service:
        topics = {"q": "delete", "keep": "keep"}
        for name, on_ack in topics.items():
            put(service.client, name, type="queue", lease_ms=HOUR_MS, leases_durable=True, on_ack=on_ack)
            fill(service.client, name)
            made = service.client.put(
                f"/v0/topics/{name}/cursors/c", json={"from_seq": 0, "consistency": "strictly_at_once"}
            )
            assert made.status_code == 201
        done: set[int] = set()
        leased: set[int] = set()
        for turn in range(4):
            for name in topics:
                jobs = claim(service.client, name, max=60)
                assert len(jobs) == 60
                assert not {*seqs(jobs)} & (done | leased), "what is done or leased was handed out again"
                ack(service.client, name, jobs[0:50:2])
                ask(service.client, name, "nack", *seqs(jobs[50:55]))
            now_done = {*seqs(jobs[0:50:2])}
            live = [seq for seq in range(1, JOBS + 1) if seq not in done | now_done]
            assert read(service.client, "keep", "c", 40) == list(range(40 * turn + 1, 40 * turn + 41))
            ahead = 450 + 10 * turn  # beyond what is acked
            service.client.put(
                "/v0/topics/q/cursors/c", json={"from_seq": ahead, "consistency": "strictly_at_once"}
            ).raise_for_status()
            assert read(service.client, "q", "c", 5) == [seq for seq in live if seq > ahead][:5]
            done |= now_done
            leased |= {*seqs(jobs)} - now_done - {*seqs(jobs[50:55])}
            if turn % 2 == 0:
                quiet(service)
            service.kill_group()
            verify(service.data_dir)
            if turn == 3:
                service.shards = shards_after
            service.start()
            for name in topics:
                until_counts(service.client, name, JOBS - len(done) - len(leased), len(leased), 0)
            assert state(service.client, "q")["count"] == JOBS - len(done)
            assert state(service.client, "keep")["count"] == JOBS
        assert read(service.client, "keep", "c", 5) == list(range(161, 166))
        rest = claim(service.client, "q", max=1000)
        assert {*seqs(rest)} == {*range(1, JOBS + 1)} - done - leased
        assert all(job["$seq"] == int(job["data"][:4]) for job in rest), "the jobs are those that were written"
        ack(service.client, "q", rest)
        assert ask(service.client, "q", "ack", *sorted(leased))["acked"] == len(leased), "leases are durable"
        until_counts(service.client, "q", 0, 0, 0)
        quiet(service)
        service.restart()
        assert recovered(service)[-1]["frames"] < 200, "a start reads the snapshot, not all that happened"
        until_counts(service.client, "q", 0, 0, 0)
        service.stop()
        verify(service.data_dir)


def test_a_backlog_in_the_cold_tier_is_worked_off_by_claims_and_streams(tmp_path: Path) -> None:
    cold = {"TOPICS_COLD_DIR": str(tmp_path), "TOPICS_HOT_RETAIN_SEGMENTS": "1"}
    with Service(shards=1, frontends=1, env=EAGER | cold) as service:
        put(service.client, "q", type="queue", lease_ms=HOUR_MS)
        fill(service.client, "q")
        poll("relocation", lambda: compactor(service).segments_relocated >= 4, 30)
        poll("the hot copies to go", lambda: len(data_files(service.data_dir)) <= 2, 30)
        jobs = claim(service.client, "q", max=250)
        assert [int(job["data"][:4]) for job in jobs] == seqs(jobs) == list(range(1, 251))
        ack(service.client, "q", jobs)
        with Work(service.url, "q", max=50) as work:
            for first in range(251, JOBS + 1, 50):
                dealt = work.jobs(50)
                assert [int(job["data"][:4]) for job in dealt] == seqs(dealt) == list(range(first, first + 50))
                ack(service.client, "q", dealt)
        until_counts(service.client, "q", 0, 0, 0)
        poll("the cold copies to go", lambda: not data_files(tmp_path), 30)
