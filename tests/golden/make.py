"""Data directories as this version leaves them, kept as test data for the versions behind it.

    python -m tests.golden.make          writes tests/golden/<version>/<case>.tar.xz and <case>.expected.json

The service is asked over HTTP alone; what its logs hold is checked with the reader of `docs/storage-format.md`. The
expectation is what a client sees of the service that wrote the data, and of one that is started on a copy of it: both
must agree. It names the version and the commit that made it, and the settings.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from tests.contract.asking import diff_records, ok, put, whole, write
from tests.harness import Service, poll
from tests.storage.test_format_page import Frames, read_log
from topics import __version__
from topics.core.names import owner_shard
from topics.storage.frame import FrameType

HERE: Final = Path(__file__).parent
SHARDS: Final = 2
YEARS_MS: Final = 20 * 365 * 86_400_000
LEASE_MS: Final = 86_400_000
PAGE: Final = 1000
PACKED_BYTES_MAX: Final = 300_000
LOCK_NAME: Final = ".topics.lock"
Seen = dict[str, Any]


class Case(NamedTuple):
    """The making of one data directory. `fill` writes it, and returns writes that may be repeated; `end` ends the
    service; `check` asserts what the logs must hold then.
    """

    env: Mapping[str, str]
    fill: Callable[[Service], list[dict[str, Any]]]
    end: Callable[[Service], None]
    check: Callable[[Path, Seen], None]


# --- what a client sees


def seen(client: httpx.Client) -> Seen:
    """All that the API says of topics, records, routers, named cursors and queues, but for what depends on the time."""
    names = [topic["topic"] for topic in _pages(client, "/v0/topics", "topics")]
    routers = [router["router"] for router in _pages(client, "/v0/routers", "routers")]
    return {
        "topics": {name: _topic_seen(client, name) for name in names},
        "routers": {name: _router(_get(client, f"/v0/routers/{name}")) for name in routers},
    }


def _topic_seen(client: httpx.Client, name: str) -> Seen:
    state = _get(client, f"/v0/topics/{name}?touch=false")
    first = ok(whole(lambda: client.post(f"/v0/topics/{name}/diff", json={"limit": 1})))
    found: Seen = {
        "shard": owner_shard(name, SHARDS),
        "type": state["type"],
        "durability": state["config"]["durability"],
        "head_seq": state["head_seq"],
        "earliest_seq": state["earliest_seq"],
        "count": state["count"],
        "tombstone": first["tombstone"],
        "records": [
            {"seq": one.seq, "ts": one.ts, "tag": one.tag, "node": one.node, "data": one.data.decode()}
            | {"meta": None if one.meta is None else one.meta.decode()}
            for one in diff_records(client, name, limit=PAGE, include_tags=True)
        ],
    }
    cursors = _pages(client, f"/v0/topics/{name}/cursors", "cursors")
    if cursors:
        found["cursors"] = cursors
    if state["type"] == "queue":
        jobs = ok(client.post(f"/v0/topics/{name}/peek", json={"max": PAGE}))["jobs"]
        found["queue"] = state["queue"]
        found["jobs"] = [{"seq": job["$seq"], "state": job["state"], "deliveries": job["deliveries"]} for job in jobs]
    return found


def at_any_time(found: Seen) -> Seen:
    """Return the part of it that is the same at any time: a leased job is a waiting one once its lease is over."""
    topics = {}
    for name, topic in found["topics"].items():
        topics[name] = dict(topic)
        if "queue" in topic:
            counts = topic["queue"]
            topics[name]["queue"] = (counts["ready"] + counts["in_flight"], counts["dead_lettered"])
            topics[name]["jobs"] = [(job["seq"], job["deliveries"]) for job in topic["jobs"]]
    return {"topics": topics, "routers": found["routers"]}


def _get(client: httpx.Client, path: str) -> dict[str, Any]:
    return ok(whole(lambda: client.get(path)))


def _pages(client: httpx.Client, path: str, key: str) -> list[dict[str, Any]]:
    answer = _get(client, f"{path}?page_size={PAGE}")
    assert "next_cursor" not in answer, f"more than {PAGE} {key}"
    found: list[dict[str, Any]] = answer[key]
    return found


def _without_performance(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "performance"}


def _router(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a router without its lag, which is that of the moment."""
    return {name: value for name, value in _without_performance(answer).items() if name != "lag"}


