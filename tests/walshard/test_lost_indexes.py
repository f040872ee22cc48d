"""Indexes of segments that are gone, or older copies: what lives is then counted from what can be believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.walshard.compaction import Compaction
from topics.core.config import TopicConfig
from topics.shm.topic_messages import DeleteRecords, PutTopic
from topics.storage import layout
from topics.storage.topic_frames import floor_frame
from topics.walshard.commit.draft import Draft, LogWrite

TTL_MS = 10_000


pytestmark = pytest.mark.shard(segment_max_events="8", segment_rewrite_dead_ratio="0.9")


def live(compaction: Compaction) -> tuple[int, int, int]:
    view = compaction.rig.view("t")
    assert view.records == 0 or view.live_bytes > 0
    return view.records, view.earliest_seq, view.head_seq


def fill(compaction: Compaction, config: TopicConfig, kept: set[int], damage: str) -> None:
    """Write 48 records in segments of 8, of which `kept` live. The index of the segment from 9 on says that all of its
    records live (`older`), or is gone.
    """
    rig = compaction.rig
    rig.call(PutTopic("t", config, True))
    for number in range(1, 49):
        if number == 17:
            rig.clock.ms += 5_000
        rig.append("t", b"%d" % number, tag=b"kept" if number in kept else b"gone")
    rig.append("other", b"1")
    compaction.cut()
    view = rig.view("t")
    path = Path(layout.segment_idx_path(layout.topic_dir(rig.settings.data_dir, view.topic_id), 9))
    older = path.read_bytes()
    assert rig.delete(DeleteRecords("t", None, "eq", b"gone")) == 48 - len(kept)
    compaction.cut()
    compaction.cut()  # no log is left that would mark them again
    assert path.read_bytes() != older
    if damage == "older":
        path.write_bytes(older)
    else:
        path.unlink()
    rig.boot()
    assert live(compaction) == (len(kept), min(kept), 48)


def by_ttl(compaction: Compaction) -> None:
    compaction.rig.clock.ms += TTL_MS - 4_999
    compaction.rig.shard.sweep()


def by_cut(compaction: Compaction) -> None:
    assert compaction.rig.call(DeleteRecords("t", 17, None, b"")).deleted == 1


@pytest.mark.parametrize("damage", ["older", "gone"])
@pytest.mark.parametrize("take", [by_ttl, by_cut])
def test_no_more_goes_than_there_was(compaction: Compaction, damage: str, take: Callable[[Compaction], None]) -> None:
    """The index has nine live below 17, the topic has two in all."""
    fill(compaction, TopicConfig(ttl_ms=TTL_MS if take is by_ttl else 0), {1, 48}, damage)
    take(compaction)
    assert live(compaction) == (1, 48, 48)
    compaction.rig.append("t", b"49")
    for start in (compaction.rig.boot, compaction.rig.restart_service):
        start()
        assert live(compaction) == (2, 48, 49)
        compaction.rig.append("other", b"2")
    compaction.begin_again()
    assert compaction.cut()
    assert compaction.read("t") == [(48, b"48"), (49, b"49")]


@pytest.mark.parametrize("take", [by_ttl, by_cut])
def test_what_an_unreadable_index_would_have_is_not_guessed_where_the_others_tell(
    compaction: Compaction, take: Callable[[Compaction], None]
) -> None:
    """Eight guessed below 17 would be fewer than there are in all, and no less wrong."""
    kept = {1, *range(17, 49)}
    fill(compaction, TopicConfig(ttl_ms=TTL_MS if take is by_ttl else 0), kept, "gone")
    take(compaction)
    assert live(compaction) == (32, 17, 48)


def test_a_cap_holds_behind_such_an_index(compaction: Compaction) -> None:
    """The cap takes a guess from the damaged segment, and corrects it as soon as the floor is behind it."""
    fill(compaction, TopicConfig(cap_records=48), {1, *range(30, 49)}, "gone")
    for number in range(49, 89):
        compaction.rig.append("t", b"%d" % number)
    assert live(compaction) == (48, 41, 88)


@pytest.mark.parametrize("place", ["log", "snapshot"])
def test_a_log_that_says_less_than_nothing_is_counted_anew(compaction: Compaction, place: str) -> None:
    """A log as earlier versions wrote it, and could not start with."""
    rig = compaction.rig
    for number in range(1, 13):
        rig.append("t", b"%d" % number)
    compaction.cut()
    hosted = rig.hosted("t")
    floors = msgspec.structs.replace(hosted.topic.floors(), records=-7, live_bytes=-330)
    entry = floor_frame(hosted.topic, floors, rig.clock.now_ms())

    def committed() -> None:
        hosted.topic.revision = floors.revision

    draft = Draft([LogWrite([entry], committed)], floors_of=[hosted.topic.id])
    rig.parts.commits.commit(draft)
    assert draft.committed
    if place == "snapshot":
        compaction.begin_again()
        compaction.cut()
    rig.boot()
    rig.append("other", b"1")
    if place == "log":
        assert live(compaction) == (12, 1, 12)
    rig.append("t", b"13")
    assert compaction.read("t") == [(seq, b"%d" % seq) for seq in range(1, 14)]
    # What takes them away is not held up by the count.
    assert rig.call(DeleteRecords("t", 10, None, b"")).records == 4
    rig.boot()
    assert live(compaction) == (4, 10, 13)
