"""[ours] `GET /v0/topics/:t/segments` and pins: sealed segments for readers of the files (docs/decisions/0009)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.asking import ok, put, refused, write
from tests.harness import Service, poll
from topics.frontend.entry.limits import PINS
from topics.shm import shm_names
from topics.storage.frame import FLAG_TAG
from topics.storage.pins import pins_dir
from topics.storage.segment import index_digest
from topics.storage.segment_reader import SegmentReader

pytestmark = pytest.mark.long

EVENTS = 10
RECORDS = 45
MINUTE_MS = 60_000


def serving(**env: str) -> Service:
    """Small segments at once, two frontends; whatever is superfluous goes within two checkpoints."""
    small = {"TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS), "TOPICS_CHECKPOINT_INTERVAL_MS": "20"}
    return Service(env=small | env, frontends=2)


@pytest.fixture(scope="module")
def hot() -> Iterator[Service]:
    with serving() as running:
        yield running


@pytest.fixture
def client(hot: Service) -> httpx.Client:
    return hot.client


def manifest(client: httpx.Client, topic: str, **query: Any) -> dict[str, Any]:
    return ok(client.get(f"/v0/topics/{topic}/segments", params=query))


def sealed(client: httpx.Client, topic: str, count: int = RECORDS) -> dict[str, Any]:
    """The manifest once all full segments of `count` records are sealed. Without a pin: a slow compactor is asked for
    so often that a pin each time would be more than there may be.
    """
    return poll(
        "segments to be sealed",
        lambda: found if len((found := manifest(client, topic))["segments"]) >= count // EVENTS else None,
    )


def fill(client: httpx.Client, topic: str, count: int = RECORDS) -> None:
    for first in range(0, count, 5):
        write(client, topic, *[{"n": first + n, "text": "x" * 50} for n in range(5)])


def data_files(root: Path, listing: dict[str, Any]) -> list[Path]:
    return [root / row["data_path"] for row in listing["segments"]]


def test_it_lists_what_is_sealed(hot: Service, client: httpx.Client, topic: str) -> None:
    fill(client, topic)
    found = sealed(client, topic)
    state = ok(client.get(f"/v0/topics/{topic}"))
    assert [(row["first_seq"], row["last_seq"], row["records"]) for row in found["segments"]] == [
        (first, first + 9, 10) for first in (1, 11, 21, 31)
    ]
    assert (found["http_from_seq"], found["head_seq"], found["earliest_seq"], found["evict_floor"]) == (41, 45, 1, 1)
    assert (found["epoch"], found["pin"], found["next_from_seq"]) == (state["epoch"], None, None)
    assert {row["tier"] for row in found["segments"]} == {"hot"}
    for row in found["segments"]:
        idx = (hot.data_dir / row["idx_path"]).read_bytes()
        data = (hot.data_dir / row["data_path"]).read_bytes()
        assert len(data) == row["data_bytes"]
        assert f"{index_digest(idx):016x}" == row["idx_xxh3"]
        reader = SegmentReader("", row["first_seq"], idx, data)
        assert list(reader.damage(())) == []
        frames = [reader.frame(seq) for seq in (row["first_seq"], row["last_seq"])]
        assert [frame.ts for frame in frames if frame is not None] == [row["first_ts"], row["last_ts"]]
        assert not any(frame.flags & FLAG_TAG for frame in frames if frame is not None)


def test_a_range_is_behind_a_cursor_and_up_to_a_seq(client: httpx.Client, topic: str) -> None:
    fill(client, topic)
    sealed(client, topic)

    def firsts(**query: Any) -> list[int]:
        return [row["first_seq"] for row in manifest(client, topic, **query)["segments"]]

    assert firsts(from_seq=10) == [11, 21, 31]
    assert firsts(from_seq=9, to_seq=11) == [1, 11]
    assert firsts(to_seq=10) == [1]
    assert firsts(from_seq=40) == []
    client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 15})
    found = manifest(client, topic)
    assert (found["earliest_seq"], [row["first_seq"] for row in found["segments"]]) == (15, [11, 21, 31])


def test_the_digest_of_an_index_outlives_deletions(hot: Service, client: httpx.Client, topic: str) -> None:
    records = [{"data": n, "tag": f"t{n % 10}"} for n in range(RECORDS)]
    ok(client.post(f"/v0/topics/{topic}", json={"records": records}))
    before = sealed(client, topic)["segments"]
    idx = (hot.data_dir / before[1]["idx_path"]).read_bytes()
    ok(client.post(f"/v0/topics/{topic}/delete", json={"match": "t3"}))
    poll("marks", lambda: (hot.data_dir / before[1]["idx_path"]).read_bytes() != idx)
    assert [row["idx_xxh3"] for row in manifest(client, topic)["segments"]] == [row["idx_xxh3"] for row in before]


@pytest.mark.parametrize("how", ["cap", "delete", "topic deleted"])
def test_pinned_files_stay_until_the_pin_ends(hot: Service, client: httpx.Client, topic: str, how: str) -> None:
    fill(client, topic)
    sealed(client, topic)
    pinned = manifest(client, topic, to_seq=20, pin_ttl_ms=MINUTE_MS)
    files = data_files(hot.data_dir, pinned)
    witness = data_files(hot.data_dir, manifest(client, topic, from_seq=20, to_seq=30))
    content = [path.read_bytes() for path in files]
    assert len(files) == 2
    if how == "cap":
        put(client, topic, cap_records=5)
        write(client, topic, 1)  # what is evicted is logged with the next write
    elif how == "delete":
        ok(client.post(f"/v0/topics/{topic}/delete", json={"before_seq": 41}))
    else:
        ok(client.delete(f"/v0/topics/{topic}"))
    poll("what is not pinned to go", lambda: not witness[0].exists())
    assert [len(path.read_bytes()) for path in files] == [len(one) for one in content]
    pin = pinned["pin"]["id"]
    assert ok(client.put(f"/v0/topics/{topic}/pins/{pin}"))["held"] is True
    assert ok(client.delete(f"/v0/topics/{topic}/pins/{pin}"))["ended"] is True
    poll("what was pinned to go", lambda: not any(path.exists() for path in files))
    assert ok(client.put(f"/v0/topics/{topic}/pins/{pin}"))["held"] is False
    assert ok(client.delete(f"/v0/topics/{topic}/pins/{pin}"))["ended"] is False


def test_a_pin_that_nobody_renews_is_over(hot: Service, client: httpx.Client, topic: str) -> None:
    fill(client, topic)
    sealed(client, topic)
    pinned = manifest(client, topic, pin_ttl_ms=1)
    put(client, topic, cap_records=5)
    write(client, topic, 1)
    files = data_files(hot.data_dir, pinned)
    poll("pinned files to go", lambda: not any(path.exists() for path in files))
    assert ok(client.put(f"/v0/topics/{topic}/pins/{pinned['pin']['id']}"))["held"] is False


def test_a_rewritten_segment_keeps_the_pinned_version(hot: Service, client: httpx.Client, topic: str) -> None:
    for n in range(RECORDS):
        ok(client.post(f"/v0/topics/{topic}", json={"records": [{"data": n, "tag": f"t{n % 10}"}]}))
    sealed(client, topic)
    pinned = manifest(client, topic, pin_ttl_ms=MINUTE_MS)
    for digit in range(8):
        ok(client.post(f"/v0/topics/{topic}/delete", json={"match": f"t{digit}"}))
    poll(
        "segments to be rewritten", lambda: all(row["version"] >= 1 for row in manifest(client, topic)["segments"]), 20
    )
    files = data_files(hot.data_dir, pinned)
    assert all(path.exists() for path in files)
    assert not set(files) & set(data_files(hot.data_dir, manifest(client, topic)))
    ok(client.delete(f"/v0/topics/{topic}/pins/{pinned['pin']['id']}"))


def test_a_relocated_segment_keeps_the_pinned_data(topic: str) -> None:
    service = serving(TOPICS_HOT_RETAIN_SEGMENTS="100")
    service.env["TOPICS_COLD_DIR"] = str(service.root / "cold")
    with service:
        fill(service.client, topic)
        sealed(service.client, topic)
        service.env["TOPICS_HOT_RETAIN_SEGMENTS"] = "1"
        service.restart()
        pinned = manifest(service.client, topic, pin_ttl_ms=MINUTE_MS)
        moved = poll(
            "older segments to be cold",
            lambda: rows if (rows := manifest(service.client, topic)["segments"])[2]["tier"] == "cold" else None,
        )
        assert [row["tier"] for row in moved] == ["cold", "cold", "cold", "hot"]
        assert all((service.root / "cold" / row["data_path"]).exists() for row in moved[:3])
        was_hot = [row for row in pinned["segments"] if row["tier"] == "hot"]
        fill(service.client, f"{topic}.other")  # so that there are snapshots to remove something at
        assert all((service.data_dir / row["data_path"]).exists() for row in was_hot)
        ok(service.client.delete(f"/v0/topics/{topic}/pins/{pinned['pin']['id']}"))
        poll("hot data to go", lambda: not (service.data_dir / pinned["segments"][0]["data_path"]).exists())


def test_what_is_refused(client: httpx.Client, topic: str) -> None:
    refused(client.get(f"/v0/topics/{topic}/segments"), 404, "topic_not_found")
    write(client, topic, 1)
    for query in ({"from_seq": "-1"}, {"to_seq": "x"}, {"pin_ttl_ms": "1.5"}):
        error = refused(client.get(f"/v0/topics/{topic}/segments", params=query), 400, "invalid_request")
        assert error["detail"]["field"] == next(iter(query))
    refused(client.put(f"/v0/topics/{topic}/pins/none"), 400, "invalid_request")
    assert manifest(client, topic, pin_ttl_ms=10**12)["pin"]["ttl_ms"] == 3_600_000


def test_another_topics_name_does_not_reach_a_pin(client: httpx.Client, topic: str) -> None:
    fill(client, topic, 20)
    sealed(client, topic, 20)
    pin = manifest(client, topic, pin_ttl_ms=MINUTE_MS)["pin"]["id"]
    assert ok(client.delete(f"/v0/topics/{topic}.x/pins/{pin}"))["ended"] is False
    assert ok(client.put(f"/v0/topics/{topic}.x/pins/{pin}"))["held"] is False
    assert ok(client.delete(f"/v0/topics/{topic}/pins/{pin}"))["ended"] is True


def test_pins_are_limited(topic: str) -> None:
    with Service(env={"TOPICS_CHECKPOINT_INTERVAL_MS": "20"}, frontends=1) as own:
        write(own.client, topic, 1)
        pins = [manifest(own.client, topic, pin_ttl_ms=MINUTE_MS)["pin"]["id"] for _ in range(256)]
        answer = own.client.get(f"/v0/topics/{topic}/segments", params={"pin_ttl_ms": MINUTE_MS})
        assert refused(answer, 429, "throttled")["detail"] == {"limit": "pins", "max": 256}
        assert manifest(own.client, topic)["pin"] is None, "without a pin it is answered"
        ok(own.client.put(f"/v0/topics/{topic}/pins/{pins[0]}", params={"pin_ttl_ms": MINUTE_MS}))
        manifest(own.client, f"{topic}", pin_ttl_ms=0)


def test_a_pin_that_was_ended_makes_room(topic: str) -> None:
    with Service(env={"TOPICS_CHECKPOINT_INTERVAL_MS": "20"}, frontends=1) as own:
        write(own.client, topic, 1)
        pins = [manifest(own.client, topic, pin_ttl_ms=MINUTE_MS)["pin"]["id"] for _ in range(PINS.most_count)]
        for pin in pins[:2]:
            refused(own.client.get(f"/v0/topics/{topic}/segments", params={"pin_ttl_ms": MINUTE_MS}), 429, "throttled")
            assert ok(own.client.delete(f"/v0/topics/{topic}/pins/{pin}"))["ended"] is True
            assert manifest(own.client, topic, pin_ttl_ms=MINUTE_MS)["pin"] is not None
            assert ok(own.client.put(f"/v0/topics/{topic}/pins/{pin}"))["held"] is False


def test_a_frontend_has_room_again_where_another_ended_its_pins(topic: str) -> None:
    with ExitStack() as stack:
        own = stack.enter_context(Service(env={"TOPICS_CHECKPOINT_INTERVAL_MS": "20"}, frontends=2))
        write(own.client, topic, 1)
        directory = Path(pins_dir(shm_names.ram_dir(shm_names.identity(str(own.data_dir)))))
        clients: dict[str, httpx.Client] = {}

        def pinned(client: httpx.Client) -> str:
            pin: str = manifest(client, topic, pin_ttl_ms=MINUTE_MS)["pin"]["id"]
            return pin

        def of_both() -> bool:
            client = stack.enter_context(httpx.Client(base_url=own.url))
            pin = pinned(client)
            clients.setdefault(next(directory.glob(f"{pin}.*")).suffix, client)
            return len(clients) == 2

        poll("connections to both", of_both)
        one, other = clients.values()
        for _ in range(2 * PINS.most_count):
            pin = pinned(one)
            assert ok(other.delete(f"/v0/topics/{topic}/pins/{pin}"))["ended"] is True
            assert ok(one.put(f"/v0/topics/{topic}/pins/{pin}"))["held"] is False
        pinned(other)
        for _ in range(PINS.most_count):
            assert ok(other.delete(f"/v0/topics/{topic}/pins/{pinned(other)}"))["ended"] is True
        assert len(list(directory.iterdir())) <= 3 * PINS.most_count
