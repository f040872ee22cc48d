"""The table beside other servers: who is compared with whom, and which way a ratio points."""

from __future__ import annotations

import ast
import asyncio
import re
import sys
import tomllib
from pathlib import Path

import pytest

from bench import figures
from bench.load import LoadError
from bench.peers import servers, tables
from bench.peers.bare import Client, command, jetstream_talk, redis_talk

DISK, FSYNC, EVERYSEC, ALWAYS, *_ = servers.CONTENDERS
ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"hdrh": "hdrhistogram", "nats": "nats-py"}
"""Distributions that are not called as their packages are."""
ACK, RATE = "one append: p50_us", "catch-up read: records_per_s"


def test_above_one_is_better_for_us_for_times_and_for_rates() -> None:
    assert tables.ratios(ACK, [100, 200, 400], [200, 400, 800]) == pytest.approx((0.5, 2.0, 8.0))
    assert tables.ratios(RATE, [100, 200, 400], [200, 400, 800]) == pytest.approx((0.125, 0.5, 2.0))


def test_what_was_synced_is_compared_with_what_was_synced() -> None:
    found = {
        ACK: {DISK.name: [100.0], FSYNC.name: [1000.0], EVERYSEC.name: [200.0], ALWAYS.name: [500.0]},
        RATE: {DISK.name: [4000.0], FSYNC.name: [4000.0], EVERYSEC.name: [1000.0]},
    }
    lines = tables.table(found, [DISK, FSYNC, EVERYSEC, ALWAYS]).splitlines()
    assert lines[2] == "| | topics disk | redis everysec |"
    assert lines[4] == "| one append | p50 0.10 ms | p50 0.20 ms (× 2, 2 to 2) |"
    assert "| one append | p50 1.00 ms | p50 0.50 ms (× 0.5, 0.5 to 0.5) |" in lines
    assert "| catch-up read | 4.0 k records/s |  |" in lines  # a peer that was not measured has an empty cell
    assert any(line.startswith("- redis always: AOF") for line in lines)


def test_a_server_that_is_not_here_is_left_out_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "find_program", lambda name: None if name == "redis-server" else f"/bin/{name}")
    assert {one.family for one in servers.wanted(["redis", "postgres"])} == {"topics", "postgres"}
    assert "redis always is left out: there is no redis-server on this machine" in capsys.readouterr().err


def test_commands_are_as_redis_has_them() -> None:
    assert command(b"XADD", b"s") == b"*2\r\n$4\r\nXADD\r\n$1\r\ns\r\n"


def test_its_environment_has_all_that_it_imports() -> None:
    requirements = (ROOT / "bench" / "peers" / "requirements.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements += [*project["dependencies"], *project["optional-dependencies"]["server"]]
    installed = {found[0] for line in requirements if (found := re.match(r"[A-Za-z0-9_-]+", line))}
    assert {DISTRIBUTIONS.get(name, name) for name in imports_of("bench.peers.__main__")} <= installed


def imports_of(entry: str) -> set[str]:
    """Return the packages of others that a module loads when it is loaded, itself or by modules of bench and tests."""
    found, left, seen = set(), [entry], set()
    while left:
        module = left.pop()
        path = ROOT / (module.replace(".", "/") + ".py")
        if module in seen or not path.exists():
            continue
        seen.add(module)
        for node in ast.parse(path.read_text()).body:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                top = name.partition(".")[0]
                if top in ("bench", "tests"):
                    left.append(name)
                elif top not in sys.stdlib_module_names and top != "topics":
                    found.add(top)
    return found


class Answering:
    """A server of one connection that speaks as JetStream does, in pieces that end anywhere, and pings meanwhile."""

    def __init__(self) -> None:
        self.published = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x"}\r\n')
        subscribed = (await reader.readuntil(b"PING\r\n")).split(b"SUB ")[1].split(b" ")[0]
        writer.write(b"PONG\r\n")
        while (line := await reader.readline()).startswith((b"PUB", b"PONG")):
            if line.startswith(b"PONG"):
                continue
            _, _, inbox, length = line.split()
            assert inbox == subscribed
            await reader.readexactly(int(length) + 2)
            self.published += 1
            ack = b'{"stream":"bench", "seq":%d}' % self.published
            answer = b"MSG %b 1 %d\r\n%b\r\nPING\r\n" % (inbox, len(ack), ack)
            for at in range(0, len(answer), 7):
                writer.write(answer[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()


def test_bare_batches_are_counted_when_every_ack_is_there_however_it_is_cut() -> None:
    async def run() -> tuple[int, int]:
        answering = Answering()
        async with await asyncio.start_server(answering.serve, "127.0.0.1", 0) as server:
            client = Client(jetstream_talk("bench", b"x" * 100, 10))
            port = server.sockets[0].getsockname()[1]
            await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
            await client.is_open
            client.begin(float("inf"), 3)
            await client.done
        return client.answered, answering.published

    assert asyncio.run(run()) == (3, 30)


def test_an_ack_that_is_an_error_ends_a_bare_run() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        await reader.readuntil(b"XADD")
        writer.write(b"-OOM command not allowed\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            client = Client(redis_talk("bench", b"x", 1))
            port = server.sockets[0].getsockname()[1]
            await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
            await client.is_open
            client.begin(float("inf"), 1)
            with pytest.raises(LoadError, match="OOM"):
                await client.done

    asyncio.run(run())


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text()
    changed = figures.with_table(page, "peers", "| new |")
    assert "\n\n| new |\n\n" in changed
    assert changed.endswith(page[page.index("## Sources") :])
