"""Bringing jobs that were handed out too often to their dead-letter topic, and back (api §9).

A frontend does it, because what it takes is what a frontend has: reading records, writing to a topic on whatever shard.
The queue's shard holds such a job back until it is told that the record is in the other topic, then deletes it:
killed anywhere between the two, either process leaves the job in the queue, and the next attempt is recognised by its
idempotency key. So no job is lost, and none is there twice as long as the other topic remembers the key.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import msgspec

from topics.core.config import TopicConfig
from topics.core.dead_letters import FROM, ORDER_KEY, Meta, dead_letter_meta, redriven_meta
from topics.core.errors import TopicsError
from topics.core.idempotency import KeyMark
from topics.core.names import owner_shard
from topics.frontend.queues.job_records import ASIDE_MS, UnreadableJobs
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.gateway import Gateway
from topics.log import get_logger
from topics.shm.append_messages import AppendReply, JobAttributes
from topics.shm.queue_messages import Bury, Dealt, Release, Remove, Reserve
from topics.storage.frame import lay_out

RETRY_MS: Final = 1_000
"""How long a job waits that could not be brought to its dead letters."""
PATIENCE_S: Final = 1.0
"""How long a claim's answer waits for that: then it goes on behind it."""
LOOK_MAX: Final = 65_536
"""Records that one redrive looks at: a topic may hold another queue's dead letters by the million."""
_PAGE: Final = PageOptions(limit=256, max_batch_bytes=1 << 20, include_tags=True)

_log = get_logger()


class _Record(msgspec.Struct, frozen=True):
    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw
    node: str = msgspec.field(name="$node", default="")
    tag: str = msgspec.field(name="$tag", default="")
    meta: Meta = {}


class DeadLetter(NamedTuple):
    """A record on its way to another topic, where it is a job with `order_key` if that is not ""."""

    seq: int
    record: _Record
    meta: Meta
    key: bytes
    order_key: str = ""


class Redriven(NamedTuple):
    """`next_from_seq`: behind it nothing was looked at; None where there was nothing left."""

    moved: int
    next_from_seq: int | None


_decode_records = msgspec.json.Decoder(list[_Record]).decode
_encode_json = msgspec.json.Encoder().encode


