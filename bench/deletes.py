"""The case of deletes and expiry: their cost, and the latency of a writer to another topic of the shard meanwhile."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from bench import wire
from bench.cases import MILLION, Bench, make_topic
from bench.engine import NO_CHECKPOINTS, scaled, service_with, wait_absorbed
from bench.figures import Figure
from tests.harness import Service

TAGGED: Final = 1000
BATCH: Final = 1000
TAGS: Final = 50
SETTLE_S: Final = 0.2


class Neighbour:
    """A writer to another topic, one record after the other while the context lasts, and its worst latency."""

    def __init__(self, service: Service) -> None:
        self._port = service.port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)
        self.worst_us = 0.0
        self.refused: list[bytes] = []

    def __enter__(self) -> Self:
        self._thread.start()
        time.sleep(SETTLE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(SETTLE_S)
        self._stop.set()
        self._thread.join()
        assert not self.refused, self.refused[0]

    def _write(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            start = time.perf_counter()
            connection.request(
                "POST", "/v0/topics/neighbour", b'{"records":[{"data":1}]}', {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            answer = response.read()
            self.worst_us = max(self.worst_us, (time.perf_counter() - start) * 1e6)
            if response.status >= 300:
                self.refused.append(answer)
        connection.close()


def delete(bench: Bench) -> list[Figure]:
    """Measure deletes of few records of many, then of many beside a neighbour: in sealed segments, at the floor, in the
    tail.
    """
    return _of_many(bench) + _sealed(bench) + _tail(bench)


def _of_many(bench: Bench) -> list[Figure]:
    """Measure the delete of a thousand records with one tag from a long topic, nearly all of it in sealed segments;
    then expiry.
    """
    records, label = scaled(bench, 5 * MILLION)
    body = b'{"records":[{"data":1,"tag":"rare"}]}'
    with service_with(bench, {"TOPICS_CHECKPOINT_WAL_BYTES": str(16 << 20)}) as service:
        topic = make_topic(service, "long", "disk")
        tagged = TAGGED // 10 if bench.quick else TAGGED
        rounds = [wire.write(topic, 1000)] * (records // tagged // 1000)
        rounds.append(wire.post(f"/v0/topics/{topic}?return_seqs=false", body))
        bench.run(service, [rounds], tagged)
        service.restart()  # with a last cut
        wait_absorbed(service)
        times = {}
        for what, asked in (("first", "rare"), ("again", "rare"), ("absent", "nowhere")):
            start = time.perf_counter()
            answer = service.client.post(f"/v0/topics/{topic}/delete", json={"match": asked}).raise_for_status().json()
            times[what] = (time.perf_counter() - start) * 1e6
            assert answer["deleted"] == (tagged if what == "first" else 0), answer
        values = {f"{what}_us": took for what, took in times.items()}
        figures = [Figure("delete", f"{tagged} of {label} by tag", values)]
        count = answer["count"]
        config = {"durability": "disk", "ttl_ms": 1}
        start = time.perf_counter()
        service.client.put(f"/v0/topics/{topic}", json=config).raise_for_status()
        state = service.client.get(f"/v0/topics/{topic}").raise_for_status().json()
        took_us = (time.perf_counter() - start) * 1e6
        assert (state["count"], state["earliest_seq"]) == (0, state["head_seq"] + 1), state
        figures.append(Figure("expiry", f"{count} records at once", {"took_us": took_us}))
        return figures


def _sealed(bench: Bench) -> list[Figure]:
    records, _ = scaled(bench, 600_000)
    each, label = records // TAGS, f"{records // 1000} k"
    with service_with(bench, {"TOPICS_CHECKPOINT_WAL_BYTES": str(16 << 20)}) as service:
        topic = _fill_tagged(bench, service, records)
        service.restart()  # with a last cut
        wait_absorbed(service)
        return [
            _beside(service, topic, f"sealed: {each} of {label}", {"match": "g:07"}, each),
            _beside(service, topic, f"{10 * each} of them", {"match": "g:1*"}, 10 * each),
            _beside(service, topic, f"{39 * each} of them", {"match": "g:*"}, 39 * each),
            _beside(service, topic, "the one in front of these", {"before_seq": 2}, 1),
        ]


def _tail(bench: Bench) -> list[Figure]:
    records, _ = scaled(bench, 500_000)
    each, label = records // TAGS, f"{records // 1000} k"
    with service_with(bench, NO_CHECKPOINTS) as service:
        topic = _fill_tagged(bench, service, records)
        return [
            _beside(service, topic, f"tail: 1 of {label}", {"match": "front"}, 1),
            _beside(service, topic, "the same again", {"match": "front"}, 0),
            _beside(service, topic, f"{each} of them", {"match": "g:07"}, each),
            _beside(service, topic, f"{49 * each} of them", {"match": "g:*"}, 49 * each),
        ]


def _fill_tagged(bench: Bench, service: Service, records: int) -> str:
    """Write a record with a tag of its own, then records with TAGS tags in turns."""
    topic = make_topic(service, "tagged", "disk")
    service.client.post(f"/v0/topics/{topic}", json={"records": [{"data": 0, "tag": "front"}]}).raise_for_status()
    rows = [b'{"data":%b,"tag":"g:%02d"}' % (wire.data(number), number % TAGS) for number in range(BATCH)]
    path = f"/v0/topics/{topic}?return_seqs=false"
    bench.run(service, [[wire.post(path, b'{"records":[' + b",".join(rows) + b"]}")]], records // BATCH)
    return topic


def _beside(service: Service, topic: str, what: str, asked: dict[str, Any], deleted: int) -> Figure:
    with Neighbour(service) as neighbour:
        start = time.perf_counter()
        answer = service.client.post(f"/v0/topics/{topic}/delete", json=asked).raise_for_status().json()
        took_us = (time.perf_counter() - start) * 1e6
    assert answer["deleted"] == deleted, answer
    return Figure("delete", what, {"took_us": took_us, "neighbour_worst_us": neighbour.worst_us})


CASES: Final[dict[str, Callable[[Bench], list[Figure]]]] = {"delete": delete}
