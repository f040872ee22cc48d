"""`create`, `apply`, `router`, `cursor`, `lag`, `top`, `bench` against a service."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import DEADLINE_S, Shell, values
from tests.harness import Service, clean_environment, poll
from topics.cli.apply import Declaration, deployed
from topics.client import Client, NotFoundError
from topics.client.calls import Call


def test_create_shows_what_it_would_change(shell: Shell, topics: Client, topic: str) -> None:
    (made,) = values(shell.ok("create", topic, "durability=fsync", "cap_records=100"))
    assert (made["topic"], made["config"]["cap_records"]) == (topic, 100)
    refused = shell.run("create", topic, "cap_records=10")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "cap_records: 100 → 10 (takes records at once)" in refused.stderr
    assert 'durability: "fsync" → "disk"' in refused.stderr
    assert "--yes" in refused.stderr
    assert topics.get_topic(topic).config["cap_records"] == 100
    assert shell.run("create", topic, "cap_records=10", "--yes").returncode == 0
    assert topics.get_topic(topic).config["durability"] == "disk"
    assert values(shell.ok("create", topic, "cap_records=10"))[0]["topic"] == topic, "nothing changes: nothing is asked"
    assert shell.run("create", topic, "type=queue").returncode == 2


@pytest.mark.parametrize(("answer", "code", "cap"), [(b"n\n", 1, 0), (b"y\n", 0, 10)])
def test_create_asks_on_a_terminal(
    shell: Shell, topics: Client, topic: str, answer: bytes, code: int, cap: int
) -> None:
    topics.put_topic(topic)
    ours, theirs = pty.openpty()
    try:
        with shell.begin("create", topic, "cap_records=10", stdin=theirs) as creating:
            os.write(ours, answer)
            assert creating.wait(DEADLINE_S) == code
    finally:
        os.close(ours)
        os.close(theirs)
    assert topics.get_topic(topic).config["cap_records"] == cap


def test_routers(shell: Shell, topics: Client, topic: str) -> None:
    name, ends = f"{topic}>copy", (f"source={topic}", f"dest={topic}.copy")
    (made,) = values(shell.ok("router", "create", name, *ends, "filter=x*"))
    assert (made["router"], made["filter"], made["lag"]) == (name, "x*", 0)
    topics.append(topic, [1, 2])
    heading, row = shell.ok("router", "list", topic).splitlines()
    assert heading.split() == ["ROUTER", "FROM", "TO", "FILTER", "COPIES", "LAG"]
    assert row.split()[:-1] == [name, topic, f"{topic}.copy", '"x*"', "0"]
    assert row.split()[-1] in "012", "as the look found it"
    refused = shell.run("router", "create", name, *ends)
    assert refused.returncode == 1
    assert 'filter: "x*" → null' in refused.stderr
    assert shell.run("router", "create", name, *ends, "--yes").returncode == 0
    assert values(shell.ok("router", "show", name))[0]["filter"] is None
    assert [one["router"] for one in values(shell.ok("router", "list", topic, "--json"))] == [name]
    assert values(shell.ok("router", "delete", name)) == [{"router": name, "deleted": True}]
    assert shell.run("router", "show", name).returncode == 1
    assert shell.run("router", "create", name, f"source={topic}").returncode == 2


def test_cursors(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, range(5))
    assert values(shell.ok("cursor", topic, "set", "here"))[0]["cursor_seq"] == 0
    assert values(shell.ok("cursor", topic, "set", "there", "--tail"))[0]["cursor_seq"] == 5
    (moved,) = values(shell.ok("cursor", topic, "set", "there", "--to", "3", "--persist-every", "2"))
    assert (moved["cursor_seq"], moved["persist_every"], moved["created"]) == (3, 2, False)
    heading, *rows = (line.split() for line in shell.ok("cursor", topic, "list").splitlines())
    assert heading == ["CURSOR", "CONSISTENCY", "POSITION", "LAG", "PERSISTED"]
    assert [(row[0], row[2], row[3]) for row in rows] == [("here", "0", "5"), ("there", "3", "2")]
    assert shell.ok("cursor", topic, "delete", "here")
    assert [one["cursor"] for one in values(shell.ok("cursor", topic, "list", "--json"))] == ["there"]


def test_lag_has_every_reader(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(f"{topic}.log", range(5))
    topics.cursor(f"{topic}.log", "billing").put(from_seq=2)
    topics.put_topic(f"{topic}.queue", type="queue")
    topics.append(f"{topic}.queue", range(4))
    topics.queue(f"{topic}.queue", node="n").claim(1)
    topics.put_router(f"{topic}>copy", f"{topic}.log", f"{topic}.copy")
    found = values(shell.ok("lag", topic, "--json"))
    assert [(one["kind"], one["reader"], one["lag"], one["leased"]) for one in found] == [
        ("cursor", "billing", 3, None),
        ("queue", "workers", 3, 1),
        ("router", f"{topic}>copy", 0, None),
    ]
    over = shell.run("lag", topic, "--over", "2")
    assert over.returncode == 6
    assert len(over.stdout.splitlines()) == 3
    assert shell.ok("lag", topic, "--over", "3").splitlines() == ["TOPIC  KIND  READER  LAG  LEASED  HEAD"]


def test_what_is_not_kept_any_more_is_no_lag(shell: Shell, topics: Client, topic: str) -> None:
    """Nobody can read it; a cursor that is made, of a topic with a ttl, would be millions behind."""
    topics.append(topic, range(50))
    topics.delete_records(topic, before_seq=41)
    topics.cursor(topic, "new").put()
    topics.cursor(topic, "begun").put(from_seq=45)
    found = values(shell.ok("lag", topic, "--json"))
    assert [(one["reader"], one["lag"]) for one in found] == [("new", 10), ("begun", 5)]
    assert [line.split()[3] for line in shell.ok("cursor", topic, "list").splitlines()] == ["LAG", "5", "10"]
    shown = next(iter(values(shell.ok("top", topic, "--rounds", "1", "--json"))))
    assert [one["lag"] for one in shown["topics"]] == [10]


def test_a_router_has_one_lag_in_all_commands(shell: Shell, topics: Client, topic: str) -> None:
    """It copies what its source has evicted from the log, or makes a gap of it: `topics lag` left that out."""
    source, dest = f"{topic}.log", f"{topic}.copy"
    topics.put_topic(source, cap_records=1)
    topics.put_topic(dest, cap_records=1, discard="reject")
    topics.put_router(f"{topic}>copy", source, dest)
    topics.append(source, range(1))
    poll("the copy", lambda: topics.get_topic(dest).count)
    topics.append(source, range(5))
    (listed,) = values(shell.ok("router", "list", topic, "--json"))
    (found,) = values(shell.ok("lag", topic, "--json"))
    assert (listed["lag"], found["lag"]) == (5, 5)


@pytest.mark.parametrize(
    "command", [["read"], ["tail"], ["delete", "--topic", "--yes"], ["create"], ["queue", "claim"], ["cursor", "list"]]
)
def test_an_empty_name_is_named(shell: Shell, command: list[str]) -> None:
    """A variable of the shell that is not set."""
    refused = shell.run(command[0], "", *command[1:])
    assert refused.returncode == 2
    assert "name in this path is empty" in refused.stderr


def test_apply(shell: Shell, topics: Client, topic: str, tmp_path: Path) -> None:
    declared = tmp_path / "topics.toml"
    declared.write_text(f"""