# --- what is written


def _on(shard: int, stem: str) -> str:
    """A name of a topic that this shard owns."""
    return next(name for name in (f"{stem}.{number}" for number in range(99)) if owner_shard(name, SHARDS) == shard)


def _route(client: httpx.Client, source: str, dest: str, **spec: Any) -> None:
    ok(client.put(f"/v0/routers/{source}>{dest}", json={"source": source, "dest": dest, **spec}))


def _write_tagged(client: httpx.Client, topic: str, first: int, count: int) -> None:
    """Records in writes of three, with the tags a, b and c in turns; some have a node, some meta."""
    for start in range(first, first + count, 3):
        records: list[dict[str, Any]] = []
        for number in range(start, start + 3):
            record: dict[str, Any] = {"data": {"n": number, "text": f"Grüße {number}"}, "tag": "abc"[number % 3]}
            if number % 2:
                record["node"] = f"node-{number % 4}"
            if number % 5 == 0:
                record["meta"] = {"number": str(number)}
            records.append(record)
        ok(client.post(f"/v0/topics/{topic}", json={"records": records}))


def _repeatable(client: httpx.Client, topic: str, **body: Any) -> dict[str, Any]:
    """A write that is appended once however often it comes."""
    answer = write(client, topic, "once", "and no more", **body)
    sent = {"records": [{"data": "once"}, {"data": "and no more"}], **body}
    return {"topic": topic, "body": sent, "seqs": answer["seqs"]}


def _fill_settled(service: Service) -> list[dict[str, Any]]:
    client = service.client
    source = _on(1, "source")
    chain = [_on(0, "chain.a"), _on(1, "chain.b"), _on(0, "chain.c")]
    full, ram = _on(0, "full"), _on(1, "ram")
    put(client, full, discard="reject", cap_records=5)
    put(client, ram, durability="ephemeral")
    put(client, _on(1, "capped"), cap_records=12)
    for name in (source, *chain):
        put(client, name, idempotency_window_ms=YEARS_MS)
    plain = [_on(0, "plain"), _on(1, "plain"), _on(0, "other")]
    for dest in (*plain, full, ram, _on(1, "capped")):
        _route(client, source, dest)
    _route(client, source, _on(0, "filtered"), filter=["tag", "Eq", "a"], preserve_tag=False)
    _route(client, source, _on(1, "nothing"), filter=["tag", "Eq", "nobody has it"])
    _route(client, source, _on(1, "once"), guarantee="exactly_once", preserve_node=False)
    for upper, lower in itertools.pairwise(chain):
        _route(client, upper, lower)

    for durability in ("disk", "fsync", "memory", "ephemeral"):
        put(client, f"class.{durability}", durability=durability)
        _write_tagged(client, f"class.{durability}", 1, 30)
    ok(client.post("/v0/topics/class.disk/delete", json={"match": ["tag", "Eq", "b"]}))
    ok(client.post("/v0/topics/class.fsync/delete", json={"before_seq": 8}))
    _fill_queue(client)

    _write_tagged(client, source, 1, 30)
    _write_tagged(client, chain[0], 1, 30)
    _wait_cut(service)
    producer = {"id": "writer", "epoch": 3, "n": 1}
    repeatable = [
        _repeatable(client, source, idempotency_key="a key"),
        _repeatable(client, chain[0], producer=producer),
    ]
    write(client, plain[0], "written to the dest itself")
    ok(client.post(f"/v0/topics/{source}/delete", json={"match": ["tag", "Glob", "c*"]}))
    ok(client.post(f"/v0/topics/{plain[1]}/delete", json={"before_seq": 4}))
    ok(client.post(f"/v0/topics/{_on(0, 'filtered')}/delete", json={"before_seq": 2}))
    _write_tagged(client, source, 31, 30)
    write(client, source, "without a tag: no filter lets it pass")

    _read_by_cursor(client, "class.disk", "reader", "at_least_once")
    _read_by_cursor(client, source, "strict", "strictly_at_once")
    _read_by_cursor(client, plain[1], "of a dest", "at_least_once")
    _wait_cut(service)
    return repeatable


