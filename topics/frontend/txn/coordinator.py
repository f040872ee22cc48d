"""Coordinates the commits of batches (api §6): has each stage published, ends the batch, and removes its files.

    stages claimed → decided (sink file, synced) → each stage appended once → ended (sink file, synced) → files removed

The sink's shard decides and remembers, each topic's shard publishes, and the coordinator asks them. Every request may
be repeated without harm, so several frontends may carry out one batch. Each looks for unfinished ones when it starts,
and retries those that it could not finish for as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from topics.core.errors import TopicsError, storage_unavailable
from topics.frontend.shards.arenas import Slices
from topics.frontend.shards.gateway import Gateway
from topics.log import LASTING_EVERY_S, SparseLines, get_logger
from topics.shm.append_messages import AppendReply
from topics.shm.topic_messages import (
    StagePublish,
    StagesOver,
    TxnBegin,
    TxnEnd,
    TxnForget,
    TxnGet,
    TxnPending,
    TxnReply,
)
from topics.storage import layout, txn_files
from topics.storage.filesystem import FileSystem, OsFileSystem, make_dirs, names_in, replace_file
from topics.storage.frame import LaidOut

EXPIRY_MARGIN_MS: Final = 60_000
"""The time from a stage's last possible commit to its removal: a commit that has begun never loses its stages."""


