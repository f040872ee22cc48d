"""api §7 with a client that is not ours: httpx-sse parses the stream, and comes back where it was."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from httpx_sse import ServerSentEvent, connect_sse

from tests.contract.asking import ok, put, write
from tests.contract.stream import watch
from tests.harness import Service


@pytest.fixture
def patient(service: Service) -> Any:
    with httpx.Client(base_url=service.url, timeout=15) as client:
        yield client


def take(client: httpx.Client, wid: str, count: int, last_event_id: str | None = None) -> list[ServerSentEvent]:
    """The first events of a stream, which is then left."""
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    events: list[ServerSentEvent] = []
    with connect_sse(client, "GET", f"/v0/watch/{wid}", headers=headers) as source:
        assert source.response.status_code == 200
        for event in source.iter_sse():
            if not event.data:
                continue  # the library shows the opening `retry`, which browsers do not
            events.append(event)
            if len(events) == count:
                break
    return events


def test_an_sse_library_reads_the_stream(service: Service, patient: httpx.Client, topic: str) -> None:
    data = {"text": "über\u2028\nzwei Zeilen", "n": [1, {"a": None}]}
    ok(service.client.post(f"/v0/topics/{topic}", json={"records": [{"data": data, "tag": "t"}]}))
    put(service.client, f"{topic}.other")
    wid = watch(service.client, {topic: {}, f"{topic}.other": {}}, include_tags=True)["wid"]
    events = take(patient, wid, 3)
    assert sorted(event.event for event in events) == ["caught-up", "caught-up", "record"]
    record = next(event for event in events if event.event == "record")
    assert record.json()["records"][0]["data"] == data
    assert record.json()["records"][0]["$tag"] == "t"
    assert all(event.id for event in events)
    assert {event.retry for event in events} <= {2000, None}


def test_pretty_printed_json_survives_the_lines_of_the_stream(
    service: Service, patient: httpx.Client, topic: str
) -> None:
    body = b'{"records":[{"data":{\n  "a": 1,\n\n  "b": [\n    2\r\n  ]\n}}]}'
    service.client.post(f"/v0/topics/{topic}", content=body, headers={"Content-Type": "application/json"})
    (event,) = take(patient, watch(service.client, {topic: {}})["wid"], 1)
    assert event.json()["records"][0]["data"] == {"a": 1, "b": [2]}


def test_it_comes_back_where_it_was(service: Service, patient: httpx.Client, topic: str) -> None:
    wid = None
    last_id: str | None = None
    seen: list[int] = []
    for turn in range(8):
        write(service.client, topic, *range(turn * 5, turn * 5 + 5))
        if wid is None:
            wid = watch(service.client, {topic: {}}, limit=3)["wid"]
        events = take(patient, wid, 2, last_id)
        for event in events:
            if event.event == "record":
                seen += [record["$seq"] for record in event.json()["records"]]
                last_id = event.id
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) >= 24
