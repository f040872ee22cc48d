"""api §3.2, §3.3, storage.md Retention, wherever the records are: in the log, in an active segment, in sealed ones, in
the cold directory. The rules are the same, and what they took is taken after a kill as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from tests.contract.asking import diff, ok, put, refused, state, write
from tests.contract.timing import now_ms, undisturbed
from tests.harness import Service, poll

pytestmark = pytest.mark.long

EVENTS = 10
"""Records in a sealed segment."""
PLACES = ("log", "active", "sealed", "cold")
TTL_MS = 400
STATE_IN_TIME_MS = 200
"""An answer that took less did wait for the shard to evict; after 250 ms a state shows what the shard last said."""


class Place:
    """A service that puts records there at once."""

    def __init__(self, kind: Literal["log", "active", "sealed", "cold"]) -> None:
        self.kind = kind
        env = {"TOPICS_CHECKPOINT_INTERVAL_MS": "20", "TOPICS_SEGMENT_MAX_EVENTS": str(EVENTS)}
        if kind == "log":
            env["TOPICS_CHECKPOINT_INTERVAL_MS"] = "3600000"
        if kind == "active":
            env["TOPICS_SEGMENT_MAX_EVENTS"] = "10000"
        self.service = Service(shards=1, frontends=2, env=env)
        if kind == "cold":
            self.service.env |= {"TOPICS_COLD_DIR": str(self.service.root / "cold"), "TOPICS_HOT_RETAIN_SEGMENTS": "0"}

    @property
    def client(self) -> httpx.Client:
        return self.service.client

    def fill(self, topic: str, count: int, tag: Callable[[int], str] | None = None, size: int = 10) -> list[int]:
        """Write so many records, one a write, and have them there; return the `$ts` of those that still live."""
        for seq in range(1, count + 1):
            record = {"data": {"n": seq, "text": "x" * size}} | ({"tag": tag(seq)} if tag else {})
            ok(self.client.post(f"/v0/topics/{topic}", json={"records": [record]}))
        self.settle(topic, count)
        return [record["$ts"] for record in records(self.client, topic)]

    def settle(self, topic: str, count: int) -> None:
        """The first `count` seqs are there, or gone."""
        poll(f"records in {self.kind}", lambda: self._is_settled(topic, count), 20.0)

    def _is_settled(self, topic: str, count: int) -> bool:
        listing = ok(self.client.get(f"/v0/topics/{topic}/segments"))
        if self.kind == "log":
            assert not self.files(topic)
            return True
        if self.kind == "active":
            assert not listing["segments"]
            active = [path for path in self.files(topic) if path.suffix == ".idx"]
            return len(active) == 1 and first_seq_of(active[0]) - 1 + active[0].stat().st_size // 20 == count
        # The last ones may be too few for a segment.
        rows = listing["segments"]
        tier = "cold" if self.kind == "cold" else "hot"
        return bool(rows) and rows[-1]["last_seq"] > count - EVENTS and all(row["tier"] == tier for row in rows)

    def files(self, topic: str) -> list[Path]:
        """Return the files of the topic's segments, in both directories."""
        name = state(self.client, topic)["epoch"]
        roots = (self.service.data_dir, self.service.root / "cold")
        return [path for root in roots for path in (root / "topics" / name).glob("seg-*")]

    def kill_and_start(self) -> None:
        self.service.kill_group()
        self.service.start()


def first_seq_of(path: Path) -> int:
    return int(path.name.split("-")[1].split(".")[0])


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    place = Place(request.param)
    with place.service:
        yield place


Gap = tuple[str, int, int] | None


def gap(page: dict[str, Any]) -> Gap:
    found = page["tombstone"]
    return None if found is None else (found["reason"], found["gap_from"], found["gap_to"])


def gaps(client: httpx.Client, topic: str, head_seq: int) -> list[Gap]:
    """Return the gaps that a reader at every cursor is told of."""
    return [gap(diff(client, topic, from_seq=n)) for n in range(head_seq + 1)]


def records(client: httpx.Client, topic: str) -> list[dict[str, Any]]:
    """All that a reader at the beginning gets, page by page; the payloads are those that were written."""
    found: list[dict[str, Any]] = []
    cursor = 0
    while True:
        page = diff(client, topic, from_seq=cursor, limit=1000)
        for record in page["records"]:
            assert not isinstance(record["data"], dict) or record["data"]["n"] == record["$seq"]
        found += page["records"]
        cursor = page["next_from_seq"]
        if page["caught_up"]:
            return found


def live(client: httpx.Client, topic: str) -> list[int]:
    """Their seqs."""
    return [record["$seq"] for record in records(client, topic)]