def _fill_queue(client: httpx.Client) -> None:
    """Fill a queue of six jobs: one done, one leased, one dead letter, one given back, two untouched."""
    queue = {"type": "queue", "lease_ms": LEASE_MS, "max_deliveries": 2, "leases_durable": True}
    put(client, "jobs.dead", idempotency_window_ms=YEARS_MS)
    put(client, "jobs", dead_letter="jobs.dead", idempotency_window_ms=YEARS_MS, **queue)
    write(client, "jobs", *(f"job {number}" for number in range(1, 7)))

    def ask(what: str, **body: Any) -> dict[str, Any]:
        return ok(client.post(f"/v0/topics/jobs/{what}", json={"node": "worker", **body}))

    def claim(most: int) -> list[int]:
        return [job["$seq"] for job in ask("claim", max=most)["claimed"]]

    assert claim(3) == [1, 2, 3]
    ask("ack", seqs=[1])
    ask("nack", seqs=[3])
    assert claim(1) == [3]
    ask("nack", seqs=[3])
    assert claim(1) == [4]  # 3 went to the dead letters
    ask("nack", seqs=[4])
    poll("the dead letter", lambda: _get(client, "/v0/topics/jobs")["queue"]["dead_lettered"] == 1)


def _read_by_cursor(client: httpx.Client, topic: str, name: str, consistency: str) -> None:
    path = f"/v0/topics/{topic}/cursors/{name.replace(' ', '-')}"
    ok(client.put(path, json={"consistency": consistency}))
    assert len(ok(client.post(f"{path}/read", json={"limit": 5}))["records"]) == 5


def _wait_cut(service: Service) -> None:
    """Two checkpoints from now on: the second begins behind everything that was written."""
    seen(service.client)
    wanted = _metric(service, "topics_compactor_snapshots_total") + 2
    put(service.client, "marker")

    def are_made() -> bool:
        write(service.client, "marker", "so that there is something to cut")
        return _metric(service, "topics_compactor_snapshots_total") >= wanted

    poll("two checkpoints", are_made, every_s=0.05)
    ok(service.client.delete("/v0/topics/marker"))


def _metric(service: Service, name: str) -> float:
    metrics = ok(service.client.get("/v0/metrics", headers={"Accept": "application/json"}))
    return float(metrics[name])


# --- what the logs hold


def _frames(data_dir: Path) -> Frames:
    return [frame for shard in range(SHARDS) for frame in read_log(data_dir / "wal" / f"shard-{shard:02}")]


def _names_of(frames: Frames) -> dict[int, str]:
    return {
        frame[2]: msgspec.msgpack.decode(frame[7])["name"] for frame in frames if frame[0] == FrameType.TOPIC_CREATE
    }


def _cursors(frames: Frames) -> dict[str, dict[str, Any]]:
    """The last ROUTER_CURSOR of each dest."""
    names = _names_of(frames)
    return {
        names[frame[2]]: msgspec.msgpack.decode(frame[7]) for frame in frames if frame[0] == FrameType.ROUTER_CURSOR
    }


def _check_settled(data_dir: Path, found: Seen) -> None:
    """Every cursor is at the head of its source, but for that of a dest that is full. Of records that no router lets
    pass the log hears later.
    """
    unfiltered = {router["dest"] for router in found["routers"].values() if router["filter"] is None}
    cursors = _cursors(_frames(data_dir))
    assert set(cursors) == {router["dest"] for router in found["routers"].values()}
    for dest, cursor in cursors.items():
        head_seq = found["topics"][cursor["source"]]["head_seq"]
        if cursor.get("full"):
            assert dest == _on(0, "full")
        elif dest in unfiltered:
            assert cursor["source_seq"] == head_seq, f"{dest}: {cursor['source_seq']} of {head_seq}"
    assert list(data_dir.glob("topics/*/seg-*.tags")), "no segment was sealed"


