"""`topics write`: what comes in by a pipe is in the topic, once, and what is not is said."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import termios
import threading

import pytest

from tests.cli.shell import DEADLINE_S, Shell, values
from tests.harness import Service, poll
from topics.client import Client, NotFoundError, Record


def data_of(topics: Client, topic: str) -> list[bytes]:
    """Return the records of a topic, none while there is no topic."""
    try:
        return [bytes(item.raw) for item in topics.read(topic) if isinstance(item, Record)]
    except NotFoundError:
        return []


def test_each_line_is_the_data_of_a_record_byte_for_byte(shell: Shell, topics: Client, topic: str) -> None:
    lines = [b'{"a": 1.50,  "a":"\\u00e9"}', '"é"'.encode(), b"null", b"[1,\t2]", b"1e3"]
    out = shell.ok("write", topic, "--tag", "t", "--node", "n", given=b"\r\n".join(lines) + b"\n\n")
    assert values(out) == [{"first_seq": 1, "last_seq": 5, "count": 5}]
    assert data_of(topics, topic) == lines
    assert {(item.tag, item.node) for item in topics.read(topic) if isinstance(item, Record)} == {("t", "n")}


def test_nothing_in_nothing_written(shell: Shell, topics: Client, topic: str) -> None:
    assert values(shell.ok("write", topic, given="\n")) == [{"first_seq": None, "last_seq": None, "count": 0}]
    assert data_of(topics, topic) == []


def test_batches_and_what_is_written_before_a_bad_line(shell: Shell, topics: Client, topic: str) -> None:
    given = "".join(f"{number}\n" for number in range(1, 8)) + "{no\n9\n"
    done = shell.run("write", topic, "--batch-records", "3", given=given)
    assert done.returncode == 2
    assert values(done.stdout) == [{"first_seq": 1, "last_seq": 7, "count": 7}]
    first, second = done.stderr.splitlines()
    assert first == "topics write: lines 1 to 7 are written"
    assert second.startswith("topics write: line 8: is not JSON: ")
    assert second.endswith(" at byte 1: {no")
    assert data_of(topics, topic) == [b"%d" % number for number in range(1, 8)]


def test_a_batch_that_is_refused_is_named_by_its_lines(shell: Shell, topics: Client, topic: str) -> None:
    topics.put_topic(topic, discard="reject", cap_records=2)
    done = shell.run("write", topic, "--batch-records", "1", given="1\n2\n3\n4\n")
    assert done.returncode == 1
    assert values(done.stdout) == [{"first_seq": 1, "last_seq": 2, "count": 2}]
    first, second = done.stderr.splitlines()
    assert first == "topics write: lines 1 to 2 are written, lines 3 to 3 are not"
    assert second.startswith("topics write: topic_full: ")


def test_a_pipe_that_trickles_is_written_promptly(shell: Shell, topics: Client, topic: str) -> None:
    with shell.begin("write", topic, stdin=subprocess.PIPE) as writing:
        assert writing.stdin is not None
        for number in range(3):
            writing.stdin.write(b"%d\n" % number)
            expected = [b"%d" % earlier for earlier in range(number + 1)]
            poll("the line to be in the topic", lambda: data_of(topics, topic) == expected, 30.0)
        writing.stdin.close()
        assert writing.wait(DEADLINE_S) == 0


def test_whole_records_from_one_topic_to_another(shell: Shell, topics: Client, topic: str) -> None:
    given = '{"data":{"n":1},"tag":"a","node":"x","meta":{"k":"v"}}\n{"data": [ ],"tag":"b"}\n{"data":3}\n'
    shell.ok("write", topic, "--records", given=given)
    read = shell.ok("read", topic)
    shell.ok("write", f"{topic}.copy", "--records", given=read)
    copied = values(shell.ok("read", f"{topic}.copy"))
    assert [one | {"$ts": 0} for one in copied] == [one | {"$ts": 0} for one in values(read)]
    assert copied[0] == {
        "$seq": 1,
        "$ts": copied[0]["$ts"],
        "data": {"n": 1},
        "$tag": "a",
        "$node": "x",
        "meta": {"k": "v"},
    }


def test_the_same_input_again_writes_only_what_is_missing(shell: Shell, topics: Client, topic: str) -> None:
    rows = [f'{{"id":"{number}"}}\n' for number in range(4)]
    shell.ok("write", topic, "--key-of", "id", given="".join(rows[:2]))
    out = shell.ok("write", topic, "--key-of", "id", given="".join(rows))
    assert values(out) == [{"first_seq": 1, "last_seq": 4, "count": 4, "deduped": 2}]
    assert data_of(topics, topic) == [row.strip().encode() for row in rows]
    done = shell.run("write", topic, "--key-of", "id", given='{"id":"9"}\n{"no":1}\n')
    assert done.returncode == 2
    assert "line 2: has no text or number in the field 'id'" in done.stderr


def test_durability_is_of_a_topic_that_is_made(shell: Shell, topics: Client, topic: str) -> None:
    shell.ok("write", topic, "--durability", "fsync", given="1\n")
    assert topics.get_topic(topic).config["durability"] == "fsync"
    done = shell.run("write", topic, "--durability", "memory", given="2\n")
    assert done.returncode == 0
    assert done.stderr == f"topics write: topic {topic!r} exists and stays fsync, not memory\n"


def test_the_configuration_of_a_topic_that_is_made(shell: Shell, topics: Client, topic: str) -> None:
    shell.ok("write", topic, "--config", '{"type": "queue", "lease_ms": 700}', "--durability", "fsync", given="1\n")
    config = topics.get_topic(topic).config
    assert (config["type"], config["lease_ms"], config["durability"]) == ("queue", 700, "fsync")
    refused = shell.run("write", f"{topic}.b", "--config", '{"type": "heap"}', given="1\n")
    assert (refused.returncode, "invalid_request" in refused.stderr) == (1, True)
    assert shell.run("write", topic, "--config", "queue", given="2\n").returncode == 2


@pytest.mark.parametrize("lost", [True, False])
def test_a_refused_key_after_a_lost_answer_says_nothing_of_the_write(shell: Shell, topic: str, lost: bool) -> None:
    body = b'{"error":{"code":"unauthorized","message":"the key is not one that is valid here"}}'
    refusal = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for told in [b"", refusal] if lost else [refusal]:
                client, _ = listener.accept()
                with client:
                    client.recv(1 << 16)
                    client.sendall(told)

        answering = threading.Thread(target=answer)
        answering.start()
        done = shell.run("write", topic, "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", given="1\n")
        answering.join()
    assert done.returncode == 1
    known = "it is not known whether lines 1 to 1 are" if lost else "lines 1 to 1 are not"
    assert known in done.stderr.splitlines()[0]


def test_no_create(shell: Shell, topic: str) -> None:
    done = shell.run("write", topic, "--no-create", given="1\n")
    assert done.returncode == 1
    assert "no line was written, lines 1 to 1 are not" in done.stderr
    assert "topic_not_found" in done.stderr


@pytest.mark.parametrize(
    ("told", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_an_interruption_says_what_is_written(
    shell: Shell, topics: Client, topic: str, told: signal.Signals, code: int
) -> None:
    with shell.begin("write", topic, stdin=subprocess.PIPE) as writing:
        assert writing.stdin is not None
        assert writing.stdout is not None
        assert writing.stderr is not None
        writing.stdin.write(b"1\n2\n")
        poll("two lines to be in the topic", lambda: len(data_of(topics, topic)) == 2, 30.0)
        writing.stdin.write(b"3\n")
        poll("another line to be in the topic", lambda: len(data_of(topics, topic)) == 3, 30.0)
        writing.send_signal(told)
        assert writing.wait(DEADLINE_S) == code
        (summary,) = values(writing.stdout.read().decode())
        said = writing.stderr.read().decode()
    # The last line is in the topic; whether its answer had come is a matter of luck, and what is said goes by that.
    assert (summary["count"], said) in (
        (3, "topics write: lines 1 to 3 are written\n"),
        (2, "topics write: lines 1 to 2 are written; it is not known whether lines 3 to 3 are\n"),
    )


def test_progress_is_for_a_terminal(shell: Shell, topic: str) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    try:
        with shell.begin("write", topic, stdin=subprocess.PIPE, stderr=theirs) as writing:
            assert writing.stdin is not None
            stdin = writing.stdin
            os.set_blocking(ours, False)

            def shown() -> bool:
                stdin.write(b"1\n")
                try:
                    return b" records [" in os.read(ours, 1000)
                except BlockingIOError:
                    return False

            poll("a count on the terminal", shown, 30.0)
            stdin.close()
            assert writing.wait(DEADLINE_S) == 0
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.long
def test_nothing_is_lost_or_doubled_when_processes_are_killed(topic: str) -> None:
    with Service(shards=1, frontends=1) as service, Client(service.url) as topics:
        numbers = [b"%d" % number for number in range(6_000)]  # fits into a pipe: they wait there
        pids = [service.pid_of("walshard"), service.pid_of("frontend")]
        arguments = ("write", topic, "--patience-s", "60", "--batch-records", "10")
        with Shell(service).begin(*arguments, stdin=subprocess.PIPE) as writing:
            assert writing.stdin is not None
            writing.stdin.write(b"\n".join(numbers))
            writing.stdin.close()
            written = 0
            for pid in pids:
                written = poll("more to be in the topic", lambda: head_above(topics, topic, written), 30.0)
                os.kill(pid, signal.SIGKILL)
                assert written < len(numbers), "it was done before anything was killed"
            assert writing.wait(DEADLINE_S) == 0
        assert data_of(topics, topic) == numbers


def head_above(topics: Client, topic: str, seq: int) -> int | None:
    try:
        head_seq = topics.get_topic(topic).head_seq
    except NotFoundError:
        return None
    return head_seq if head_seq > seq else None