def shown(client: httpx.Client, topic: str, head_seq: int) -> tuple[Any, ...]:
    """All that retention decides."""
    answer = state(client, topic)
    figures = [answer[key] for key in ("earliest_seq", "head_seq", "next_seq", "count", "bytes")]
    return figures, live(client, topic), gaps(client, topic, head_seq)


def delete(client: httpx.Client, topic: str, **body: Any) -> dict[str, Any]:
    return ok(client.post(f"/v0/topics/{topic}/delete", json=body))


def test_caps_take_the_oldest_to_the_record(place: Place, topic: str) -> None:
    client = place.client
    put(client, topic, cap_records=25)
    place.fill(topic, 30)
    assert shown(client, topic, 30) == (
        [6, 30, 31, 25, state(client, topic)["bytes"]],
        list(range(6, 31)),
        [*(("cap", n + 1, 5) for n in range(5)), *[None] * 26],
    )
    put(client, topic, cap_records=7)
    write(client, topic, "one more")
    before = shown(client, topic, 31)
    assert before[0][:4] == [25, 31, 32, 7]
    assert before[1] == list(range(25, 32))
    assert before[2] == [*(("cap", n + 1, 24) for n in range(24)), *[None] * 8]
    place.kill_and_start()
    assert shown(place.client, topic, 31) == before


def test_a_cap_of_bytes_counts_what_lives(place: Place, topic: str) -> None:
    client = place.client
    place.fill(topic, 30)
    each = state(client, topic)["bytes"] // 30
    size_bytes = state(client, topic)["bytes"]
    put(client, topic, cap_bytes=size_bytes)
    assert (state(client, topic)["count"], gap(diff(client, topic))) == (30, None)
    put(client, topic, cap_bytes=size_bytes - 1)
    assert (state(client, topic)["count"], gap(diff(client, topic))) == (29, ("cap", 1, 1))
    put(client, topic, cap_bytes=5 * each)
    answer = state(client, topic)
    assert answer["bytes"] <= 5 * each
    assert answer["bytes"] > 3 * each
    assert live(client, topic) == list(range(31 - answer["count"], 31))
    before = shown(client, topic, 30)
    place.kill_and_start()
    assert shown(place.client, topic, 30) == before


def test_expiry_is_exact_to_the_millisecond_on_an_idle_topic(place: Place, topic: str) -> None:
    """Nobody writes, or looks at the topic otherwise. What an answer shows has not expired when the question was sent;
    what it does not show has expired when the answer is here. The clock is this machine's.
    """
    names: list[str] = []

    def watched(name: str) -> bool:
        names.append(name)
        return looks_while_it_expires(place, name) > 3

    undisturbed("a topic to expire while it is looked at", topic, watched)
    place.kill_and_start()
    poll("what had expired to go", lambda: state(place.client, names[-1])["count"] == 0)
    assert shown(place.client, names[-1], 20) == (
        [21, 20, 21, 0, 0],
        [],
        [*(("ttl", n + 1, 20) for n in range(20)), None],
    )


def looks_while_it_expires(place: Place, topic: str) -> int:
    """Return how many answers to a read, and how many states, were seen in time: the lower number."""
    client = place.client
    stamps = place.fill(topic, 2 * EVENTS)
    put(client, topic, ttl_ms=now_ms() - stamps[0] + TTL_MS)
    ttl_ms = ok(client.get(f"/v0/topics/{topic}", params={"touch": "false"}))["config"]["ttl_ms"]
    pages = states = 0
    while True:
        asked_ms = now_ms()
        page = diff(client, topic, limit=1000)
        answered_ms = now_ms()
        pages += 1
        got = [record["$seq"] for record in page["records"]]
        # A page ends where more has to be fetched from the cold directory.
        assert got == list(range(page["earliest_seq"], page["next_from_seq"] + 1))
        assert got or page["caught_up"]
        for seq, ts in enumerate(stamps, 1):
            if seq in got:
                assert asked_ms - ts <= ttl_ms, f"seq {seq} was served {asked_ms - ts - ttl_ms} ms too late"
            elif seq < page["earliest_seq"]:
                assert answered_ms - ts > ttl_ms, f"seq {seq} went {ttl_ms - answered_ms + ts} ms too early"
        assert gap(page) == (None if page["earliest_seq"] == 1 else ("ttl", 1, page["earliest_seq"] - 1))
        asked_ms = now_ms()
        answer = state(client, topic)
        answered_ms = now_ms()
        if answered_ms - asked_ms < STATE_IN_TIME_MS:
            states += 1
            assert answer["count"] <= sum(1 for ts in stamps if asked_ms - ts <= ttl_ms)
        assert answer["count"] >= sum(1 for ts in stamps if answered_ms - ts <= ttl_ms)
        assert answer["earliest_seq"] == 2 * EVENTS + 1 - answer["count"]
        if not answer["count"]:
            assert answer["bytes"] == 0
            return min(pages, states)