CASES: Final[dict[str, Case]] = {
    "routers-settled": Case(
        {"TOPICS_CHECKPOINT_INTERVAL_MS": "200", "TOPICS_SEGMENT_MAX_EVENTS": "20"},
        _fill_settled,
        Service.stop,
        _check_settled,
    )
}


# --- making and opening


def make(name: str, folder: Path) -> None:
    """Writes the files of one case, once they are known to be right."""
    case = CASES[name]
    packed, expectation = folder / f"{name}.tar.xz", folder / f"{name}.expected.json"
    with Service(shards=SHARDS, frontends=1, env=case.env).unstarted() as service:
        service.start()
        repeatable = case.fill(service)
        before = seen(service.client)
        case.end(service)
        case.check(service.data_dir, before)
        _pack(service.data_dir, packed)
    with opened(packed) as service:
        after = seen(service.client)
    for topic, state in before["topics"].items():
        if state["durability"] != "ephemeral":
            assert after["topics"][topic] == state, f"{topic} is another one after a start"
    assert after["routers"] == before["routers"]
    made = {"version": __version__, "commit": _commit(), "shards": SHARDS, "settings": dict(case.env)}
    expectation.write_text(_in_lines({"made": made, **after, "repeatable": repeatable}))
    size_bytes = packed.stat().st_size
    assert size_bytes <= PACKED_BYTES_MAX, f"{packed} has {size_bytes} bytes, {PACKED_BYTES_MAX} at most"
    print(f"{packed}: {size_bytes} bytes, {len(after['topics'])} topics, {len(after['routers'])} routers")


@contextmanager
def opened(packed: Path) -> Iterator[Service]:
    """A service of this version on a copy of the data; it is killed at the end unless the body stopped it."""
    with unstarted(packed) as service:
        yield service.start()


@contextmanager
def unstarted(packed: Path, shards: int = SHARDS) -> Iterator[Service]:
    """The same before its start."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        with Service(shards=shards, frontends=1, data_dir=Path(folder)).unstarted() as service:
            yield service


def _pack(data_dir: Path, packed: Path) -> None:
    """The same bytes for the same data: no times, no owners."""
    packed.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed, "w:xz", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(data_dir.rglob("*")):
            if path.name == LOCK_NAME:
                continue
            entry = tarfile.TarInfo(str(path.relative_to(data_dir)))
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o700
                tar.addfile(entry)
            else:
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o600
                tar.addfile(entry, io.BytesIO(content))


def _commit() -> str:
    """The last one that changed the code that runs here."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(HERE), *arguments, "--", ":/topics"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain")
    assert not changed, f"topics/ has changes that no commit has; commit them first:\n{changed}"
    return git("log", "-1", "--format=%H")


def _in_lines(expectation: Seen) -> str:
    """JSON with a record a line, so that a change can be read."""
    lines = json.dumps(expectation, ensure_ascii=False, indent=1).split("\n")
    whole_lines: list[str] = []
    depth = 0
    for line in lines:
        text = line.strip()
        if depth:
            whole_lines[-1] += text if text.startswith(("}", "]")) else f" {text}"
            depth += text.endswith(("{", "[")) - text.startswith(("}", "]"))
        else:
            whole_lines.append(line)
            # An object in a list: it stays on this line.
            depth = int(text == "{" and len(whole_lines) > 1)
    return "\n".join(whole_lines) + "\n"


def main() -> int:
    folder = HERE / __version__
    if any(folder.glob("*.tar.xz")) and os.environ.get("REPLACE") != "1":
        print(f"{folder} has data already; with REPLACE=1 it is made anew", file=sys.stderr)
        return 1
    for name in CASES:
        make(name, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