prefix = "{topic}"
[topics."{topic}.log"]
durability = "fsync"
[routers."{topic}>copy"]
source = "{topic}.log"
dest = "{topic}.copy"
[cursors."{topic}.log".billing]
""")
    file = ("apply", "-f", str(declared))
    planned = shell.run(*file, "--plan")
    assert planned.returncode == 6
    assert planned.stdout.endswith("3 to create\n")
    with pytest.raises(NotFoundError):
        topics.get_topic(f"{topic}.log")
    assert shell.ok(*file).endswith("3 to create\n"), "who only creates is not asked"
    assert shell.ok(*file) == shell.ok(*file, "--plan") == "nothing to do: the service is as declared\n"
    topics.put_topic(f"{topic}.log", durability="memory")
    topics.append(f"{topic}.extra", [1])
    refused = shell.run(*file)
    assert refused.returncode == 1
    assert 'durability: "memory" → "fsync"' in refused.stdout
    assert f"topic {topic}.extra is not in the file; --prune deletes it" in refused.stdout
    assert shell.run(*file, "--yes").returncode == 0
    assert topics.get_topic(f"{topic}.extra").count == 1, "nothing is deleted without --prune"
    steps = values(shell.run(*file, "--prune", "--plan", "--json").stdout)
    assert [(one["action"], one["kind"], one["name"]) for one in steps] == [("delete", "topic", f"{topic}.extra")]
    assert shell.run(*file, "--prune", "--yes").returncode == 0
    assert [one.topic for one in topics.list_topics(topic)] == [f"{topic}.copy", f"{topic}.log"]
    for wrong in ("[topics.x]\nttl = 1\n", "[topic.x]\n", "= 1"):
        declared.write_text(wrong)
        assert shell.run(*file).returncode == 2
    assert shell.run("apply", "-f", str(tmp_path / "none")).returncode == 2
    declared.write_text(f"[topics.t]\nttl_ms = {'9' * 5000}")
    refused = shell.run("apply", "-f", str(declared))
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


@pytest.mark.parametrize("wrong", ["from_seq = -1", "persist_every = 0", "from_seq = 1\ntail = true"])
def test_a_cursor_that_can_never_be_is_refused_before_anything_is_made(
    shell: Shell, topics: Client, topic: str, tmp_path: Path, wrong: str
) -> None:
    declared = tmp_path / "topics.toml"
    declared.write_text(f'[topics."{topic}"]\n[cursors."{topic}".billing]\n{wrong}\n')
    done = shell.run("apply", "-f", str(declared))
    assert (done.returncode, done.stdout) == (2, "")
    assert wrong.partition(" ")[0] in done.stderr
    with pytest.raises(NotFoundError):
        topics.get_topic(topic)


class Asked(Client):
    """A client that notes its requests."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.targets: list[str] = []

    async def carry_out(self, call: Call[Any]) -> Any:
        self.targets.append(call.target)
        return await super().carry_out(call)


