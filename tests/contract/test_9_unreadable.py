"""api §9 where the record of a job cannot be read: it stands in nobody's way, neither on a stream nor on the way to the
dead letters.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.asking import state, write
from tests.contract.test_3_segments import EVENTS, RECORDS, sealed, serving
from tests.contract.working import Work, ask, claim, counts, queue, until_counts
from tests.harness import Service, poll

pytestmark = pytest.mark.long

BAD = 16
PUT_ASIDE = "a job cannot be read and is put aside"
ALL = list(range(1, RECORDS + 1))
FRONTENDS = 2
"""Each says it once a minute for all jobs of a topic."""


def fill(service: Service, topic: str) -> None:
    for first in range(0, RECORDS, 5):
        write(service.client, topic, *[{"n": first + n, "text": "x" * 50} for n in range(5)])


def damage(service: Service, topic: str, seq: int) -> None:
    """Changes a byte of a record that is in a sealed segment."""
    segment = sealed(service.client, topic)["segments"][(seq - 1) // EVENTS]
    path = Path(service.data_dir, segment["data_path"])
    at = path.read_bytes().index(b'{"n":%d,' % (seq - 1))
    with path.open("r+b") as file:
        file.seek(at + 20)
        file.write(b"!")


def work_through(service: Service, topic: str, most: int, count: int) -> list[int]:
    """The next so many jobs of one stream, each acknowledged as it comes."""
    done = []
    with Work(service.url, topic, max=most) as work:
        for _ in range(count):
            (job,) = work.jobs(1)
            done.append(job["$seq"])
            assert ask(service.client, topic, "ack", job["$seq"])["acked"] == 1
    return done


def said(service: Service) -> int:
    return service.log_path.read_text().count(PUT_ASIDE)


@pytest.mark.parametrize("most", [1, 8])
def test_a_damaged_job_takes_down_no_stream_and_holds_up_no_other_job(most: int) -> None:
    with serving() as service:
        queue(service.client, "q", on_ack="keep", lease_ms=3_600_000)
        fill(service, "q")
        damage(service, "q", BAD)
        assert work_through(service, "q", most, 30) == [seq for seq in ALL if seq != BAD][:30]
        poll("the leases of that stream to be free", lambda: counts(service.client, "q")[1] == 0)
        assert work_through(service, "q", most, RECORDS - 31) == [seq for seq in ALL if seq != BAD][30:]
        assert counts(service.client, "q") == (0, 0, 0)
        assert 1 <= said(service) <= FRONTENDS


def test_a_claim_that_meets_a_damaged_job_leaves_it_behind() -> None:
    with serving() as service:
        queue(service.client, "q", on_ack="keep", lease_ms=3_600_000)
        fill(service, "q")
        damage(service, "q", BAD)
        got = [job["$seq"] for job in claim(service.client, "q", max=20)]
        assert got == ALL[: BAD - 1]
        answer = service.client.post("/v0/topics/q/claim", json={"node": "w", "max": 20})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
        for _ in range(2):
            got += [job["$seq"] for job in claim(service.client, "q", max=20)]
        assert got == [seq for seq in ALL if seq != BAD]
        until_counts(service.client, "q", 0, RECORDS - 1, 0)
        assert 1 <= said(service) <= FRONTENDS


def test_jobs_that_only_a_cold_directory_had_hold_up_no_other_job() -> None:
    service = serving(TOPICS_HOT_RETAIN_SEGMENTS="1")
    service.env["TOPICS_COLD_DIR"] = str(service.root / "cold")
    with service:
        queue(service.client, "q", on_ack="keep", lease_ms=3_600_000)
        fill(service, "q")
        hot = service.data_dir / "topics"
        cold = service.root / "cold" / "topics"

        def relocated() -> list[Path] | None:
            found = sorted(cold.glob("*/*.data"))
            there = {path.name for path in hot.glob("*/*.data")}
            return found if len(found) >= 2 and not there.intersection(path.name for path in found) else None

        lost = poll("segments to be cold only", relocated, 20.0)[1]
        lost.unlink()
        gone = range(EVENTS + 1, 2 * EVENTS + 1)
        assert work_through(service, "q", 4, RECORDS - EVENTS) == [seq for seq in ALL if seq not in gone]
        assert counts(service.client, "q") == (0, 0, 0)
        assert 1 <= said(service) <= FRONTENDS


def test_an_unreadable_job_keeps_no_other_from_the_dead_letters() -> None:
    with serving() as service:
        queue(service.client, "q", leases_durable=True, max_deliveries=1, dead_letter="dead")
        fill(service, "q")
        assert len(claim(service.client, "q", max=RECORDS)) == RECORDS
        assert ask(service.client, "q", "nack", *ALL)["nacked"] == RECORDS
        damage(service, "q", BAD)
        service.restart()  # a process that has read a segment does not look at its checksums again

        def all_are_carried() -> bool:
            """A claim carries them; what could not be carried in time waits for another."""
            assert claim(service.client, "q", max=RECORDS) == []
            return counts(service.client, "q") == (0, 0, RECORDS - 1)

        poll("all but one to be dead letters", all_are_carried)
        assert state(service.client, "dead")["count"] == RECORDS - 1
        assert state(service.client, "q")["count"] == 1
        assert 1 <= said(service) <= FRONTENDS
