"""Routers over restarts, kills of each role, and another number of shards: the same copies with the same seqs.

Half of the ways to restart are taken, each end with and without segments; TOPICS_CRASH_ALL=1 (`make crash`) takes all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from tests.contract.asking import diff, diff_records, ok, put, state, write
from tests.contract.stream import follow
from tests.e2e.test_kill_points import CRASH_ALL, status, verify
from tests.harness import Service, poll
from topics.core.names import owner_shard

EAGER = {
    "TOPICS_CHECKPOINT_INTERVAL_MS": "50",
    "TOPICS_CHECKPOINT_WAL_BYTES": "64KiB",
    "TOPICS_SEGMENT_MAX_EVENTS": "20",
    "TOPICS_SEGMENT_REWRITE_DEAD_RATIO": "0.2",
}
"""Cuts all the time."""
RESTARTS = [
    pytest.param(shards, end, env, id=f"{what}-{end}-{shards}")
    for at, (end, (what, env), shards) in enumerate(
        itertools.product(("stop", "kill_group", "kill_supervisor"), (("logs", {}), ("segments", EAGER)), (1, 3))
    )
    if CRASH_ALL or at % 8 in (0, 3, 5, 6)
]
DESTS = ("all", "tagged", "once", "chain", "capped", "last")


def lay_out_routers(client: httpx.Client) -> None:
    """src → all → chain → last; src → tagged, once, capped. The names lie on different shards whatever their number."""
    put(client, "src", cap_records=50)
    put(client, "capped", cap_records=7)
    put(client, "once", durability="fsync")
    for name, source, fields in (
        ("all", "src", {}),
        ("tagged", "src", {"filter": "t*", "preserve_tag": False}),
        ("once", "src", {"guarantee": "exactly_once"}),
        ("capped", "src", {"preserve_node": False}),
        ("chain", "all", {"filter": ["tag", "Eq", "t1"]}),
        ("last", "chain", {}),
    ):
        ok(client.put(f"/v0/routers/{name}", json={"source": source, "dest": name, **fields}))


def traffic(client: httpx.Client, start: int) -> None:
    for at in range(start, start + 30):
        records = [{"data": [at, n], "tag": f"t{n}", "node": "n", "meta": {"at": str(at)}} for n in range(3)]
        ok(client.post("/v0/topics/src", json={"records": records}))
        if at % 7 == 0:
            write(client, "all", f"direct {at}")
            ok(client.post("/v0/topics/tagged/delete", json={"before_seq": at}))
        if at % 10 == 0:
            ok(client.post("/v0/topics/src/delete", json={"before_seq": 3 * at}))


def copies(client: httpx.Client) -> dict[str, Any]:
    """All that a client can see of the dests."""
    seen: dict[str, Any] = {}
    for dest in DESTS:
        page = diff(client, dest)
        records = diff_records(client, dest, limit=1000, include_tags=True)
        seen[dest] = (records, page["head_seq"], page["earliest_seq"], page["tombstone"])
        seen[f"router {dest}"] = ok(client.get(f"/v0/routers/{dest}"))["forwarded_total"]
    return seen


@pytest.mark.parametrize(("shards", "end", "env"), RESTARTS)
def test_the_same_bytes_and_seqs_after_a_restart(shards: int, end: str, env: dict[str, str]) -> None:
    with Service(shards=shards, frontends=1, env=env) as service:
        lay_out_routers(service.client)
        for life in range(3):
            traffic(service.client, 100 * life + 1)
            if env:
                cut(service)
            else:
                assert copies(service.client)["router all"] == 90 * (life + 1)
            before = copies(service.client)
            getattr(service, end)()
            verify(service.data_dir)
            service.start()
            assert copies(service.client) == before


@pytest.mark.parametrize(
    ("durability", "end", "env"),
    [
        ("disk", "stop", {}),
        ("disk", "kill_group", {}),
        ("disk", "kill_group", EAGER),
        ("disk", "shards", EAGER),
        ("ephemeral", "shards", {}),
    ],
    ids=["stop", "kill", "kill-segments", "shards-segments", "shards-ephemeral"],
)
def test_what_a_dest_could_never_hold_is_the_same_gap_ever_after(
    durability: str, end: str, env: dict[str, str]
) -> None:
    with Service(shards=2, frontends=1, env=env) as service:
        client = service.client
        put(client, "choosy", cap_bytes=100_000, discard="reject", durability=durability)
        ok(client.put("/v0/routers/choosy", json={"source": "src", "dest": "choosy"}))
        for size in (1, 200_000, 2, 200_000, 200_000, 3):
            write(client, "src", "x" * size)

        def seen() -> list[tuple[Any, ...]]:
            found: list[tuple[Any, ...]] = []
            cursor = 0
            while True:
                page = diff(client, "choosy", from_seq=cursor)
                gap = page["tombstone"]
                if gap is not None:
                    found.append((gap["reason"], gap["gap_from"], gap["gap_to"]))
                found += [(one["$seq"], len(one["data"])) for one in page["records"]]
                cursor = page["next_from_seq"]
                if page["caught_up"]:
                    return found

        assert seen() == [(1, 1), ("cap", 2, 2), (3, 2), ("cap", 4, 5), (6, 3)]
        if env:
            cut(service)
        before, head_seq = seen(), state(client, "choosy")["head_seq"]
        if end == "shards":
            for shard in range(2):
                service.wait_healed(service.kill("walshard", shard))
        else:
            getattr(service, end)()
            verify(service.data_dir)
            service.start()
            client = service.client
        if durability == "ephemeral":
            # No record in RAM tells why there is none.
            before = [("restart", *one[1:]) if one[0] == "cap" else one for one in before]
        assert seen() == before
        write(client, "src", "behind", "y" * 200_000)
        assert seen() == [*before, (head_seq + 1, 6), ("cap", head_seq + 2, head_seq + 2)]


def cut(service: Service) -> None:
    """A snapshot, and another one that says nothing of what was written before the first."""
    compactor = status(service).compactor
    assert compactor is not None
    before = compactor.snapshots

    def twice_more() -> bool:
        write(service.client, "src", "to be cut")
        compactor = status(service).compactor
        return compactor is not None and compactor.snapshots >= before + 2

    poll("two snapshots", twice_more, 30)


@pytest.mark.parametrize("env", [{}, EAGER], ids=["logs", "segments"])
def test_over_a_changed_number_of_shards(env: dict[str, str]) -> None:
    with Service(shards=1, frontends=1, env=env) as service:
        lay_out_routers(service.client)
        for life, shards in enumerate((4, 2, 1, 3)):
            traffic(service.client, 100 * life + 1)
            before = copies(service.client)
            service.stop()
            verify(service.data_dir)
            service.shards = shards
            service.start()
            assert copies(service.client) == before


def written_since(acked: list[list[int]], count: int) -> bool:
    return sum(map(len, acked)) > count


@contextmanager
def writers(service: Service, acked: list[list[int]]) -> Iterator[None]:
    """Two clients that write to `src` with idempotency keys, each repeating until it is answered."""
    over = threading.Event()

    def run(who: int) -> None:
        number = 0
        with httpx.Client(base_url=service.url, timeout=20) as client:
            while not over.is_set():
                body = {"records": [{"data": [who, number]}], "idempotency_key": f"{who}-{number}"}
                try:
                    answer = client.post("/v0/topics/src", json=body)
                except httpx.TransportError:
                    continue
                if answer.status_code in (200, 201):
                    acked[who].append(number)
                    number += 1

    threads = [threading.Thread(target=run, args=(who,)) for who in range(len(acked))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("role", "index", "env"),
    [
        ("walshard", 0, {}),
        ("walshard", 1, {}),
        ("frontend", 0, {}),
        ("frontend", 1, {}),
        ("walshard", 0, EAGER),
        ("walshard", 1, EAGER),
        ("compactor", 0, EAGER),
    ],
)
def test_a_kill_under_load_loses_and_repeats_nothing(role: str, index: int, env: dict[str, str]) -> None:
    with Service(shards=2, frontends=2, env=env) as service:
        client = service.client
        put(client, "src")
        dests = [f"d{at}" for at in range(4)]
        for dest in dests:
            ok(client.put(f"/v0/routers/{dest}", json={"source": "src", "dest": dest}))
        ok(client.put("/v0/routers/e", json={"source": "d0", "dest": "e"}))
        acked: list[list[int]] = [[], []]
        with writers(service, acked):
            for _ in range(3):
                count = sum(map(len, acked))
                poll("writes to go on", partial(written_since, acked, count + 50), 30)
                service.wait_healed(service.kill(role, index))
        expected = everything(client, "src")
        for who, numbers in enumerate(acked):
            assert [n for w, n in expected if w == who][: len(numbers)] == numbers
        for dest in (*dests, "e"):
            assert everything(client, dest) == expected, dest
            total = ok(client.get(f"/v0/routers/{dest}"))["forwarded_total"]
            assert total == len(expected)


def everything(client: httpx.Client, topic: str) -> list[Any]:
    found: list[Any] = []
    from_seq = 0
    while True:
        page = diff(client, topic, from_seq=from_seq, limit=1000)
        assert page["tombstone"] is None
        found += [record["data"] for record in page["records"]]
        from_seq = page["next_from_seq"]
        if page["caught_up"]:
            return found


def test_a_stream_on_a_dest_goes_on_over_the_crash_of_its_shard() -> None:
    with Service(shards=2, frontends=1) as service:
        client = service.client
        for at in range(4):
            ok(client.put(f"/v0/routers/r{at}", json={"source": "src", "dest": f"d{at}"}))
        streams = [follow(service, {f"d{at}": {}}) for at in range(4)]
        try:
            seen: list[list[Any]] = [[] for _ in streams]
            for life in range(3):
                write(client, "src", *range(100 * life, 100 * life + 100))
                for at, stream in enumerate(streams):
                    seen[at] += [record["data"] for record in stream.records(100)]
                service.wait_healed(service.kill("walshard", life % 2))
                assert all(state(client, f"d{at}")["head_seq"] == 100 * (life + 1) for at in range(4))
            assert all(got == list(range(300)) for got in seen)
        finally:
            for stream in streams:
                stream.close()


def test_seqs_of_copies_that_were_read_go_to_nothing_else_while_their_source_is_replayed() -> None:
    """The shard of the source has much to read, that of the dest has not."""
    names = [f"n{at}" for at in range(40)]
    source, filler = [name for name in names if owner_shard(name, 2) == 1][:2]
    dest = next(name for name in names if owner_shard(name, 2) == 0)
    with Service(shards=2, frontends=1, wal_file_bytes=64 << 20) as service:
        client = service.client
        ok(client.put("/v0/routers/r", json={"source": source, "dest": dest}))
        write(client, source, 1, 2, 3)
        expected = diff_records(client, dest)
        epoch = diff(client, dest)["epoch"]
        assert len(expected) == 3
        for _ in range(15):
            write(client, filler, *[0] * 10_000)
        service.kill_group()
        service.start(wait_ready=False)
        client = service.client

        def written() -> dict[str, Any] | None:
            answer = client.post(f"/v0/topics/{dest}/diff", json={"from_seq": 3})
            if answer.status_code == 200:  # from a shard that has recovered
                page = ok(answer)
                assert (page["records"], page["tombstone"], page["epoch"]) == ([], None, epoch)
                assert (page["next_from_seq"], page["caught_up"], page["lag"]) == (3, True, 0)
                if not service.is_ready():
                    pending = ok(client.get(f"/v0/topics/{dest}"))
                    assert pending["head_seq"] == 3 or pending["performance"]["copies_pending"]
            answer = client.post(f"/v0/topics/{dest}", json={"records": [{"data": "direct"}]})
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] in ("not_ready", "shard_unavailable")
                return None
            return ok(answer)

        assert poll("the dest to take a write", written)["first_seq"] == 4
        assert diff_records(client, dest, limit=3) == expected
        assert [record["data"] for record in diff(client, dest, from_seq=3)["records"]] == ["direct"]
