"""Moves jobs that were handed out too often to their dead-letter topic, and back (api §9).

The queue's shard holds such a job back until a frontend reports that the record is in the other topic, and then deletes
the job. If a process is killed between these steps, the job is still in the queue. The other topic recognises the next
attempt by its idempotency key. So no job is lost, and none is duplicated while the topic remembers the key.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

import msgspec

from topics.core.config import TopicConfig
from topics.core.dead_letters import FROM, ORDER_KEY, Meta, dead_letter_meta, redriven_meta
from topics.core.errors import TopicsError, topic_not_found
from topics.core.idempotency import KeyMark
from topics.frontend.entry.responses import encode_json
from topics.frontend.queues.dealt_jobs import ASIDE_MS, UnreadableJobs
from topics.frontend.reads.reading import TopicReader, TopicRef
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Slices
from topics.frontend.shards.gateway import Gateway
from topics.log import LASTING_EVERY_S, SparseLines
from topics.shm.append_messages import AppendOptions, AppendReply, JobAttributes
from topics.shm.queue_messages import Bury, Dealt, Release, Remove, Reserve
from topics.storage.frame import lay_out

RETRY_MS: Final = 1_000
"""Time until a job that could not be moved to its dead-letter topic is dealt again."""
MOVE_WAIT_S: Final = 1.0
"""Longest time that the answer to a claim waits for a move. The move goes on after it."""
EXAMINED_MAX: Final = 65_536
"""Records that one redrive examines: a topic may hold another queue's dead letters by the million."""
_PAGE: Final = PageOptions(limit=256, max_batch_bytes=1 << 20, include_tags=True)


class _Record(msgspec.Struct, frozen=True):
    seq: int = msgspec.field(name="$seq")
    data: msgspec.Raw
    node: str = msgspec.field(name="$node", default="")
    tag: str = msgspec.field(name="$tag", default="")
    meta: Meta = {}


class DeadLetter(NamedTuple):
    """A record on its way to another topic. There it is a job with `order_key`, unless that is ""."""

    record: _Record
    meta: Meta
    key: bytes
    order_key: str = ""


_decode_records = msgspec.json.Decoder(list[_Record]).decode


