"""The state machine of one event stream, fed with real pages (api §7, rules.md Watch)."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.stream import Frame
from tests.frontend.hosting import Hosting, Written
from topics.api.answers import TombstoneAnswer as Tombstone
from topics.core.config import TopicConfig
from topics.core.floors import EvictReason
from topics.frontend.live.stream import (
    FramedPage,
    StepOutcome,
    StreamSpec,
    StreamState,
    StreamStep,
    TopicPhase,
    frame_page,
)
from topics.frontend.live.wording import EVENT_STREAM
from topics.frontend.reads.reading import RecordPage
from topics.frontend.reads.records import PageOptions
from topics.shm import shm_names

OPTIONS = PageOptions(limit=256, max_batch_bytes=1 << 20)


def frames(data: bytes) -> list[Frame]:
    """Whole frames, each with its blank line."""
    assert data == b"" or data.endswith(b"\n\n")
    return [Frame(raw) for raw in data.split(b"\n\n")[:-1]]


def events(step: StreamStep) -> list[tuple[str, dict[str, Any], dict[str, int]]]:
    return [(frame.event, frame.json, frame.positions) for frame in frames(step.data)]


def shown(body: bytes = b"", count: int = 0, next_seq: int = 0, head_seq: int = 0, **more: Any) -> FramedPage:
    """A page of topic `t` in words."""
    from_seq = more.pop("from_seq", 0)
    durable_seq = more.pop("durable_seq", 0)
    page = RecordPage(body, count, next_seq, head_seq, 1, durable_seq, more.pop("tombstone", None), next_seq, 7)
    return frame_page("t", from_seq, page, page.durable_seq if more.pop("strong", False) else None)


def start(position: int = 0, topic: str = "t") -> StreamState:
    return StreamSpec((topic,), (7,), OPTIONS, False).start({topic: position})


# --- frames


def test_the_exact_bytes_of_a_backlog_that_is_caught_up() -> None:
    step = start().advance(0, shown(b'{"$seq":1,"$ts":5,"data":1}', 1, 1, 1))
    assert step.data == (
        b"event: record\n"
        b'data: {"topic":"t","records":[{"$seq":1,"$ts":5,"data":1}],"from_seq":0,"to_seq":1,"head_seq":1}\n'
        b"id: eyJ0IjoxfQ\n\n"
        b'event: caught-up\ndata: {"topic":"t","head_seq":1}\nid: eyJ0IjoxfQ\n\n'
    )
    assert (step.frames, step.records, step.outcome) == (2, 1, StepOutcome.CURRENT)


def test_the_opening_and_the_heartbeat() -> None:
    assert EVENT_STREAM.opening == b"retry: 2000\n\n"
    assert EVENT_STREAM.heartbeat(1748467205000) == b": hb 1748467205000\n\n"


def test_an_error_has_no_id() -> None:
    assert EVENT_STREAM.final("throttled", "too slow") == b'event: error\ndata: {"code":410,"error":"too slow"}\n\n'


def test_line_breaks_between_tokens_become_lines_of_the_stream() -> None:
    step = start().advance(0, shown(b'{"$seq":1,"$ts":5,"data":{"a":\r\n1,\n\n"b":\r2}}', 1, 1, 1))
    record = frames(step.data)[0]
    assert b'{"a": \n1,\n\n"b": 2}' in record.data
    assert record.json["records"][0]["data"] == {"a": 1, "b": 2}


# --- transitions


def test_caught_up_is_said_on_each_transition_only() -> None:
    said = []
    stream = start()
    for next_seq, head_seq in ((2, 4), (4, 4), (5, 5), (6, 8), (8, 8)):
        step = stream.advance(0, shown(b"{}", 1, next_seq, head_seq, from_seq=stream.positions[0]))
        assert step.outcome is (StepOutcome.CURRENT if next_seq == head_seq else StepOutcome.MORE)
        said.append([frame.event for frame in frames(step.data)])
        stream = step.state
    assert said == [["record"], ["record", "caught-up"], ["record"], ["record"], ["record", "caught-up"]]


def test_filtered_records_move_the_id_without_a_frame() -> None:
    stream = start().advance(0, shown(next_seq=3, head_seq=3)).state
    step = stream.advance(0, shown(next_seq=5, head_seq=5, from_seq=3))
    assert step.data == b""
    assert step.state.cursor() == {"t": 5}


def test_nothing_new_is_the_same_place() -> None:
    stream = start().advance(0, shown(next_seq=3, head_seq=3)).state
    assert stream.advance(0, shown(next_seq=3, head_seq=3, from_seq=3)).state is stream


@pytest.mark.parametrize(
    ("connected", "reason", "said"),
    [
        (False, "cap", "from_seq_too_old"),
        (True, "cap", "cap"),
        (True, "ttl", "ttl"),
        (False, "recreated", "recreated"),
        (False, "lost_tail", "lost_tail"),
    ],
)
def test_tombstones(connected: bool, reason: str, said: str) -> None:
    stream = start(2)
    if connected:
        stream = stream.advance(0, shown(b"{}", 1, 3, 9, from_seq=2)).state
    at = stream.positions[0]
    tombstone = Tombstone(at + 1, 6, reason, 6 - at, 7, 9)
    step = stream.advance(0, shown(b"{}", 3, 9, 9, from_seq=at, tombstone=tombstone))
    assert events(step)[:2] == [
        (
            "tombstone",
            {"topic": "t", "reason": said, "gap_from": at + 1, "gap_to": 6, "earliest_seq": 7, "head_seq": 9},
            {"t": 6},
        ),
        ("record", {"topic": "t", "records": [{}], "from_seq": 6, "to_seq": 9, "head_seq": 9}, {"t": 9}),
    ]


def test_a_cursor_beyond_the_head_starts_again() -> None:
    tombstone = Tombstone(1, 9, "recreated", 9, 3, 9)
    step = start(20).advance(0, shown(b"{}", 7, 9, 9, from_seq=20, tombstone=tombstone))
    (kind, _, at), (_, record, _), _ = events(step)
    assert (kind, at) == ("tombstone", {"t": 2}), "what it names is gone, what is there is yet to come"
    assert (record["from_seq"], record["to_seq"]) == (2, 9)


@pytest.mark.parametrize(
    ("from_seq", "tombstone", "at_seq", "head_seq"),
    [
        (20, Tombstone(1, 9, "recreated", 9, 1, 9), 4, 4),  # not the head, of which the disk has not all
        (2, Tombstone(3, 6, "cap", 4, 7, 9), 6, 6),  # evicted before the disk had it: not below where the stream is
    ],
)
def test_a_strong_stream_names_no_head_that_it_may_not_show(
    from_seq: int, tombstone: Tombstone, at_seq: int, head_seq: int
) -> None:
    page = shown(next_seq=at_seq, head_seq=9, from_seq=from_seq, durable_seq=4, tombstone=tombstone, strong=True)
    step = start(from_seq).advance(0, page)
    assert events(step)[-1] == ("caught-up", {"topic": "t", "head_seq": head_seq}, {"t": at_seq})
    assert step.outcome is StepOutcome.WAITING


def test_a_deleted_topic_leaves_the_ids_and_the_others_go_on() -> None:
    spec = StreamSpec(("a", "b"), (1, 2), OPTIONS, False)
    step = spec.start({"a": 3, "b": 4}).topic_deleted(0, 5)
    assert events(step) == [("topic-deleted", {"topic": "a", "head_seq": 5, "reason": "deleted"}, {"b": 4})]
    assert step.outcome is StepOutcome.ENDED
    page = RecordPage(b"{}", 1, 5, 5, 1, 5, None, 1, 2)
    after = step.state.advance(1, frame_page("b", 4, page, None))
    assert [positions for _, _, positions in events(after)] == [{"b": 5}, {"b": 5}]


def test_a_topic_without_a_position_has_ended_before() -> None:
    stream = StreamSpec(("a", "b"), (1, 2), OPTIONS, False).start({"b": 4})
    assert stream.phases == bytes((TopicPhase.ENDED, TopicPhase.CONNECTING))
    assert stream.cursor() == {"b": 4}


def test_a_failure_is_said_once_and_caught_up_again_after_it() -> None:
    live = start().advance(0, shown(next_seq=3, head_seq=3)).state
    first = live.fail(0, "storage_unavailable", "unreadable")
    assert first.data == (
        b'event: error\ndata: {"code":429,"error":"unreadable","retry_after_ms":1000,"topics":["t"]}\n\n'
    )
    again = first.state.fail(0, "storage_unavailable", "unreadable")
    assert (again.data, again.state, again.outcome) == (b"", first.state, StepOutcome.FAILED)
    healed = again.state.advance(0, shown(b"{}", 1, 4, 4, from_seq=3))
    assert [event for event, _, _ in events(healed)] == ["record", "caught-up"]


def test_strong_streams_know_no_head_but_the_durable_one() -> None:
    stream = start()
    step = stream.advance(0, shown(b"{}", 1, 2, 5, durable_seq=2, strong=True))
    assert [(event, data["head_seq"]) for event, data, _ in events(step)] == [("record", 2), ("caught-up", 2)]
    assert step.outcome is StepOutcome.WAITING
    # A cursor beyond what is durable waits; it does not go back.
    ahead = start(4).advance(0, shown(next_seq=4, head_seq=5, from_seq=4, durable_seq=2, strong=True))
    assert (ahead.outcome, ahead.state.cursor()) == (StepOutcome.WAITING, {"t": 4})


# --- sharing


def test_streams_at_the_same_place_are_the_same_object() -> None:
    spec = StreamSpec(("a", "b"), (1, 2), OPTIONS, False)
    page = frame_page("a", 0, RecordPage(b"{}", 1, 1, 1, 1, 1, None, 1, 1), None)
    other = frame_page("b", 0, RecordPage(b"{}", 1, 1, 1, 1, 1, None, 1, 2), None)
    one, two = spec.start({"a": 0, "b": 0}), spec.start({"a": 0, "b": 0})
    assert one is two
    assert one.advance(0, page).state.advance(1, other).state is two.advance(1, other).state.advance(0, page).state


# --- any history


class Follower:
    """A client's knowledge of topic `t`, from the frames alone."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.seqs: list[int] = []
        self.lost: set[int] = set()

    def hear(self, data: bytes) -> None:
        for frame in frames(data):
            body = json.loads(frame.data)
            if frame.event == "record":
                assert body["from_seq"] == self.position or self.silent(body["from_seq"])
                got = [record["$seq"] for record in body["records"]]
                assert got == sorted(got)
                assert got[0] > body["from_seq"]
                assert got[-1] <= body["to_seq"] <= body["head_seq"]
                self.seqs += got
                self.position = body["to_seq"]
            elif frame.event == "tombstone":
                assert body["gap_from"] > self.position or self.silent(body["gap_from"] - 1)
                assert body["gap_to"] >= body["gap_from"]
                self.lost |= set(range(body["gap_from"], body["gap_to"] + 1))
                self.position = body["gap_to"]
            else:
                assert frame.event == "caught-up"
                self.position = body["head_seq"]
            assert frame.positions == {"t": self.position}

    def silent(self, seq: int) -> bool:
        """Filtered and deleted records move the position without a frame."""
        return seq > self.position


operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 6), st.booleans()),
        st.tuples(st.just("delete"), st.integers(1, 60)),
        st.tuples(st.just("evict"), st.integers(1, 60)),
        st.tuples(st.just("listen"), st.integers(1, 4)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(operations, st.integers(1, 5), st.booleans())
def test_what_is_neither_delivered_nor_said_lost_was_not_wanted(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[Any, ...]], limit: int, filtered: bool
) -> None:
    """Each record is delivered once and in order, or a tombstone names it, or it was deleted or the reader's own."""
    identity = secrets.token_hex(8)
    hosting = Hosting(identity, str(tmp_path_factory.mktemp("data")))
    try:
        topic = hosting.make("t", TopicConfig()).topic
        options = PageOptions(limit, 1 << 20, frozenset([b"me"]) if filtered else None)
        stream = StreamSpec(("t",), (topic.id,), options, False).start({"t": 0})
        follower = Follower(0)
        mine: set[int] = set()
        deleted: set[int] = set()

        def listen(pages: int) -> bool:
            """Reads on; True when it is at the head."""
            nonlocal stream
            for _ in range(pages):
                from_seq = stream.positions[0]
                page = hosting.reader.read_page(hosting.reader.get("t"), from_seq, options)
                step = stream.advance(0, frame_page("t", from_seq, page, None))
                follower.hear(step.data)
                stream = step.state
                if step.outcome is StepOutcome.CURRENT:
                    return True
            return False

        for operation, *arguments in history:
            if operation == "write":
                count, by_me = arguments
                records = [Written(b"0", b"me" if by_me else b"you") for _ in range(count)]
                if by_me:
                    mine |= set(range(topic.head_seq + 1, topic.head_seq + count + 1))
                hosting.write("t", records)
            elif operation == "delete" and topic.earliest_seq <= arguments[0] <= topic.head_seq:
                deleted.add(arguments[0])
                hosting.delete_record("t", arguments[0])
            elif operation == "evict" and topic.earliest_seq < arguments[0] <= topic.head_seq + 1:
                topic.evict_below(arguments[0], EvictReason.CAP)
                hosting.topics["t"].publish()
            elif operation == "listen":
                listen(*arguments)
        while not listen(10):
            pass
        assert len(follower.seqs) == len(set(follower.seqs))
        assert not follower.lost & set(follower.seqs)
        unsaid = set(range(1, topic.head_seq + 1)) - set(follower.seqs) - follower.lost
        assert unsaid <= (deleted | (mine if filtered else set()))
        assert not set(follower.seqs) & (mine if filtered else set())
        assert stream.cursor() == {"t": topic.head_seq}
        assert stream.phases[0] == TopicPhase.LIVE
    finally:
        hosting.close()
        shm_names.unlink_all(identity)