def test_what_is_declared_says_which_routers_are_asked_for(service: Service, topics: Client, topic: str) -> None:
    for name, source, dest in (("declared", "a", "b"), ("between", "b", "c"), ("out", "b", "x"), ("moved", "a", "y")):
        topics.put_router(f"{topic}>{name}", f"{topic}.{source}", f"{topic}.{dest}")
    ends = {"declared": ("a", "b"), "moved": ("a", "c"), "new": ("a", "d")}
    routers = {f"{topic}>{name}": {"source": f"{topic}.{a}", "dest": f"{topic}.{b}"} for name, (a, b) in ends.items()}
    with Asked(service.url) as client:
        deployed(client, Declaration({topic: {}}), undeclared=False)
        assert not any("/routers" in target for target in client.targets), "a topic alone needs none"
        client.targets.clear()
        one = deployed(client, Declaration(routers=dict([*routers.items()][:1])), undeclared=False)
        assert (client.targets, list(one.routers)) == ([f"/v0/routers/{topic}%3Edeclared"], [f"{topic}>declared"])
        every = deployed(client, Declaration(routers=routers), undeclared=True)
    assert list(every.routers) == [f"{topic}>{name}" for name in ("between", "declared", "moved")]
    lists = [target for target in client.targets if "/routers?" in target]
    assert [target.partition("dest=")[2].partition("&")[0] for target in lists] == [f"{topic}.{end}" for end in "abcd"]


def test_top(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, range(3))
    shown = shell.ok("top", topic, "--rounds", "2", "--every-s", "0", "--sort", "count").splitlines()
    assert sum(line.startswith("TOPIC ") for line in shown) == 2
    assert any(line.startswith(f"{topic} ") for line in shown)
    assert "\x1b" not in "".join(shown)
    looks = values(shell.ok("top", topic, "--rounds", "2", "--every-s", "0.01", "--json"))
    assert looks[0]["rates"]["requests"] is None
    assert looks[1]["rates"]["requests"] > 0