class DeadLetters:
    """The moves of this frontend between queues and their dead-letter topics."""

    def __init__(self, gateway: Gateway, reader: TopicReader, unreadable: UnreadableJobs) -> None:
        self._gateway = gateway
        self._reader = reader
        self._unreadable = unreadable
        self._moves: set[asyncio.Task[None]] = set()
        # A full topic or disk refuses the moves of all jobs, each again after RETRY_MS.
        self._failures = SparseLines(LASTING_EVERY_S, asyncio.get_running_loop().time)

    def start_move(self, name: str, dealt: Dealt) -> asyncio.Task[None]:
        """Begin to move `dealt.dead`. Call this at once: the end of a stream releases its leases, not these jobs."""
        task = asyncio.get_running_loop().create_task(self._move(name, dealt))
        self._moves.add(task)
        task.add_done_callback(self._moves.discard)
        return task

    async def _move(self, name: str, dealt: Dealt) -> None:
        try:
            copied, unreadable = await self._copy_dead(name, dealt)
            left = sorted(set(dealt.dead).difference(copied, unreadable))
            if copied:
                await self._gateway.ask(Bury(name, copied, dealt.topic_id))
            for seqs, wait_ms in ((left, RETRY_MS), (unreadable, ASIDE_MS)):
                if seqs:
                    await self._gateway.ask(Release(name, seqs, dealt.topic_id, wait_ms))
        except TopicsError as error:
            # The shard deals these jobs again after it has heard nothing of them for long enough.
            self._failures.warning("jobs could not be moved to the dead letters", topic=name, reason=error.message)

    async def _copy_dead(self, name: str, dealt: Dealt) -> tuple[list[int], list[int]]:
        """Return the seqs that are in the dead-letter topic now, and those that cannot be read."""
        unreadable: list[int] = []
        try:
            ref = self._reader.get(name)
            if dealt.topic_id not in (0, ref.view.topic_id):
                raise topic_not_found(name)
            epoch = self._reader.epoch_of(ref.view.topic_id)
            copies = []
            # All at once: if the cold directory does not answer, one read takes as long as all of them.
            found = await asyncio.gather(*[self._read(ref, seq) for seq in dealt.dead], return_exceptions=True)
            dead = zip(dealt.dead, dealt.dead_deliveries, dealt.dead_order_keys, found, strict=True)
            for seq, deliveries, order_key, records in dead:
                if isinstance(records, BaseException):
                    if not isinstance(records, TopicsError) or not self._unreadable.is_unreadable(name, seq, records):
                        raise records
                    unreadable.append(seq)
                    continue
                for record in records:
                    meta = dead_letter_meta(record.meta, name, epoch, seq, deliveries, order_key)
                    key = KeyMark.CARRIED + b"dead-letter:%d:%d" % (ref.view.topic_id, seq)
                    copies.append(DeadLetter(record, meta, key))
            config = TopicConfig(durability=ref.config.durability)
            copied, _refusal = await self._append(dealt.dead_letter, copies, config)
            return copied, unreadable
        except TopicsError as error:
            self._failures.warning("dead letters cannot be moved", topic=name, reason=error.message)
            return [], unreadable

    async def redrive(self, name: str, dead_letter: str, from_seq: int, most: int) -> tuple[int, int | None]:
        """Move the oldest `most` dead letters of a queue behind `from_seq` back to it. If `dead_letter` is a queue
        itself, leased ones stay there. Return (how many were moved, the seq behind which none was examined).

        Raise `topic_not_found` if there is no `dead_letter`, and the errors of the append and of the removal. If an
        append is refused, the number of those moved before is in its detail, as `redriven`.
        """
        ref = self._reader.get(dead_letter)
        moved = 0
        cursor = max(from_seq, ref.view.earliest_seq - 1)
        last_seq = cursor + EXAMINED_MAX
        while moved < most and cursor < min(last_seq, ref.view.head_seq):
            page = await self._reader.fetch_page(ref, cursor, _PAGE)
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
        return moved, cursor if cursor < ref.view.head_seq else None

    async def _move_back(self, name: str, ref: TopicRef, letters: list[_Record]) -> tuple[int, TopicsError | None]:
        """Return (how many of these letters this call made jobs again, the error of the first other one or None)."""
        topic_id = ref.view.topic_id
        free = await self._gateway.ask(Reserve(ref.name, [letter.seq for letter in letters], topic_id))
        carried = set(free.seqs)
        copies = [
            DeadLetter(
                letter,
                redriven_meta(letter.meta),
                KeyMark.CARRIED + b"redrive:%d:%d" % (topic_id, letter.seq),
                letter.meta.get(ORDER_KEY, ""),
            )
            for letter in letters
            if letter.seq in carried
        ]
        seqs, refusal = await self._append(name, copies, None)
        left = sorted(carried.difference(seqs))
        if left and ref.config.type == "queue":
            self._gateway.post(ref.shard, Release(ref.name, left, topic_id))
        # Another redrive may have copied the same records. The one that removes a record has moved it.
        return (await self._gateway.ask(Remove(ref.name, seqs, topic_id))).count if seqs else 0, refusal

    async def _read(self, ref: TopicRef, seq: int) -> list[_Record]:
        """Return the record, or no record if it is deleted."""
        page = await self._reader.fetch_page(self._reader.refresh(ref), seq - 1, _PAGE, seq)
        return _decode_records(b"[%b]" % page.body)

    async def _append(
        self, name: str, copies: list[DeadLetter], config: TopicConfig | None
    ) -> tuple[list[int], TopicsError | None]:
        """Append each copy as a write of its own, so that each is recognised when it is repeated. Return the seqs of
        the copies that are in the topic, and the error of the first of the others. A missing topic is created with
        `config`; None: it must exist.
        """
        shard = self._gateway.owner(name)
        futures, slices = list[asyncio.Future[AppendReply]](), Slices()
        for copy in copies:
            record = copy.record
            meta = encode_json(copy.meta) if copy.meta else b""
            laid_out = lay_out([(record.node.encode(), record.tag.encode(), record.data, meta)])
            create = config is not None
            jobs: JobAttributes = [(0, 0, 0, copy.order_key)] if copy.order_key else []
            options = AppendOptions(name, create, None, copy.key, config, jobs)
            futures.append(self._gateway.submit_append(shard, options, laid_out))
            await slices.yield_if_over()
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        done, refused = list[int](), dict[int, TopicsError]()
        for copy, outcome in zip(copies, outcomes, strict=True):
            if isinstance(outcome, TopicsError):
                refused[copy.record.seq] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                done.append(copy.record.seq)
        if not refused:
            return done, None
        seq, refusal = next(iter(refused.items()))
        of_first = {"seq": seq, "records": len(refused), "reason": refusal.message}
        self._failures.warning("dead letters cannot be written", topic=name, **of_first)
        return done, refusal
