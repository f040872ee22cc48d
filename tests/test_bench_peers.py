"""The table beside other servers: who is compared with whom, and which way a ratio points."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from bench.peers import servers, tables
from bench.peers.bare_redis import command

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