def test_reject_refuses_until_there_is_room(place: Place, topic: str) -> None:
    client = place.client
    put(client, topic, cap_records=20, discard="reject")
    stamps = place.fill(topic, 20, tag=lambda seq: "odd" if seq % 2 else "even")
    full = {"records": [{"data": "no room"}]}
    for _ in range(2):
        assert refused(client.post(f"/v0/topics/{topic}", json=full), 422, "topic_full")["detail"] == {
            "cap_records": 20
        }
        refused(client.post(f"/v0/topics/{topic}", json={"records": [{"data": 0}] * 21}), 400, "record_too_large")
        assert (state(client, topic)["head_seq"], gap(diff(client, topic))) == (20, None)
        place.kill_and_start()
        client = place.client
    assert delete(client, topic, match="odd")["deleted"] == 10
    written_ms = now_ms()
    assert write(client, topic, *range(10))["first_seq"] == 21
    refused(client.post(f"/v0/topics/{topic}", json=full), 422, "topic_full")
    # What expires makes room as well, and is said.
    ttl_ms = now_ms() - stamps[-1]
    put(client, topic, cap_records=20, discard="reject", ttl_ms=ttl_ms)
    poll("room", lambda: client.post(f"/v0/topics/{topic}", json=full).status_code == 200)
    put(client, topic, cap_records=20, discard="reject", ttl_ms=0)
    told, behind = gaps(client, topic, 20)[0], gap(diff(client, topic, from_seq=20))
    if now_ms() <= written_ms + ttl_ms:
        assert (told, behind) == (("ttl", 1, 20), None)
    else:
        # What was written here may have expired as well before that was stopped.
        assert told is not None
        assert told[:2] == ("ttl", 1)


def test_a_gap_of_both_kinds_is_mixed_over_a_kill(place: Place, topic: str) -> None:
    client = place.client
    put(client, topic, cap_records=12)
    stamps = place.fill(topic, 15)
    assert gap(diff(client, topic)) == ("cap", 1, 3)
    put(client, topic, cap_records=12, ttl_ms=max(1, now_ms() - stamps[-1]))
    poll("the rest to expire", lambda: state(client, topic)["count"] == 0)
    expected = [*(("mixed", n + 1, 15) for n in range(3)), *(("ttl", n + 1, 15) for n in range(3, 15)), None]
    assert gaps(client, topic, 15) == expected
    place.kill_and_start()
    assert gaps(place.client, topic, 15) == expected


@pytest.mark.parametrize("by", ["ttl", "cap"])
def test_what_was_deleted_is_no_part_of_a_loss(place: Place, topic: str, by: str) -> None:
    """evict_floor moves over live records only: who stands behind the last of them has lost nothing (api §3.2)."""
    client = place.client
    stamps = place.fill(topic, 15, tag=lambda seq: "gone" if seq in (4, 5, 6, 13, 14, 15) else "kept")
    assert delete(client, topic, match="gone")["deleted"] == 6
    if by == "cap":
        put(client, topic, cap_records=6)  # takes 1, 2 and 3
        expected: list[Gap] = [*(("cap", n + 1, 6) for n in range(3)), *[None] * 13]
        earliest_seq = 7
    else:
        put(client, topic, ttl_ms=max(1, now_ms() - stamps[-1]))
        poll("all to expire", lambda: not live(client, topic))
        expected = [*(("ttl", n + 1, 15) for n in range(12)), *[None] * 4]
        earliest_seq = 16
    for _ in range(2):
        assert gaps(client, topic, 15) == expected
        # A state does not wait for long until the shard has evicted what expired.
        poll("the floor", lambda: state(place.client, topic)["earliest_seq"] == earliest_seq)
        place.kill_and_start()
        client = place.client


def test_deletions_alone_are_silent(place: Place, topic: str) -> None:
    client = place.client
    place.fill(topic, 25, tag=lambda seq: "odd" if seq % 2 else "even")
    assert delete(client, topic, match="odd")["deleted"] == 13
    answer = delete(client, topic, before_seq=21)
    assert (answer["deleted"], answer["earliest_seq"], answer["count"]) == (10, 22, 2)
    before = shown(client, topic, 25)
    assert before[1:] == ([22, 24], [None] * 26)
    place.kill_and_start()
    client = place.client
    assert shown(client, topic, 25) == before
    answer = delete(client, topic, match="*")
    assert (answer["deleted"], answer["earliest_seq"], answer["count"], answer["bytes"]) == (2, 26, 0, 0)
    assert shown(client, topic, 25) == ([26, 25, 26, 0, 0], [], [None] * 26)