@pytest.mark.long
def test_bench_removes_its_topic(shell: Shell, topics: Client) -> None:
    arguments = ("bench", "--seconds", "1", "--warm-up-s", "0.1", "--connections", "2", "--batch", "5")
    said = shell.ok(*arguments).splitlines()
    assert any(line.startswith("write ") and "5 records of 100 bytes" in line for line in said)
    assert said[-4].split()[:4] == ["PHASE", "REQUESTS", "RECORDS", "RECORDS"]
    (measured,) = values(shell.ok(*arguments, "--json"))
    assert [one["phase"] for one in measured["phases"]] == ["write", "deliver", "read"]
    for one in measured["phases"]:
        assert one["requests"] > 0
        assert 0 < one["p50_ms"] <= one["p99_ms"] <= one["max_ms"]
    assert measured["phases"][0]["records"] == 5 * measured["phases"][0]["requests"]
    assert not [one.topic for one in topics.list_topics("topics-bench-")]


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP], ids=["TERM", "HUP"])
def test_bench_that_is_told_to_end_removes_its_topic(shell: Shell, topics: Client, told: signal.Signals) -> None:
    def made() -> list[str]:
        return [one.topic for one in topics.list_topics("topics-bench-") if one.head_seq]

    with shell.begin("bench", "--seconds", "1000") as bench:
        poll("its first record", lambda: bool(made()), 60.0)
        bench.send_signal(told)
        assert bench.wait(DEADLINE_S) == 128 + told
    assert not made()


def test_https_where_nobody_speaks_it_is_told(shell: Shell, service: Service) -> None:
    done = shell.run("list", "--url", service.url.replace("http:", "https:"), "--patience-s", "0")
    assert (done.returncode, done.stdout) == (3, "")
    assert "speaks no TLS: write http://" in done.stderr


AT_ONCE = "import sys, topics.progress as bars, topics.cli.main as cli; bars.AFTER_S = 0; sys.exit(cli.main())"


@pytest.mark.parametrize(
    ("arguments", "bar", "lines"),
    [
        (["read", "TOPIC"], "records", 5),
        (["tail", "TOPIC", "-n", "5"], "records", 5),
        (["delete", "TOPIC", "--before", "2", "--yes"], "records", 1),
        (["list", "TOPIC"], "topics", 3),
        (["list", "TOPIC", "--json"], "topics", 2),
        (["list", "TOPIC", "--names"], "topics", 2),
        (["lag", "TOPIC"], "topics", 2),
        (["queue", "TOPIC.q", "peek"], "jobs", 2),
        (["queue", "TOPIC.q", "redrive", "--from", "TOPIC"], "jobs", 1),
        (["queue", "TOPIC.q", "claim", "--wait-s", "0.1", "--max", "2"], "waiting for a job", 2),
    ],
)
def test_long_work_has_a_bar(
    service: Service, topics: Client, topic: str, arguments: list[str], bar: str, lines: int
) -> None:
    """A bar that begins at once instead of after a second, on a terminal, while the output goes to a pipe."""
    topics.append(topic, range(5))
    topics.put_topic(f"{topic}.q", type="queue")
    topics.append(f"{topic}.q", range(2))
    arguments = [one.replace("TOPIC", topic) for one in arguments]
    command = [sys.executable, "-c", AT_ONCE, *arguments, "--url", service.url]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    try:
        done = subprocess.run(
            command,
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=clean_environment({}),
            timeout=240,
            check=False,
        )
        assert done.returncode == 0
        assert done.stdout.count(b"\n") == lines
        os.set_blocking(ours, False)
        assert re.search(bar.encode(), os.read(ours, 100_000))
    finally:
        os.close(ours)
        os.close(theirs)


def test_colours_are_for_a_terminal(shell: Shell, topics: Client, topic: str) -> None:
    topics.append(topic, [1])
    for environment, painted in (({}, True), ({"NO_COLOR": "1"}, False)):
        ours, theirs = pty.openpty()
        command = ("env", *(f"{name}={value}" for name, value in environment.items()))
        try:
            with shell.begin("list", topic, stdout=theirs, before=command) as listing:
                assert listing.wait(DEADLINE_S) == 0
            assert (b"\x1b[1mTOPIC" in os.read(ours, 10_000)) == painted
        finally:
            os.close(ours)
            os.close(theirs)