class Stages:
    """The files of all stages of the service. One expires `ttl_ms` after it was made. They may take `room_bytes`."""

    def __init__(self, data_dir: str, ttl_ms: int, room_bytes: Callable[[], int], fs: FileSystem | None = None) -> None:
        self._directory = layout.stages_dir(data_dir)
        self._sinks = layout.sinks_dir(data_dir)
        self._fs = fs or OsFileSystem()
        self.ttl_ms, self._room_bytes = ttl_ms, room_bytes

    def make(self, topic: str, txn: str, records: LaidOut, topic_id: int = 0) -> str:
        """Write a new stage and return its id once it is on the disk; `topic_id` 0: the topic is not there yet. Raise
        TopicsError.
        """
        stage = txn_files.new_stage_id(topic, txn)
        try:
            if self._room_bytes() < len(records.buffer):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            make_dirs(self._fs, self._directory)
            replace_file(self._fs, self._path(stage), txn_files.encode_stage(topic, records, topic_id))
        except OSError as error:
            raise _failed("the stage cannot be written", error) from None
        return stage

    def heads(self, stages: Collection[str], sink: str, batch: int) -> dict[str, txn_files.StageHead]:
        """Return the head of each stage by its id now, in order. `404` for one that is missing, or about to expire."""
        return dict(self._head(stage, sink, batch) for stage in stages)

    def claim(self, stages: Collection[str], sink: str, batch: int) -> list[str]:
        """Rename these stages to names of this batch, and sync that. Return the new ids. A stage that another batch has
        claimed stays with that one: its id here names no file.
        """
        claimed = [txn_files.claimed_id(stage, sink, batch) for stage in stages]
        try:
            for stage, now in sorted(
                zip(stages, claimed, strict=True)
            ):  # sorted: of commits that share stages one gets all
                try:
                    self._fs.rename(self._path(stage), self._path(now))
                except FileNotFoundError:
                    if not self._fs.exists(self._path(now)):
                        break  # another batch has it: the shard will refuse this batch, so leave that one the rest
            if claimed:
                self._fs.fsync_dir(self._directory)
        except OSError as error:
            raise _failed("the stages cannot be claimed", error) from None
        return claimed

    def of_txn(self, topic: str, txn: str) -> list[str]:
        """Return the stages of a transaction in one topic."""
        stages = filter(None, map(txn_files.stage_of_name, names_in(self._fs, self._directory)))
        return [stage for stage in stages if txn_files.belongs_to_txn(stage, topic, txn)]

    def take_back(self, stages: Collection[str]) -> None:
        """Make these stages unfit for a decision. Stages of batches that are decided already are published anyway."""
        for stage in stages:
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._path(stage), ns=(txn_files.TAKEN_BACK_NS, txn_files.TAKEN_BACK_NS))

    def drop(self, stages: Collection[str]) -> int:
        """Remove these stages. Return how many of them existed."""
        dropped = 0
        for stage in stages:
            with contextlib.suppress(FileNotFoundError):
                self._fs.unlink(self._path(stage))
                dropped += 1
        return dropped

    def drop_ended(self, stages: Collection[str]) -> None:
        """Remove the stages of a batch that has ended. First sync the sink's file, in case its writer did not: a power
        loss must not bring the decision back without its stages. Raise TopicsError.
        """
        try:
            with contextlib.suppress(FileNotFoundError):
                self._fs.fsync_dir(self._sinks)
            self.drop(stages)
        except OSError as error:
            raise _failed("the stages of a batch that has ended cannot be removed", error) from None

    def expired(self) -> list[str]:
        """Return the expired stages. Remove unfinished files of that age, left by a killed frontend. Raise OSError."""
        names = names_in(self._fs, self._directory)
        old = [name for name in names if self._age_ms(name) > self.ttl_ms + EXPIRY_MARGIN_MS]
        for name in old:
            if name.endswith(layout.TMP_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(os.path.join(self._directory, name))
        return list(filter(None, map(txn_files.stage_of_name, old)))

    def _head(self, stage: str, sink: str, batch: int) -> tuple[str, txn_files.StageHead]:
        for now in (stage, txn_files.claimed_id(stage, sink, batch)) if txn_files.is_stage_id(stage) else ():
            try:
                if self._age_ms(txn_files.stage_name(now)) <= self.ttl_ms:
                    with open(self._path(now), "rb") as file:
                        return now, txn_files.read_stage_head(file)
            except FileNotFoundError:
                pass  # it may have just been claimed: try its other name
            except (OSError, txn_files.TxnFileDamagedError) as error:
                reason = f"{self._path(now)} cannot be used: {error}"
                raise storage_unavailable(reason, cause="damaged") from None
        raise TopicsError("not_found", f"there is no stage {stage[:100]!r}: dropped, expired, or another batch's")

    def _age_ms(self, name: str) -> float:
        """Return the age of a file; infinite if it does not exist."""
        try:
            return (time.time() - os.stat(os.path.join(self._directory, name)).st_mtime) * 1000
        except FileNotFoundError:
            return float("inf")

    def _path(self, stage: str) -> str:
        return os.path.join(self._directory, txn_files.stage_name(stage))


def _failed(what: str, error: OSError) -> TopicsError:
    return storage_unavailable(f"{what}: {error.strerror}", cause=error.strerror)


IN_FLIGHT_MAX: Final = 16
"""Stages of one batch that are published at a time: each is a write of up to the body limit."""
RETRY_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
"""Longest pause after an error that no restart explains: an attempt may read and send every stage of a batch."""
JANITOR_S: Final = 60.0

StageList = list[tuple[str, str]]
"""(stage, topic) of each stage of a batch."""
_PASSING: Final = ("not_ready", "shard_unavailable", "throttled")
log = get_logger()


class TxnCoordinator:
    """The commits of one frontend. A decided batch is published, even if its client leaves or this process dies."""

    def __init__(self, gateway: Gateway, stages: Stages) -> None:
        self._gateway = gateway
        self._owner = gateway.owner
        self.stages = stages
        self._tasks: set[asyncio.Task[None]] = set()
        self._finishing: set[tuple[str, int]] = set()
        self._failures = SparseLines(LASTING_EVERY_S, asyncio.get_running_loop().time)

    def start(self, janitor: bool) -> None:
        """Finish the batches that a crash left unfinished. The `janitor` also removes expired stages."""
        for shard in range(self._gateway.shards):
            self._spawn(self._resume(shard))
        if janitor:
            self._spawn(self._clean())

    def close(self) -> None:
        """Stop. The next process finishes what is unfinished."""
        for task in self._tasks:
            task.cancel()

    async def commit(self, sink: str, batch: int, stages: StageList) -> tuple[bool, int, int]:
        """Return (duplicate, the sink's latest batch, records published now), once all of them are visible."""
        shard = self._owner(sink)
        while True:
            told = await self._begin(shard, TxnBegin(sink, batch, stages))
            if told.outcome == "committed":
                return True, told.batch, 0
            records = await self._publish_pending(sink, told)
            if told.outcome == "begun":
                return False, told.batch, records
            # An earlier batch was unfinished. It is finished now, so the shard is asked again.

    async def _begin(self, shard: int, begin: TxnBegin) -> TxnReply:
        """Ask the shard for its decision. It is carried out even if it comes too late or the client leaves."""

        def late(told: TxnReply) -> None:
            if told.pending:
                self._finish_later(begin.sink, told.batch, told.pending)

        asked = self._gateway.submit(shard, begin, late)
        try:
            told = await asked
        except asyncio.CancelledError:
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                late(asked.result())  # the decision came at the moment of the cancellation
            raise
        assert isinstance(told, TxnReply), told
        return told

    async def last_batch(self, sink: str) -> int | None:
        """Return the latest batch whose records are all visible; None for an unknown sink."""
        told = await self._gateway.call(self._owner(sink), TxnGet(sink))
        if told.pending:
            await self._publish_pending(sink, told)
        return None if told.outcome == "none" else told.batch

    async def _publish_pending(self, sink: str, told: TxnReply) -> int:
        """Publish a decided batch now, or have it retried later and raise. Return the number of records published."""
        try:
            return await self._carry_out(sink, told.batch, told.pending)
        except (TopicsError, asyncio.CancelledError) as error:
            self._finish_later(sink, told.batch, told.pending)
            if not isinstance(error, TopicsError):
                raise
            # The error's own code may say that nothing was done. A client would then send the records in a new batch.
            what = f"batch {told.batch} of sink {sink!r} is decided and will be published, not yet: {error.message}"
            raise TopicsError("shard_unavailable", what, {"batch": told.batch, "reason": error.code}) from error

    async def forget(self, sink: str) -> bool:
        """Forget a sink. Return False if it was unknown."""
        return (await self._gateway.call(self._owner(sink), TxnForget(sink))).outcome != "none"

    async def drop(self, stages: Collection[str]) -> int:
        """Remove these stages, but not those of a decided batch. Return their number. Raise TopicsError."""
        await asyncio.to_thread(self.stages.take_back, stages)
        replies = await asyncio.gather(
            *[self._gateway.call(shard, TxnPending(), unthrottled=True) for shard in range(self._gateway.shards)]
        )
        decided = {stage for reply in replies for _, _, pending in reply.batches for stage, _topic in pending}
        return await asyncio.to_thread(self.stages.drop, [stage for stage in stages if stage not in decided])

    async def _carry_out(self, sink: str, batch: int, stages: StageList) -> int:
        """Publish all stages, in each topic in the order of the batch, then end the batch. Return the number of records
        that were not published before.
        """
        records = 0
        try:
            for first in range(0, len(stages), IN_FLIGHT_MAX):
                # Requests to one shard arrive in the order in which they were sent.
                sent = [
                    self._gateway.submit(self._owner(topic), StagePublish(topic, stage, sink, batch))
                    for stage, topic in stages[first : first + IN_FLIGHT_MAX]
                ]
                replies = await asyncio.gather(*sent, return_exceptions=True)
                for reply in replies:
                    if isinstance(reply, BaseException):
                        raise reply
                    assert isinstance(reply, AppendReply)
                    records += 0 if reply.deduped else reply.count
        except TopicsError as error:
            if error.code != "fenced":
                raise
            # The batch has ended: another frontend was faster, or an earlier reply was lost. Remove its files anyway.
            told = await self._gateway.call(self._owner(sink), TxnGet(sink))
            if told.pending and told.batch == batch:
                return records  # the sink was forgotten and has a new batch of this number, which needs the keys
            stages = [stage for stage in stages if stage not in told.pending]
            await asyncio.to_thread(self.stages.drop_ended, [stage for stage, _topic in stages])
        else:
            await self._gateway.call(self._owner(sink), TxnEnd(sink, batch))
            await asyncio.to_thread(self.stages.drop, [stage for stage, _topic in stages])
        slices = Slices()
        for topic in sorted({topic for _stage, topic in stages}):
            # The stages' files are gone, so no stage can be published again, and topics may forget their keys.
            self._gateway.post(self._owner(topic), StagesOver(topic, sink, batch))
            await slices.yield_if_over()
        return records

    def _finish_later(self, sink: str, batch: int, stages: StageList) -> None:
        if (sink, batch) not in self._finishing:
            self._finishing.add((sink, batch))
            self._spawn(self._finish(sink, batch, stages))

    async def _finish(self, sink: str, batch: int, stages: StageList) -> None:
        pause_s = RETRY_S / 2
        try:
            while True:
                try:
                    await self._carry_out(sink, batch, stages)
                except (TopicsError, OSError) as error:
                    code = error.code if isinstance(error, TopicsError) else "storage_unavailable"
                    where = {"sink": sink, "batch": batch}
                    self._failures.warning("a decided batch is not published yet", **where, reason=str(error))
                    # A shard that restarts is back soon, so the pause stays short.
                    pause_s = RETRY_S if code in _PASSING else min(2 * pause_s, RETRY_MAX_S)
                    await asyncio.sleep(pause_s)
                else:
                    log.info("an unfinished batch is published", sink=sink, batch=batch, stages=len(stages))
                    return
        finally:
            self._finishing.discard((sink, batch))

    async def _resume(self, shard: int) -> None:
        """Finish the batches of one shard. Each shard has a task of its own: one may replay its log for minutes."""
        failed = False
        while True:
            try:
                reply = await self._gateway.call(shard, TxnPending(), unthrottled=True)
            except (TopicsError, OSError) as error:  # after TopicsError the shard recovers
                if isinstance(error, OSError) and not failed:
                    failed = True
                    what = "batches that a crash left unfinished stay half published until their shard can be asked"
                    log.warning(what, shard=shard, reason=str(error), retry_ms=int(RETRY_S * 1000))
                await asyncio.sleep(RETRY_S)
            else:
                for sink, batch, stages in reply.batches:
                    self._finish_later(sink, batch, stages)
                return

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            try:
                expired = await asyncio.to_thread(self.stages.expired)
                if expired:
                    log.info("stages that nobody committed are removed", stages=await self.drop(expired))
            except (TopicsError, OSError) as error:
                log.warning("expired stages cannot be removed now", reason=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