def test_a_name_that_is_used_again_has_nothing_of_the_former(place: Place, topic: str) -> None:
    client = place.client
    place.fill(topic, 25)
    files = place.files(topic)
    assert bool(files) == (place.kind != "log")
    ok(client.delete(f"/v0/topics/{topic}"))
    write(client, topic, 1, 2)
    for _ in range(2):
        page = diff(client, topic, from_seq=25)
        assert gap(page) == ("recreated", 1, 2)
        assert (page["head_seq"], live(client, topic), gap(diff(client, topic))) == (2, [1, 2], None)
        place.kill_and_start()
        client = place.client
    if place.kind != "log":
        poll("the former one's files to go", lambda: not any(path.exists() for path in files), 20.0)


@pytest.mark.parametrize("by", ["cap", "ttl", "before_seq", "match"])
def test_disk_space_comes_back_in_whole_segments(place: Place, topic: str, by: str) -> None:
    """Segments of which nothing lives go, one that has a live record stays."""
    client = place.client
    if place.kind not in ("sealed", "cold"):
        place.fill(topic, 5)
        before = place.files(topic)
        delete(client, topic, before_seq=5)
        for _ in range(20):
            write(client, f"{topic}.other", 0)
        assert place.files(topic) == before, "one of its records lives"
        return
    stamps = place.fill(topic, 40, tag=lambda seq: "old" if seq <= 25 else "new")
    write(client, topic, "in the active segment")
    if by == "cap":
        put(client, topic, cap_records=16)
    elif by == "ttl":
        put(client, topic, ttl_ms=now_ms() - stamps[0] + 1)
        poll("some to expire", lambda: state(client, topic)["earliest_seq"] > 20)
    elif by == "match":
        delete(client, topic, match="old")
    else:
        delete(client, topic, before_seq=26)
    earliest_seq = state(client, topic)["earliest_seq"]

    def first_seqs() -> set[int]:
        return {first_seq_of(path) for path in place.files(topic)}

    def is_dropped() -> bool:
        write(client, f"{topic}.other", 0)  # snapshots are made when there is something to say
        found = first_seqs()
        floor = state(client, topic)["earliest_seq"]
        return all(first_seq + EVENTS > floor for first_seq in found)

    poll("segments without live records to go", is_dropped, 20.0)
    if by != "ttl":
        assert earliest_seq == 26
        assert first_seqs() >= {21, 31}
        assert live(client, topic) == list(range(26, 42))
    place.kill_and_start()
    assert state(place.client, topic)["earliest_seq"] >= earliest_seq


def test_a_topic_of_which_nothing_is_left_goes_on_behind_it(place: Place, topic: str) -> None:
    """The topic's active segment goes as well; the next record begins another one."""
    client = place.client
    place.fill(topic, 15)
    assert delete(client, topic, before_seq=16)["count"] == 0

    def is_gone() -> bool:
        write(client, f"{topic}.other", 0)
        return not place.files(topic)

    poll("its files to go", is_gone, 20.0)
    for _ in range(2):
        assert (state(client, topic)["count"], state(client, topic)["earliest_seq"]) == (0, 16)
        place.kill_and_start()
        client = place.client
    assert write(client, topic, *range(EVENTS))["first_seq"] == 16
    place.settle(topic, 15 + EVENTS)
    assert (live(client, topic), gap(diff(client, topic))) == (list(range(16, 16 + EVENTS)), None)


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_what_was_in_ram_is_said_to_be_gone(place: Place, topic: str, end: str) -> None:
    """`restart`: of an `ephemeral` topic, and of what one had before it became durable only what no segment has."""
    client = place.client
    put(client, topic, durability="ephemeral")
    write(client, topic, *range(5))
    assert gaps(client, topic, 5) == [None] * 6
    if end == "kill":
        place.kill_and_start()
    else:
        place.service.restart()
    client = place.client
    answer = state(client, topic)
    head_seq = answer["head_seq"]
    assert head_seq >= 5, "a seq is never given twice"
    assert (answer["count"], answer["earliest_seq"]) == (0, head_seq + 1)
    assert gaps(client, topic, 5)[:5] == [("restart", n + 1, head_seq) for n in range(5)]
    put(client, topic, durability="disk", cap_records=1)
    write(client, topic, "a", "b")
    expected = ("mixed", 1, head_seq + 1)
    assert gap(diff(client, topic)) == expected
    place.kill_and_start()
    assert gap(diff(place.client, topic)) == expected
