"""`topics list` and `topics delete`; and what every client command has: addresses, keys, exit codes, help."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import DEADLINE_S, ROOT, Shell, values
from tests.harness import Service, clean_environment
from topics.cli.main import COMMANDS
from topics.client import Client, NewRecord, NotFoundError, Record

OF_CLIENT = ("write", "read", "tail", "list", "delete", "create", "apply", "lag", "top", "bench", "doctor")
OF_FILES = ("verify", "backup", "restore", "archive")
WITH_VERBS = {"queue": ("t", "claim"), "router": ("list",), "cursor": ("t", "list")}


def test_list(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(f"{topic}.a", range(3))
    topics.delete_records(f"{topic}.a", before_seq=3)
    topics.put_topic(f"{topic}.b", type="queue", durability="fsync")
    heading, *rows = (line.split() for line in shell.ok("list", f"{topic}.").splitlines())
    assert heading == ["TOPIC", "TYPE", "CLASS", "RECORDS", "BYTES", "HEAD", "OLDEST"]
    size = str(topics.get_topic(f"{topic}.a").bytes)
    assert rows == [
        [f"{topic}.a", "log", "disk", "1", size, "3", "3"],
        [f"{topic}.b", "queue", "fsync", "0", "0", "0", "-"],
    ]
    assert shell.ok("list", f"{topic}.", "--names") == f"{topic}.a\n{topic}.b\n"
    states = values(shell.ok("list", f"{topic}.", "--json"))
    assert [(one["topic"], one["head_seq"], one["config"]["type"]) for one in states] == [
        (f"{topic}.a", 3, "log"),
        (f"{topic}.b", 0, "queue"),
    ]
    assert shell.ok("list", f"{topic}.none").splitlines() == ["TOPIC  TYPE  CLASS  RECORDS  BYTES  HEAD  OLDEST"]


def left(topics: Client, topic: str) -> list[int]:
    return [item.seq for item in topics.read(topic) if isinstance(item, Record)]


def test_delete_records(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [NewRecord(number, tag=f"t{number % 2}:x") for number in range(8)])
    (gone,) = values(shell.ok("delete", topic, "--before", "3"))
    assert (gone["deleted"], gone["earliest_seq"], gone["count"]) == (2, 3, 6)
    (gone,) = values(shell.ok("delete", topic, "--before", "6", "--match", "t0:*"))
    assert gone["deleted"] == 2
    assert left(topics, topic) == [4, 6, 7, 8]
    (gone,) = values(shell.ok("delete", topic, "--match", "t1:x"))
    assert gone["deleted"] == 3


def test_delete_a_topic(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1])
    done = shell.run("delete", topic, "--topic", "--if-empty")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("topics delete: topic_not_empty: ")
    answer = {"topic": topic, "deleted": True, "routers_removed": []}
    assert values(shell.ok("delete", topic, "--topic")) == [answer]
    assert values(shell.ok("delete", topic, "--topic")) == [{**answer, "deleted": False}]
    with pytest.raises(NotFoundError):
        topics.get_topic(topic)


@pytest.mark.parametrize("options", [(), ("--topic", "--before", "3"), ("--before", "1", "--if-empty")])
def test_delete_has_to_be_told_what(shell: Shell, topics: Client, topic: str, options: tuple[str, ...]) -> None:
    topics.append(topic, [1])
    assert shell.run("delete", topic, *options).returncode == 2
    assert left(topics, topic) == [1]


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"\n", 1), (b"y\n", 0)])
def test_delete_asks_on_a_terminal(shell: Shell, topics: Client, topic: str, answer: bytes, code: int) -> None:
    topics.append(topic, [1, 2])
    ours, theirs = pty.openpty()
    try:
        with shell.begin("delete", topic, "--before", "2", stdin=theirs) as deleting:
            os.write(ours, answer)
            assert deleting.wait(DEADLINE_S) == code
            assert deleting.stderr is not None
            asked = deleting.stderr.read().decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert f"Delete the records below seq 2 of topic {topic!r}, which has 2 records (seq 1 to 2)? [y/N]" in asked
    assert left(topics, topic) == ([2] if code == 0 else [1, 2])


def test_delete_does_not_ask_after_yes(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1])
    ours, theirs = pty.openpty()
    try:
        with shell.begin("delete", topic, "--topic", "--yes", stdin=theirs) as deleting:
            assert deleting.wait(DEADLINE_S) == 0
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_refusal_has_its_code_and_its_message(shell: Shell) -> None:
    done = shell.run("read", "no-such-topic")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "topics read: topic_not_found: topic 'no-such-topic' does not exist\n"


def test_no_service(shell: Shell) -> None:
    done = shell.run("list", "--url", "http://127.0.0.1:1", "--patience-s", "0")
    assert (done.returncode, done.stdout) == (3, "")
    assert "http://127.0.0.1:1" in done.stderr
    assert "TOPICS_URL" in done.stderr
    assert shell.run("list", "--patience-s", "0", env={"TOPICS_URL": "http://127.0.0.1:1"}).returncode == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("read", "t", "--url", "localhost:4000"), "localhost:4000"),
        (("read", "t", "--key-file", "/no/such/file"), "/no/such/file"),
        (("read", "t", "--key-file", "/dev/null"), "/dev/null"),
        (("read", "t", "--from", "-1"), "--from"),
        (("read", "t", "--from-ts", "soon"), "'soon' is no time: write 2026-03-01T12:00:00Z, or ms since 1970"),
        (("read", "t", "--limit", "0"), "--limit"),
        (("top", "--every-s", "soon"), "'soon' is not a number from 0"),
        (("queue", "t", "claim", "--wait-s", "nan"), "'nan' is not a number from 0"),
        (("write", "t", "--durability", "maybe"), "maybe"),
        (("write", "t", "--patience-s", "120"), "idempotency_window_ms"),
        (("queue", "t", "ack", "7"), "SEQ:LEASE_ID"),
        (("queue", "t"), "VERB"),
    ],
)
def test_usage(shell: Shell, arguments: tuple[str, ...], named: str) -> None:
    done = shell.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr


@pytest.mark.long
def test_keys_come_from_files(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    with Service(shards=1, frontends=1, env={"TOPICS_API_KEYS": "first-key:rw,last-key:d"}) as service:
        shell = Shell(service)
        key_file.write_text("first-key\n")
        assert shell.ok("write", "t", "--key-file", str(key_file), given="1\n")
        assert shell.run("read", "t", env={"TOPICS_KEY_FILE": str(key_file)}).returncode == 0
        for arguments, code in ((("read", "t"), "unauthorized"), (("delete", "t", "--topic"), "forbidden")):
            env = {"TOPICS_KEY_FILE": str(key_file)} if code == "forbidden" else {}
            refused = shell.run(*arguments, env=env)
            assert refused.returncode == 1
            assert f"topics {arguments[0]}: {code}: " in refused.stderr
        key_file.write_text("last-key")
        # Asked on a terminal, who may delete but not read is asked without the numbers.
        ours, theirs = pty.openpty()
        try:
            with shell.begin("delete", "t", "--topic", "--key-file", str(key_file), stdin=theirs) as deleting:
                os.write(ours, b"yes\n")
                assert deleting.wait(DEADLINE_S) == 0
                assert deleting.stderr is not None
                assert deleting.stderr.read().decode() == "Delete all of topic 't'? [y/N] "
        finally:
            os.close(ours)
            os.close(theirs)
        key_file.write_text("two keys")
        broken = shell.run("read", "t", "--key-file", str(key_file))
        assert broken.returncode == 2
        assert "two keys" not in broken.stderr


@pytest.mark.parametrize("command", WITH_VERBS)
def test_help_of_a_verb_has_its_example(shell: Shell, command: str) -> None:
    assert f"topics {command} " in shell.ok(command, "--help").split("examples:")[1]
    verb = WITH_VERBS[command]
    help = shell.ok(command, *verb, "--help")
    assert re.search(rf"^  topics {command} .*{verb[-1]}", help, re.MULTILINE)
    assert re.search(r"^  6  ", help, re.MULTILINE)


@pytest.mark.parametrize("command", OF_CLIENT)
def test_help_has_an_example_and_the_exit_codes(shell: Shell, command: str) -> None:
    help = shell.ok(command, "--help")
    assert re.search(rf"^  .*topics {command}\b", help, re.MULTILINE)
    for code in (0, 1, 2, 3, 5, 6):
        assert re.search(rf"^  {code}  ", help, re.MULTILINE), code


def test_verify_has_no_use_for_the_http_library(tmp_path: Path) -> None:
    program = (
        "import sys; from topics.cli.main import main; main(['verify', sys.argv[1]]); "
        "assert 'topics.cli.verify_command' in sys.modules; print({'httptools', 'topics.client'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1] == "set()"


def test_every_command_is_there(shell: Shell) -> None:
    help = shell.ok("--help")
    assert {*OF_CLIENT, *WITH_VERBS, *OF_FILES, "spark", "completion"} == set(COMMANDS)
    assert all(re.search(rf"^    {name}\b", help, re.MULTILINE) for name in COMMANDS)
