"""`topics read` and `topics tail`: records as lines, gaps as lines and as exit code 5, quiet ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import IO, Any

import pytest

from tests.cli.shell import DEADLINE_S, Shell, values
from tests.harness import Service, poll
from topics.client import Client, NewRecord


def line_of(stream: IO[bytes] | None) -> Any:
    assert stream is not None
    return json.loads(stream.readline())


def datas(lines: str) -> list[Any]:
    return [one["data"] for one in values(lines)]


def test_read_from_a_position(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [NewRecord(number, tag="t") for number in range(1, 6)])
    assert [one["$seq"] for one in values(shell.ok("read", topic))] == [1, 2, 3, 4, 5]
    assert datas(shell.ok("read", topic, "--from", "2", "--limit", "2")) == [3, 4]
    assert shell.ok("read", topic, "--from", "3", "--data-only") == "4\n5\n"
    assert shell.ok("read", topic, "--from", "5") == ""


def test_read_from_a_time(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1])
    (first,) = values(shell.ok("read", topic))

    def later() -> bool:
        topics.append(topic, [2])
        return values(shell.ok("read", topic))[-1]["$ts"] > int(first["$ts"])

    poll("the clock to go on", later)
    read = values(shell.ok("read", topic, "--from-ts", str(first["$ts"] + 1)))
    assert read
    assert all(one["data"] == 2 and one["$ts"] > first["$ts"] for one in read)
    assert values(shell.ok("read", topic, "--from-ts", "1970-01-01"))[0] == first


def test_read_over_many_pages(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, range(2_500))
    assert datas(shell.ok("read", topic)) == list(range(2_500))
    assert datas(shell.ok("read", topic, "--limit", "1500")) == list(range(1_500))


@pytest.mark.parametrize(("options", "last_seq"), [((), 2_500), (("--until-head",), 1_500)])
def test_until_head_is_the_head_of_the_start(
    shell: Shell, topics: Client, topic: str, options: tuple[str, ...], last_seq: int
) -> None:
    topics.append(topic, ["x" * 500] * 1_500)
    with shell.begin("read", topic, *options) as reading:
        # The first page is more than a pipe holds: it waits, and sees what is written now at its second.
        assert line_of(reading.stdout)["$seq"] == 1
        topics.append(topic, range(1_000))
        assert reading.stdout is not None
        rest = values(reading.stdout.read().decode())
        assert reading.wait(DEADLINE_S) == 0
    assert [one["$seq"] for one in rest] == list(range(2, last_seq + 1))


def test_a_gap_is_a_line_and_exit_code_5(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=3)
    topics.append(topic, range(1, 4))
    topics.append(topic, range(4, 6))
    done = shell.run("read", topic)
    assert done.returncode == 5
    gap, *records = values(done.stdout)
    assert gap["tombstone"].items() >= {"gap_from": 1, "gap_to": 2, "reason": "cap"}.items()
    assert [one["data"] for one in records] == [3, 4, 5]
    assert done.stderr == ""

    done = shell.run("read", topic, "--data-only")
    assert (done.returncode, done.stdout) == (5, "3\n4\n5\n")
    (gap,) = values(done.stderr)
    assert (gap["topic"], gap["tombstone"]["gap_to"]) == (topic, 2)
    assert shell.run("read", topic, "--from", "2").returncode == 0


def test_head_has_seen_enough(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, ["x" * 1000] * 2_000)  # more than a pipe holds
    with shell.begin("read", topic) as reading:
        assert line_of(reading.stdout)["$seq"] == 1
        assert reading.stdout is not None
        assert reading.stderr is not None
        reading.stdout.close()
        assert reading.wait(DEADLINE_S) == 141
        assert reading.stderr.read() == b""


def test_a_full_disk_ends_in_one_line(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1])
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with shell.begin("read", topic, stdout=full) as reading:
            assert reading.stderr is not None
            said = reading.stderr.read().decode()
            assert reading.wait(DEADLINE_S) == 2
    finally:
        os.close(full)
    assert said == "topics read: cannot write to stdout: No space left on device\n"


def test_tail_without_an_output_ends(shell: Shell, topic: str) -> None:
    """It read on for ever. `sh` closes stdout, as `nohup … >&-` does."""
    with shell.begin("tail", "-f", topic, before=("sh", "-c", 'exec "$@" >&-', "sh")) as tailing:
        assert tailing.stderr is not None
        assert tailing.stderr.read() == b"topics tail: cannot write to stdout: it is closed\n"
        assert tailing.wait(DEADLINE_S) == 2


def test_tail_prints_the_last_ones(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, range(1, 31))
    assert datas(shell.ok("tail", topic)) == list(range(21, 31))
    assert datas(shell.ok("tail", "-n", "2", topic)) == [29, 30]
    assert datas(shell.ok("tail", "-n", "100", topic)) == list(range(1, 31))
    assert shell.ok("tail", "-n", "0", topic) == ""
    assert shell.ok("tail", "-n", "1", "--data-only", topic) == "30\n"


def test_tail_of_more_than_there_can_be_prints_all(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, range(3))
    assert [record["data"] for record in values(shell.ok("tail", topic, "-n", "9" * 30))] == [0, 1, 2]
    topics.put_topic(f"{topic}.empty")
    assert not shell.ok("tail", f"{topic}.empty", "-n", "9" * 30)


def test_tail_looks_further_back_where_records_were_deleted(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [NewRecord(number, tag="keep" if number in (1, 3, 5) else "drop") for number in range(1, 41)])
    topics.delete_records(topic, match="drop")
    assert datas(shell.ok("tail", "-n", "2", topic)) == [3, 5]
    assert datas(shell.ok("tail", "-n", "9", topic)) == [1, 3, 5]


def test_tail_of_several_topics(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1, 2])
    topics.append(f"{topic}.b", [3])
    assert [(one["topic"], one["data"]) for one in values(shell.ok("tail", "-n", "1", topic, f"{topic}.b"))] == [
        (topic, 2),
        (f"{topic}.b", 3),
    ]


def test_tail_follows_until_ctrl_c(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1, 2])
    with shell.begin("tail", "-f", "-n", "1", topic) as tail:
        assert line_of(tail.stdout)["data"] == 2
        for number in (3, 4):
            topics.append(topic, [number])
            assert line_of(tail.stdout)["data"] == number
        tail.send_signal(signal.SIGINT)
        assert tail.wait(DEADLINE_S) == 130
        assert tail.stderr is not None
        assert tail.stderr.read() == b""


def test_tail_goes_on_until_its_topics_are_deleted(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic)
    topics.append(f"{topic}.b", [1])
    with shell.begin("tail", "-f", topic, f"{topic}.b") as tail:
        assert line_of(tail.stdout)["data"] == 1
        topics.append(topic, [2])
        line = line_of(tail.stdout)
        assert (line["topic"], line["data"]) == (topic, 2)
        topics.delete_topic(topic)
        topics.delete_topic(f"{topic}.b")
        assert tail.wait(DEADLINE_S) == 0
        assert tail.stderr is not None
        said = sorted(tail.stderr.read().decode().splitlines())
        assert said == sorted(f"topics tail: topic {name!r} was deleted" for name in (topic, f"{topic}.b"))


@pytest.mark.long
def test_tail_outlives_a_restart_of_the_service(topic: str) -> None:
    with Service(shards=1, frontends=1) as service, Client(service.url) as topics:
        topics.append(topic, [1])
        with Shell(service).begin("tail", "-f", "--patience-s", "60", topic) as tail:
            assert line_of(tail.stdout)["data"] == 1
            topics.append(topic, [2])
            assert line_of(tail.stdout)["data"] == 2
            service.kill_group()
            service.start()
            topics.append(topic, [3])
            line = line_of(tail.stdout)
            assert (line["$seq"], line["data"]) == (3, 3)
            tail.send_signal(signal.SIGINT)
            assert tail.wait(DEADLINE_S) == 130


def test_tail_ends_with_its_reader_though_nothing_is_written(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1])
    with shell.begin("tail", "-f", topic) as tail:
        assert line_of(tail.stdout)["data"] == 1
        assert tail.stdout is not None
        tail.stdout.close()
        assert tail.wait(DEADLINE_S) == 141


def test_tail_tells_of_gaps_and_ends_with_5(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=2)
    topics.append(topic, [1])
    with shell.begin("tail", "-f", topic, stdout=subprocess.PIPE) as tail:
        assert line_of(tail.stdout)["data"] == 1
        tail.send_signal(signal.SIGSTOP)
        try:
            for number in range(2, 8):
                topics.append(topic, [number])
            # It may have been sent some of them, and gaps, before the cap took others; of a write above the cap it
            # never was.
            topics.append(topic, range(100, 110))
        finally:
            tail.send_signal(signal.SIGCONT)
        lines = [line_of(tail.stdout)]
        while lines[-1].get("data") != 109:
            lines.append(line_of(tail.stdout))
        gap = [line["tombstone"] for line in lines if "tombstone" in line][-1]
        assert gap["gap_to"] >= 15
        topics.delete_topic(topic)
        assert tail.wait(DEADLINE_S) == 5
