"""Batches that are carried to their end over real rings, the test itself being the shards."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from tests.frontend.live import until
from topics.core.errors import TopicsError
from topics.core.names import owner_shard
from topics.frontend.shards.arenas import Arenas
from topics.frontend.shards.gateway import Gateway
from topics.frontend.txn import coordinator as coordinator_module
from topics.frontend.txn.coordinator import Stages, TxnCoordinator
from topics.shm import append_messages, messages
from topics.shm.append_messages import AppendReply
from topics.shm.arena import ArenaWriter
from topics.shm.asks import Message
from topics.shm.control import Role
from topics.shm.instance import SharedMemory
from topics.shm.messages import MessageKind
from topics.shm.topic_messages import (
    StagePublish,
    StagesOver,
    TxnBegin,
    TxnEnd,
    TxnGet,
    TxnPending,
    TxnPendingReply,
    TxnReply,
)
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import lay_out
from topics.storage.layout import sinks_dir, stages_dir
from topics.storage.txn_files import can_be_decided, stage_name

SHARDS = 2
RING_BYTES = 64 * 1024
DEADLINE_S = 60.0
STAGE_TTL_MS = 60_000
PUBLISHED = AppendReply(5, 1, 5, False, False, "disk", 12, 0)
OVER = TopicsError("fenced", "batch 7 is not being published", {"batch": 7})


def room() -> int:
    return 1 << 40


CallT = TypeVar("CallT", TxnBegin, TxnEnd, TxnGet, TxnPending, StagePublish, StagesOver)


class Shards:
    """The other ends of the rings. None is ready before the test says so."""

    def __init__(self, identity: str) -> None:
        self.shared = SharedMemory.create(identity, SHARDS, 1, RING_BYTES)
        self.arenas = Arenas(self.shared)
        self._identity = identity
        self._read = [0] * SHARDS
        self._held: list[ArenaWriter] = []

    def ready(self, shard: int) -> None:
        self._held.append(ArenaWriter(self._identity, shard, 1))
        self.shared.control.cell(Role.WALSHARD, shard).set("generation", 1)

    def calls(self, shard: int) -> Iterator[tuple[int, Message]]:
        """New ones, with their request ids; what is not taken from this stays new."""
        for message, position in self.shared.rings[0][shard].requests.peek(self._read[shard]):
            self._read[shard] = position
            kind, request_id, _count = messages.head(message)
            if kind == MessageKind.CALL:
                yield request_id, messages.decode(message)

    async def told(self, shard: int, kind: type[CallT]) -> tuple[int, CallT]:
        """The next call of this kind, with its request id; others that come before it are passed over."""
        found: list[tuple[int, CallT]] = []

        def look() -> bool:
            for request_id, call in self.calls(shard):
                if isinstance(call, kind):
                    found.append((request_id, call))
                    break
            return bool(found)

        await until(look)
        return found[0]

    def answer(self, shard: int, request_id: int, reply: Message) -> None:
        self._send(shard, messages.encode_reply(request_id, reply))

    def published(self, shard: int, request_id: int) -> None:
        self._send(shard, append_messages.encode_append_reply(request_id, PUBLISHED))

    def refuse(self, shard: int, request_id: int, error: TopicsError) -> None:
        self._send(shard, messages.encode_error(request_id, error))

    def _send(self, shard: int, message: bytearray) -> None:
        assert self.shared.rings[0][shard].replies.push(message)
        self.shared.frontend_wakes[0].signal_always()


@pytest.fixture
def shards(identity: str) -> Iterator[Shards]:
    shards = Shards(identity)
    yield shards
    shards.arenas.close()


def on_loop(
    shards: Shards, data_dir: Path, test: Callable[[TxnCoordinator], Awaitable[None]], shard_wait_ms: int = 10_000
) -> None:
    async def main() -> None:
        cell = shards.shared.control.cell(Role.FRONTEND, 0)
        gateway = Gateway(shards.shared, 0, 1, shards.arenas, cell, shard_wait_ms, 1000, lambda: 0)
        gateway.start()
        commits = TxnCoordinator(gateway, Stages(str(data_dir), STAGE_TTL_MS, room))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(commits)
        finally:
            commits.close()
            gateway.close()

    asyncio.run(main())


def owned_by(shard: int) -> str:
    """A name of that shard's."""
    return next(name for name in map("t{}".format, range(100)) if owner_shard(name, SHARDS) == shard)


