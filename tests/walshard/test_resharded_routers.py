"""A changed shard count over a snapshot with routers: they go on where they were, on whatever shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from tests.walshard.test_resharded import move
from tests.walshard.test_routing import put, route
from topics.core.names import owner_shard
from topics.shm.topic_messages import CatchUp
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.snapshot import load_snapshot
from topics.storage.verify import verify

DESTS = [f"dest-{number}" for number in range(6)]


def state_of(rig: Rig) -> dict[str, Any]:
    feeds = rig.shard.routing.feeds.by_dest.values()
    return {feed.topic.name: (feed.source_seq, feed.routers) for feed in feeds}


def test_there_and_back(tmp_path: Path) -> None:
    data_dir = str(tmp_path)
    rig = Rig(data_dir, segment_max_events="8")
    compaction = Compaction(rig)
    put(rig, "source", cap_records=20)
    for dest in DESTS:
        route(rig, f"to-{dest}", "source", dest)
    route(rig, "on", DESTS[0], "last")
    for turn in range(60):
        rig.append("source", b'"%d%s"' % (turn, b"x" * 60_000))
        if turn % 20 == 19:
            compaction.cut()
    rig.append("source", b'"behind"')
    content = {name: compaction.read(name) for name in (*DESTS, "last", "source")}
    before = state_of(rig)
    rig.shard.close()
    rig.close()
    assert len(content["last"]) == 61
    assert not Path(layout.log_path(layout.wal_dir(data_dir), 1)).exists(), "only the snapshot has the routers"
    for shards in (3, 2, 4, 1):
        move(OsFileSystem(), data_dir, shards)
        assert verify(data_dir, lambda *_: None).damage == []
        snapshot = load_snapshot(OsFileSystem(), data_dir)
        assert snapshot is not None
        for part in snapshot.parts:
            state = part.decoded()
            ids = {topic.id for topic in state.topics}
            assert state.routers.feeds.keys() <= ids
            assert len(state.routers.routers) == (7 if part.shard == 0 else 0)
            assert all(owner_shard(topic.name, shards) == part.shard for topic in state.topics)
    rig = Rig(data_dir, segment_max_events="8")
    try:
        rig.run()
        compaction = Compaction(rig)
        assert {name: compaction.read(name) for name in content} == content
        assert state_of(rig) == before
        assert rig.cell.get("routers") == 7
        rig.append("source", b"1")
        rig.call(CatchUp("last"))
        assert all(compaction.read(name)[-1] == (62, b"1") for name in (*DESTS, "last"))
    finally:
        rig.close()
