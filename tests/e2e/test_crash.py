"""The whole path under SIGKILL: real events in, every process killed in turn, everything there, once, in order.

`make crash` runs 20 rounds (TOPICS_CRASH_ROUNDS). Each round prints its seed; the same one again:

    TOPICS_CRASH_SEED=<seed> pytest tests/e2e/test_crash.py -k replay
"""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import msgspec
import pytest

from tests.contract.asking import records_of, whole
from tests.harness import COMMAND, Service, is_running, poll

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "examples" / "data" / "commit-changes.ndjson.gz"
EVENTS = 28_069
TOPIC = "commits"
ROUNDS = int(os.environ.get("TOPICS_CRASH_ROUNDS", "1"))
ROUND_DEADLINE_S = 240.0
SEED = int(os.environ.get("TOPICS_CRASH_SEED", "0"))
"""Seed of all rounds; 0 for one of each."""


class Victim(msgspec.Struct, frozen=True):
    """A process to kill, once the topic's head has come to `at_head_seq`."""

    at_head_seq: int
    role: str
    index: int = 0


@pytest.fixture(scope="module")
def lines() -> list[bytes]:
    """The file's lines, as bytes."""
    whole = gzip.decompress(DATA.read_bytes()).split(b"\n")
    assert whole.pop() == b""
    assert len(whole) == EVENTS
    return whole


def plan(seed: int, service: Service) -> list[Victim]:
    """Each role in turn, in random order at random heads, and the whole group in between."""
    chance = random.Random(seed)
    victims = [("frontend", chance.randrange(service.frontends)), ("group", 0), ("compactor", 0)]
    victims += [("walshard", index) for index in range(service.shards)]
    chance.shuffle(victims)
    heads = sorted(chance.sample(range(200, EVENTS - 1500), len(victims)))
    return [Victim(head, role, index) for head, (role, index) in zip(heads, victims, strict=True)]


def example(name: str, service: Service, output: IO[bytes], *arguments: str) -> subprocess.Popen[bytes]:
    """One of the example programs, as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", f"examples.{name}", "--url", service.url, "--topic", TOPIC, *arguments],
        cwd=REPOSITORY,
        stdout=output,
        stderr=subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if not key.startswith("TOPICS_")},
    )


def committed_head_seq(service: Service) -> int | None:
    """The head as a reader sees it; None while it cannot be asked."""
    try:
        answer = service.client.get(f"/v0/topics/{TOPIC}?touch=false", timeout=2.0)
    except httpx.TransportError:
        return None
    return int(answer.json()["head_seq"]) if answer.status_code == 200 else None


def reach(service: Service, head_seq: int, replay: subprocess.Popen[bytes]) -> int:
    """Waits until the head is at least `head_seq`; the head seen."""

    def reached() -> int | None:
        assert replay.poll() in (None, 0), f"the replay ended with {replay.returncode}: {complaint(replay)}"
        head = committed_head_seq(service)
        return head if head is not None and head >= head_seq else None

    return poll(f"the head to reach {head_seq}", reached, ROUND_DEADLINE_S)


def complaint(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    return process.stderr.read().decode(errors="replace")


def finish(process: subprocess.Popen[bytes], name: str) -> str:
    """Waits for a program to end well; what it said on stderr."""
    _, said = process.communicate(timeout=ROUND_DEADLINE_S)
    assert process.returncode == 0, f"{name} ended with {process.returncode}: {said.decode(errors='replace')}"
    return said.decode()


def everything(client: httpx.Client, topic: str) -> Iterator[tuple[int, bytes, str | None]]:
    """(seq, data, tag) of all records, by diff."""
    cursor = 0
    while True:
        body = {"from_seq": cursor, "limit": 1000, "include_tags": True}
        answer = whole(lambda: client.post(f"/v0/topics/{topic}/diff", json=body))
        page = answer.json()
        assert page["tombstone"] is None
        yield from ((record.seq, record.data, record.tag) for record in records_of(answer.content))
        cursor = page["next_from_seq"]
        if page["caught_up"]:
            return


@pytest.mark.timeout(400)
@pytest.mark.parametrize("_number", range(ROUNDS))
def test_a_replay_and_a_follower_outlive_every_kill(_number: int, lines: list[bytes], tmp_path: Path) -> None:
    seed = SEED or random.SystemRandom().randrange(1, 2**32)
    print(f"TOPICS_CRASH_SEED={seed}")
    # Checkpoints all the while: what is read comes from logs and segments, sealed and active.
    env = {"TOPICS_CHECKPOINT_INTERVAL_MS": "100", "TOPICS_CHECKPOINT_WAL_BYTES": "256KiB"}
    env["TOPICS_SEGMENT_MAX_EVENTS"] = "3000"
    with Service(shards=2, frontends=2, env=env, command=COMMAND) as service:
        followed = tmp_path / "followed"
        with followed.open("wb") as output, (tmp_path / "said").open("wb") as said:
            follow = example("follow", service, output, "--count", str(EVENTS))
            replay = example("replay", service, said)
            try:
                for victim in plan(seed, service):
                    head = reach(service, victim.at_head_seq, replay)
                    print(f"head {head}: SIGKILL {victim.role} {victim.index}")
                    if victim.role == "group":
                        service.kill_group()
                        service.start()
                    else:
                        service.kill(victim.role, victim.index)
                print(finish(replay, "replay"), (tmp_path / "said").read_text())
                print(finish(follow, "follow"))
            finally:
                for process in (replay, follow):
                    process.kill()
                    process.wait()
        stored = list(everything(service.client, TOPIC))
        assert [seq for seq, _, _ in stored] == list(range(1, EVENTS + 1))
        assert [data for _, data, _ in stored] == lines
        assert stored[0][2] is None
        assert {"src", "tests", "deps"} <= {tag for _, _, tag in stored}
        delivered = [row.split(b"\t", 2) for row in followed.read_bytes().splitlines()]
        assert [int(seq) for seq, _, _ in delivered] == list(range(1, EVENTS + 1))
        assert [data for _, _, data in delivered] == lines


def test_the_supervisor_killed_alone_takes_its_children_along_and_the_log_stays(tmp_path: Path) -> None:
    with Service(shards=2, frontends=2, command=COMMAND) as service:
        acked = [service.client.post(f"/v0/topics/t{n % 4}", json={"records": [{"data": n}]}) for n in range(100)]
        assert {answer.status_code for answer in acked} == {200, 201}
        family = service.family()
        service.kill_supervisor()
        assert not any(is_running(pid) for pid in family)
        service.start()
        for topic in range(4):
            got = [data for _, data, _ in everything(service.client, f"t{topic}")]
            assert got == [str(n).encode() for n in range(100) if n % 4 == topic]