def test_a_batch_of_one_shard_does_not_wait_for_another_that_still_replays(shards: Shards, tmp_path: Path) -> None:
    async def test(commits: TxnCoordinator) -> None:
        commits.start(janitor=False)
        request_id, _ = await shards.told(1, TxnPending)
        shards.answer(1, request_id, TxnPendingReply([(owned_by(1), 7, [("stage", owned_by(1))])]))
        _, publish = await shards.told(1, StagePublish)
        assert publish == StagePublish(owned_by(1), "stage", owned_by(1), 7)
        shards.ready(0)
        await shards.told(0, TxnPending)

    shards.ready(1)
    on_loop(shards, tmp_path, test)


def test_out_of_files_at_a_start_the_unfinished_batches_are_asked_for_again(
    shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EMFILE, "Too many open files")]
    attach = Arenas.of

    def attach_if_possible(arenas: Arenas, shard: int) -> object:
        if shard == 1 and failures:
            raise failures.pop()
        return attach(arenas, shard)

    async def test(commits: TxnCoordinator) -> None:
        commits.start(janitor=False)
        request_id, _ = await shards.told(1, TxnPending)
        shards.answer(1, request_id, TxnPendingReply([(owned_by(1), 7, [("stage", owned_by(1))])]))
        await shards.told(1, StagePublish)

    monkeypatch.setattr(Arenas, "of", attach_if_possible)
    monkeypatch.setattr(coordinator_module, "RETRY_S", 0.01)
    shards.ready(0)
    shards.ready(1)
    with capture_logs() as logged:
        on_loop(shards, tmp_path, test)
    assert not failures
    (line,) = [line for line in logged if "half published" in line["event"]]
    assert (line["shard"], line["reason"]) == (1, "[Errno 24] Too many open files")


def make_stage(commits: TxnCoordinator, topic: str) -> str:
    return commits.stages.make(topic, "txn", lay_out([(b"", b"", b"1", b"")]))


class Noted(OsFileSystem):
    """Real files; it notes what matters for the order of things."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, str]] = []

    def fsync_dir(self, path: str) -> None:
        super().fsync_dir(path)
        self.done.append(("synced", path))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.done.append(("unlinked", os.path.basename(path)))


def is_there(data_dir: Path, stage: str) -> bool:
    return bool(list(data_dir.rglob(stage_name(stage))))


async def ended_without_an_answer(shards: Shards, commits: TxnCoordinator, stage: str) -> None:
    """Up to the repeat of a batch whose end was answered too late, which the topic's shard fences."""
    asked = asyncio.create_task(commits.commit(owned_by(0), 7, [(stage, owned_by(1))]))
    begin_id, _ = await shards.told(0, TxnBegin)
    shards.answer(0, begin_id, TxnReply("begun", 7, [(stage, owned_by(1))]))
    publish_id, _ = await shards.told(1, StagePublish)
    shards.published(1, publish_id)
    await shards.told(0, TxnEnd)
    with pytest.raises(TopicsError) as failed:
        await asked
    assert failed.value.code == "shard_unavailable"
    again_id, _ = await shards.told(1, StagePublish)
    shards.refuse(1, again_id, OVER)


@pytest.mark.parametrize(
    "told",
    [TxnReply("committed", 7, []), TxnReply("pending", 8, [("next", owned_by(1))]), TxnReply("none", 0, [])],
    ids=["over", "the next one is decided", "the sink is forgotten"],
)
def test_a_batch_whose_end_was_answered_late_leaves_nothing(told: TxnReply, shards: Shards, tmp_path: Path) -> None:
    async def test(commits: TxnCoordinator) -> None:
        stage = make_stage(commits, owned_by(1))
        assert is_there(tmp_path, stage)
        commits.stages._fs = files = Noted()
        os.makedirs(sinks_dir(str(tmp_path)))
        await ended_without_an_answer(shards, commits, stage)
        look_id, _ = await shards.told(0, TxnGet)
        shards.answer(0, look_id, told)
        _, over = await shards.told(1, StagesOver)
        assert over == StagesOver(owned_by(1), owned_by(0), 7)
        assert not is_there(tmp_path, stage)
        assert files.done == [("synced", sinks_dir(str(tmp_path))), ("unlinked", stage_name(stage))]

    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test, shard_wait_ms=500)


