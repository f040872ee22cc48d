"""The end of a frontend: a shard looks at what it had there, and at no other of maybe a hundred thousand topics."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.walshard.rig import Rig
from topics.core.config import TopicConfig
from topics.shm.queue_messages import CursorAdvance, CursorDelete, CursorGet, CursorPassedOn, CursorPut, WorkOpen
from topics.shm.topic_messages import DeleteTopic, Hello, PutTopic, Unwatch, Watch
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted


def cursor(rig: Rig, topic: str, name: str) -> int:
    """Make a cursor, and return its revision."""
    rig.call(CursorPut(topic, name, "at_least_once", 1, None, False))
    return int(rig.call(CursorGet(topic, name)).cursors[0].revision)


def test_no_look_at_all_topics_finds_what_a_frontend_had(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.append("t", b"1", b"2")
    rig.append("other", b"1")
    revision = cursor(rig, "t", "c")
    assert rig.call(CursorAdvance("t", "c", revision, 0, 1, 1)).moved
    rig.call(PutTopic("q", TopicConfig(type="queue"), True))
    rig.append("q", b"1")
    rig.call(WorkOpen("q", 7, "w", 1, None))
    assert [dealt.seqs for dealt in rig.dealt] == [[1]]
    rig.post_call(Watch(5, "t", rig.view("t").topic_id, 2))
    rig.run()
    walks: list[int] = []
    walk = Catalog.__iter__

    def seen(self: Catalog) -> Iterator[Hosted]:
        walks.append(1)
        return walk(self)

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "__iter__", seen)
        rig.post_call(Hello(2))
        while rig.step():
            rig.take_replies()
        assert not walks
    rig.run()
    notices = len(rig.notices)
    rig.append("t", b"3")
    assert len(rig.notices) == notices, "it watches nothing more"
    assert rig.call(CursorGet("t", "c")).cursors[0].seq == 0, "what it had not passed on is read again"
    assert rig.view("q").jobs_ready == 1, "its job is another's"


def test_what_a_frontend_watches_is_forgotten_with_its_watch(rig: Rig) -> None:
    watched = rig.shard.handlers.frontends.watched[0]
    for name in ("stays", "goes"):
        rig.append(name, b"1")
        rig.post_call(Watch(5, name, 0, 0))
        rig.post_call(Watch(6, name, 0, 0))
        rig.post_call(Unwatch(5, name))  # the former token
    rig.run()
    assert watched == {"stays", "goes"}
    rig.call(DeleteTopic("goes", False))
    rig.post_call(Unwatch(6, "goes"))
    rig.post_call(Unwatch(6, "stays"))
    rig.run()
    assert not watched


@pytest.mark.parametrize("end", ["passed on", "cursor deleted", "cursor put", "topic deleted"])
def test_a_cursor_that_is_not_read_any_more_is_not_looked_at(rig: Rig, end: str) -> None:
    rig.append("t", b"1", b"2")
    revision = cursor(rig, "t", "c")
    rig.call(CursorAdvance("t", "c", revision, 0, 1, 1))
    being_read = rig.shard.handlers.cursors.being_read
    assert len(being_read) == 1
    gc.disable()
    try:
        match end:
            case "passed on":
                rig.call(CursorPassedOn("t", "c", revision, 1, True))
            case "cursor deleted":
                rig.call(CursorDelete("t", "c"))
            case "cursor put":
                rig.call(CursorPut("t", "c", "at_least_once", 1, 2, False))
            case "topic deleted":
                rig.call(DeleteTopic("t", False))
        assert len(being_read) == 0
    finally:
        gc.enable()
