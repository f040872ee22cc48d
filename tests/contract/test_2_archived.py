"""api §2 "Durability": class `archived`. An answer says that the archive has it; without the archive it says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.archive.services import read, restored
from tests.contract.asking import diff, ok, put, refused, state, write
from tests.contract.socket_client import Socket
from tests.contract.stream import follow
from tests.contract.test_6_transactions import stage
from tests.harness import Service, poll

WAIT_MS = 300


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def shipping(place: Path) -> Iterator[Service]:
    """A service whose archiver would ship once in an hour, if nobody waited."""
    env = {"TOPICS_ARCHIVE_URL": place.as_uri(), "TOPICS_ARCHIVE_INTERVAL_MS": "3600000"}
    with Service(env=env) as service:
        put(service.client, "bank", durability="archived")
        yield service


@contextmanager
def archive_away(service: Service) -> Iterator[None]:
    """Have the archiver stand still."""
    [process] = [found for found in service.status()["processes"] if found["role"] == "archiver"]
    os.kill(process["pid"], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process["pid"], signal.SIGCONT)


def test_what_is_acknowledged_survives_the_loss_of_the_machine(shipping: Service, place: Path, tmp_path: Path) -> None:
    client = shipping.client
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write(client, "bank", number), range(40)))
    with Socket(shipping) as socket:
        assert socket.ask("publish", topic="bank", records=[{"data": "ws"}], request_id=1)["op"] == "ack"
    staged = stage(client, "bank", "txn")
    ok(client.post("/v0/txn/sink/commit", json={"batch": 0, "stages": [staged]}))
    answer = write(client, "bank", "last")
    assert answer["durability"] == "archived"
    # The shard looks at how far the archive is by itself.
    poll("archived_seq", lambda: state(client, "bank")["archived_seq"] == answer["last_seq"])
    assert diff(client, "bank")["performance"]["archived_seq"] == answer["last_seq"]
    ok(client.post("/v0/topics/bank/delete", json={"before_seq": 11}))
    shipping.kill_group()
    with restored(place, tmp_path / "restored") as other:
        records = read(other.client, "bank")[0]
    assert sorted(records) == list(range(11, 44))
    assert [*records.values()][-3:] == ["ws", "txn", "last"]


def test_without_the_archive_nothing_is_acknowledged_as_archived(place: Path) -> None:
    env = {"TOPICS_ARCHIVE_URL": place.as_uri(), "TOPICS_ARCHIVE_WAIT_MS": str(WAIT_MS)}
    with Service(env=env) as service:
        client = service.client
        put(client, "bank", durability="archived")
        before = _written(client, "bank", idempotency_key="a")
        with archive_away(service):
            body = {"records": [{"data": 2}], "idempotency_key": "b"}
            for _ in range(2):  # also a repeat, which the log has
                detail = refused(client.post("/v0/topics/bank", json=body), 503, "storage_unavailable")["detail"]
                assert detail == {"cause": "archive", "read_only": False, "archive_wait_ms": WAIT_MS}
            refused(client.post("/v0/topics/bank/delete", json={"before_seq": 1}), 503, "storage_unavailable")
            assert write(client, "other", 1)["last_seq"] == 1, "other classes do not wait"
            shown = state(client, "bank")
            assert (shown["head_seq"], shown["archived_seq"]) == (before + 1, before)
        assert _written(client, "bank", idempotency_key="b", value=2) == before + 1
        poll("archived_seq", lambda: state(client, "bank")["archived_seq"] == before + 1)


def _written(client: httpx.Client, topic: str, idempotency_key: str, value: Any = 1) -> int:
    """Write once, repeated until the archive has it: its first moment takes a while."""

    def attempt() -> int | None:
        body = {"records": [{"data": value}], "idempotency_key": idempotency_key}
        answer = client.post(f"/v0/topics/{topic}", json=body)
        return None if answer.status_code == 503 else int(ok(answer)["last_seq"])

    return poll("a write that the archive has", attempt)


def test_strong_streams_show_what_the_archive_has(shipping: Service) -> None:
    client = shipping.client
    write(client, "bank", 1)
    with follow(shipping, {"bank": {"from_seq": 0}}, consistency="strong") as stream:
        assert [record["$seq"] for record in stream.records(1)] == [1]
        with archive_away(shipping), ThreadPoolExecutor(1) as pool:
            late = pool.submit(write, client, "bank", 2)
            poll("the log has it", lambda: state(client, "bank")["head_seq"] == 2)
            assert state(client, "bank")["durable_seq"] == 2
            assert not late.done()
            [process] = [found for found in shipping.status()["processes"] if found["role"] == "archiver"]
            os.kill(process["pid"], signal.SIGCONT)
            assert [record["$seq"] for record in stream.records(1)] == [2]
            assert late.result()["last_seq"] == 2


def test_a_service_without_an_archive_takes_no_such_topic(client: httpx.Client, topic: str) -> None:
    answer = client.put(f"/v0/topics/{topic}", json={"durability": "archived"})
    assert refused(answer, 400, "invalid_request")["detail"]["field"] == "durability"
    body = {"records": [{"data": 1}], "config": {"durability": "archived"}}
    assert (
        refused(client.post(f"/v0/topics/{topic}", json=body), 400, "invalid_request")["detail"]["field"]
        == "durability"
    )