def test_a_late_driver_leaves_the_pins_of_a_sink_that_began_again_alone(shards: Shards, tmp_path: Path) -> None:
    """It was forgotten meanwhile, and its new batch has the number of the old one."""

    async def test(commits: TxnCoordinator) -> None:
        stage = make_stage(commits, owned_by(1))
        await ended_without_an_answer(shards, commits, stage)
        look_id, _ = await shards.told(0, TxnGet)
        shards.answer(0, look_id, TxnReply("pending", 7, [("other", owned_by(1))]))
        await until(lambda: not commits._finishing)
        assert not [call for shard in range(SHARDS) for _id, call in shards.calls(shard)]

    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test, shard_wait_ms=500)


@pytest.mark.parametrize("gone", ["told", "cancelled", "cancelled as the answer comes"])
def test_a_batch_that_is_decided_when_nobody_waits_for_that_is_published(
    gone: str, shards: Shards, tmp_path: Path
) -> None:
    """Its shard was away for longer than an answer may take, and found the request in its ring, or the client left."""

    async def test(commits: TxnCoordinator) -> None:
        asked = asyncio.create_task(commits.commit(owned_by(0), 7, [("stage", owned_by(1))]))
        begin_id, _ = await shards.told(0, TxnBegin)
        decided = TxnReply("begun", 7, [("stage", owned_by(1))])
        if gone == "told":
            await asyncio.wait([asked])
            failure = asked.exception()
            assert isinstance(failure, TopicsError)
            assert failure.code == "shard_unavailable"
            shards.answer(0, begin_id, decided)
        elif gone == "cancelled":
            asked.cancel()
            await asyncio.wait([asked])
            shards.answer(0, begin_id, decided)
        else:
            shards.answer(0, begin_id, decided)
            commits._gateway._drain(0)  # what it has come for is there, and it has not gone on yet
            asked.cancel()
            await asyncio.wait([asked])
        _, publish = await shards.told(1, StagePublish)
        assert publish == StagePublish(owned_by(1), "stage", owned_by(0), 7)

    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test, shard_wait_ms=500)


def test_stages_are_taken_back_before_anybody_is_asked_which_are_decided(shards: Shards, tmp_path: Path) -> None:
    """A decision that is on its way meanwhile must not lose its stages: it would never be published."""

    async def test(commits: TxnCoordinator) -> None:
        dropped, decided = (make_stage(commits, owned_by(1)) for _ in range(2))
        paths = [path for stage in (dropped, decided) for path in tmp_path.rglob(stage_name(stage))]
        assert [can_be_decided(str(path)) for path in paths] == [True, True]
        dropping = asyncio.create_task(commits.drop([dropped, decided]))
        for shard, batches in enumerate([[], [(owned_by(1), 7, [(decided, owned_by(1))])]]):
            asked_id, _ = await shards.told(shard, TxnPending)
            assert [can_be_decided(str(path)) for path in paths] == [False, False]
            shards.answer(shard, asked_id, TxnPendingReply(batches))
        assert await dropping == 1
        assert (is_there(tmp_path, dropped), is_there(tmp_path, decided)) == (False, True)

    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test)


def test_a_decided_batch_that_is_not_published_yet_is_not_called_refused(shards: Shards, tmp_path: Path) -> None:
    """A `429` says that nothing was done: the client would commit its records as another batch."""

    async def test(commits: TxnCoordinator) -> None:
        asked = asyncio.create_task(commits.commit(owned_by(0), 7, [("stage", owned_by(1))]))
        begin_id, _ = await shards.told(0, TxnBegin)
        shards.answer(0, begin_id, TxnReply("begun", 7, [("stage", owned_by(1))]))
        publish_id, _ = await shards.told(1, StagePublish)
        shards.refuse(1, publish_id, TopicsError("throttled", "nothing of this request was done"))
        with pytest.raises(TopicsError, match="is decided and will be published") as failed:
            await asked
        assert (failed.value.code, failed.value.detail) == ("shard_unavailable", {"batch": 7, "reason": "throttled"})
        await shards.told(1, StagePublish)

    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test)