class DeadLetters:
    """All dead letters that this frontend carries."""

    def __init__(self, gateway: Gateway, reader: TopicReader, unreadable: UnreadableJobs) -> None:
        self._gateway = gateway
        self._reader = reader
        self._unreadable = unreadable
        self._carrying: set[asyncio.Task[None]] = set()

    async def carried(self, name: str, dealt: Dealt) -> None:
        """Brings `dealt.dead` away; returns when that is done or has failed, or goes on after PATIENCE_S."""
        await asyncio.wait((self.carry(name, dealt),), timeout=PATIENCE_S)

    def take(self, name: str, dealt: Dealt) -> None:
        """`carry`, of what came for a stream, if it has any. To be called at once and whatever becomes of the stream:
        its end releases leases only, these the shard holds for this frontend.
        """
        if dealt.dead:
            self.carry(name, dealt)

    def carry(self, name: str, dealt: Dealt) -> asyncio.Task[None]:
        """Begins to."""
        task = asyncio.get_running_loop().create_task(self._carry(name, dealt))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        return task

    async def _carry(self, name: str, dealt: Dealt) -> None:
        shard = owner_shard(name, self._gateway.shards)
        try:
            copied, unreadable = await self._copy_dead(name, dealt)
            left = sorted(set(dealt.dead).difference(copied, unreadable))
            if copied:
                await self._gateway.call(shard, Bury(name, copied))
            for seqs, wait_ms in ((left, RETRY_MS), (unreadable, ASIDE_MS)):
                if seqs:
                    await self._gateway.call(shard, Release(name, seqs, wait_ms))
        except TopicsError as error:
            # The shard gives them another chance when it has waited for us long enough.
            _log.warning("jobs could not be brought to the dead letters", topic=name, reason=error.message)

    async def _copy_dead(self, name: str, dealt: Dealt) -> tuple[list[int], list[int]]:
        """The seqs that are in the dead-letter topic now, and those that cannot be read."""
        unreadable: list[int] = []
        try:
            ref = self._reader.get(name)
            copies = []
            # At once: each that the cold directory does not answer for takes as long as all of them.
            found = await asyncio.gather(*[self._read(name, seq) for seq in dealt.dead], return_exceptions=True)
            dead = zip(dealt.dead, dealt.dead_deliveries, dealt.dead_order_keys, found, strict=True)
            for seq, deliveries, order_key, records in dead:
                if isinstance(records, BaseException):
                    if not isinstance(records, TopicsError) or not self._unreadable.concerns(name, seq, records):
                        raise records
                    unreadable.append(seq)
                    continue
                for record in records:
                    meta = dead_letter_meta(record.meta, name, ref.view.topic_id, seq, deliveries, order_key)
                    key = KeyMark.CARRIED + b"dead-letter:%d:%d" % (ref.view.topic_id, seq)
                    copies.append(DeadLetter(seq, record, meta, key))
            config = TopicConfig(durability=ref.config.durability)
            copied, _refusal = await self._append(dealt.dead_letter, copies, config)
            return copied, unreadable
        except TopicsError as error:
            _log.warning("dead letters cannot be carried", topic=name, reason=error.message)
            return [], unreadable

    async def redrive(self, name: str, dead_letter: str, from_seq: int, most: int) -> Redriven:
        """Moves the oldest `most` dead letters of a queue behind `from_seq` back to it: those that nobody has, where
        they are jobs themselves.

        Raises `topic_not_found` where there is no `dead_letter`, and what the append or the removal raises; how many
        were moved before an append was refused is in its detail, as `redriven`.
        """
        ref = self._reader.get(dead_letter)
        moved = 0
        cursor = max(from_seq, ref.view.earliest_seq - 1)
        last_seq = cursor + LOOK_MAX
        while moved < most and cursor < min(last_seq, ref.view.head_seq):
            page = await self._reader.fetch_page(ref, cursor, _PAGE, self._reader.now_ms())
            records = _decode_records(b"[%b]" % page.body)
            letters = [record for record in records if record.meta.get(FROM) == name]
            cursor = max(page.next_from_seq, cursor + 1)
            if len(letters) > most - moved:
                letters = letters[: most - moved]
                cursor = letters[-1].seq
            if letters:
                count, refusal = await self._move_back(name, ref, letters)
                moved += count
                if refusal is not None:
                    raise TopicsError(
                        refusal.code,
                        f"{moved} dead letters are back in topic {name!r}, the next is not: {refusal.message}",
                        {**(refusal.detail or {}), "redriven": moved},
                    )
            await asyncio.sleep(0)
            ref = self._reader.refresh(ref)
        return Redriven(moved, cursor if cursor < ref.view.head_seq else None)

    async def _move_back(self, name: str, ref: TopicRef, letters: list[_Record]) -> tuple[int, TopicsError | None]:
        """How many of these are jobs again by our doing, and why the first of the others is not."""
        owner = owner_shard(ref.name, self._gateway.shards)
        free = await self._gateway.call(owner, Reserve(ref.name, [letter.seq for letter in letters]))
        carried = set(free.seqs)
        copies = [
            DeadLetter(
                letter.seq,
                letter,
                redriven_meta(letter.meta),
                KeyMark.CARRIED + b"redrive:%d:%d" % (ref.view.topic_id, letter.seq),
                letter.meta.get(ORDER_KEY, ""),
            )
            for letter in letters
            if letter.seq in carried
        ]
        seqs, refusal = await self._append(name, copies, None)
        left = sorted(carried.difference(seqs))
        if left and ref.config.type == "queue":
            self._gateway.post(owner, Release(ref.name, left, 0))
        # Another redrive may have brought the same ones: who removes a record has moved it.
        return (await self._gateway.call(owner, Remove(ref.name, seqs))).count if seqs else 0, refusal

    async def _read(self, name: str, seq: int) -> list[_Record]:
        """The record, if it is there."""
        page = await self._reader.fetch_page(self._reader.get(name), seq - 1, _PAGE, self._reader.now_ms(), seq)
        return _decode_records(b"[%b]" % page.body)

    async def _append(
        self, name: str, copies: list[DeadLetter], config: TopicConfig | None
    ) -> tuple[list[int], TopicsError | None]:
        """Each a write of its own, so that each is recognised when it comes again. The seqs of those that are there,
        and why the first of the others is not. Made with `config` if it does not exist; None: it has to.
        """
        shard = owner_shard(name, self._gateway.shards)
        futures: list[asyncio.Future[AppendReply]] = []
        for copy in copies:
            record = copy.record
            meta = _encode_json(copy.meta) if copy.meta else b""
            laid_out = lay_out([(record.node.encode(), record.tag.encode(), record.data, meta)])
            create = config is not None
            jobs: JobAttributes = [(0, 0, 0, copy.order_key)] if copy.order_key else []
            futures.append(
                self._gateway.submit_append(shard, name.encode(), create, None, copy.key, config, laid_out, jobs=jobs)
            )
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        done = []
        refusal: TopicsError | None = None
        for copy, outcome in zip(copies, outcomes, strict=True):
            if isinstance(outcome, TopicsError):
                refusal = refusal or outcome
                _log.warning("a dead letter cannot be written", topic=name, seq=copy.seq, reason=outcome.message)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                done.append(copy.seq)
        return done, refusal