@pytest.mark.parametrize(
    ("code", "pauses_s"), [("storage_unavailable", [0.02, 0.04, 0.08, 0.08]), ("shard_unavailable", [0.02, 0.02, 0.02])]
)
def test_what_cannot_be_published_is_tried_ever_less_often_and_said_once(
    code: str, pauses_s: list[float], shards: Shards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that is away is asked as often as before: what waits for it becomes whole when it is back."""
    slept_s: list[float] = []
    sleep = asyncio.sleep

    async def noted(pause_s: float) -> None:
        if pause_s >= coordinator_module.RETRY_S:
            slept_s.append(pause_s)
        await sleep(pause_s)

    async def test(commits: TxnCoordinator) -> None:
        commits.start(janitor=False)
        pending_id, _ = await shards.told(0, TxnPending)
        shards.answer(0, pending_id, TxnPendingReply([(owned_by(0), 7, [("stage", owned_by(1))])]))
        with capture_logs() as said:
            for _ in pauses_s:
                publish_id, _ = await shards.told(1, StagePublish)
                shards.refuse(1, publish_id, TopicsError(code, "its file cannot be used"))
            await shards.told(1, StagePublish)
        assert slept_s == pauses_s
        assert [line["reason"] for line in said if line["log_level"] == "warning"] == ["its file cannot be used"]

    monkeypatch.setattr(coordinator_module, "RETRY_S", 0.02)
    monkeypatch.setattr(coordinator_module, "RETRY_MAX_S", 0.08)
    monkeypatch.setattr(asyncio, "sleep", noted)
    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test)


def test_many_batches_that_cannot_be_published_are_one_line_a_minute(shards: Shards, tmp_path: Path) -> None:
    """A client makes as many as it likes."""

    async def test(commits: TxnCoordinator) -> None:
        commits.start(janitor=False)
        pending_id, _ = await shards.told(0, TxnPending)
        batches = [(owned_by(0), batch, [(f"stage{batch}", owned_by(1))]) for batch in range(5)]
        shards.answer(0, pending_id, TxnPendingReply(batches))
        with capture_logs() as said:
            for _ in batches:
                publish_id, _ = await shards.told(1, StagePublish)
                shards.refuse(1, publish_id, TopicsError("storage_unavailable", "the disk is full"))
            await shards.told(1, StagePublish)
        assert [line["event"] for line in said] == ["a decided batch is not published yet"]

    for shard in range(SHARDS):
        shards.ready(shard)
    on_loop(shards, tmp_path, test)


def test_files_of_stages_that_were_never_finished_go_once_they_are_old(tmp_path: Path) -> None:
    """Their frontend was killed while it wrote them: nobody else knows their names."""
    stages = Stages(str(tmp_path), STAGE_TTL_MS, room)
    stage = stages.make("orders", "txn", lay_out([(b"", b"", b"1", b"")]))
    directory = Path(stages_dir(str(tmp_path)))
    old, new = (directory / f"{stage_name(stage[:-1] + digit)}.tmp" for digit in "xy")
    for path in (old, new):
        path.write_bytes(b"TSTG")
    os.utime(old, ns=(0, 0))
    assert stages.expired() == []
    assert sorted(directory.iterdir()) == sorted([directory / stage_name(stage), new])
    os.utime(directory / stage_name(stage), ns=(0, 0))
    assert stages.expired() == [stage]


def test_a_stage_is_the_batchs_that_claims_it_and_that_is_on_the_disk(tmp_path: Path) -> None:
    files = Noted()
    stages = Stages(str(tmp_path), STAGE_TTL_MS, room, files)
    first, second = (stages.make("orders", "txn", lay_out([(b"", b"", b"1", b"")])) for _ in range(2))
    files.done.clear()
    claimed = stages.claim(stages.heads([first, second], "s", 7), "s", 7)
    assert files.done == [("synced", stages_dir(str(tmp_path)))]
    assert stages.claim(stages.heads([first, second], "s", 7), "s", 7) == claimed, "its frontend was killed: again"
    assert [head.topic for head in stages.heads([first, second], "s", 7).values()] == ["orders", "orders"]
    for sink, batch in (("s", 8), ("t", 7)):
        with pytest.raises(TopicsError, match="another batch's"):
            stages.heads([first], sink, batch)
        (other,) = stages.claim([first], sink, batch)
        assert not is_there(tmp_path, other), "so the shard refuses the batch"
    with pytest.raises(TopicsError, match="there is no stage"):
        stages.heads(claimed, "s", 7)
    assert sorted(stages.of_txn("orders", "txn")) == sorted(claimed)
    assert stages.drop(claimed) == 2


def test_a_stage_leaves_the_room_that_is_kept_for_deletes_and_checkpoints(tmp_path: Path) -> None:
    records = lay_out([(b"", b"", b"1", b"")])
    with pytest.raises(TopicsError, match="cannot be written: No space left") as full:
        Stages(str(tmp_path), STAGE_TTL_MS, lambda: len(records.buffer) - 1).make("orders", "txn", records)
    assert full.value.code == "storage_unavailable"
    assert not list(tmp_path.rglob("*.stage"))
    assert Stages(str(tmp_path), STAGE_TTL_MS, lambda: len(records.buffer)).make("orders", "txn", records)
