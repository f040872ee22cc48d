"""`python -m bench.cut_cost`: CPU time a record of the compactor's work on a log, and of a start's.

In one process, without a service: a log of `--records` records of 100 bytes in writes to 16 topics in turn, made by the
log's own writer, is followed as the compactor follows it, its records are put into segments, and it is recovered as a
shard does. CPU time, the system's included, best of `--rounds`: other work on the machine shows less in it than in
seconds. The cost of a cut for each topic and file is not in it.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NamedTuple, cast

from topics.compactor.segment_building import LogBuffers, SealAt, SegmentAppender
from topics.compactor.shard_copy import ShardCopy, ShardLink
from topics.core.config import TopicConfig
from topics.core.control_bodies import CreateFrameBody, encode_body
from topics.core.fold import Fold
from topics.core.location import ENTRY_WORDS
from topics.core.record_index import UnlocatedIndex
from topics.core.segment_list import SegmentInfo
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import FrameType, encode, lay_out, stamp
from topics.storage.log_fold import fold_frames
from topics.storage.log_tail import LogTail
from topics.storage.logfile import WalIdentity, WalPosition
from topics.storage.recovery import Recovery
from topics.storage.wal import WalWriter

TOPICS: Final = 16
DATA_BYTES: Final = 100
RECORDS_PER_STEP: Final = 1 << 16
GROUP_WRITES: Final = 4
"""Writes that a shard commits at once, all of one millisecond."""
_TS_MS: Final = 1_700_000_000_000
_SEAL_AT: Final = SealAt(10_000, 64 << 20, 0)
_IDENTITY: Final = WalIdentity(0, 1, "bench")


class _LocatedIndex(UnlocatedIndex):
    """An index that keeps the locations, which a shard publishes in its arena."""

    __slots__ = ("located",)

    def __init__(self) -> None:
        super().__init__()
        self.located = array("Q")

    def append_entries(self, entries: array[int]) -> None:
        super().append_entries(entries)
        self.located.extend(entries)


def write_log(directory: str, records: int, batch: int, is_mixed: bool) -> WalPosition:
    """Write a log and return its end. `is_mixed`: lengths of 50 to 150 bytes, and every third record has a tag."""
    chance = random.Random(batch)
    writer = WalWriter(OsFileSystem(), directory, _IDENTITY, None)
    commit = writer.commit
    creates = [
        encode(
            FrameType.TOPIC_CREATE,
            0,
            topic,
            0,
            _TS_MS,
            b"",
            b"",
            encode_body(CreateFrameBody(f"t{topic}", TopicConfig(), False)),
        )
        for topic in range(1, TOPICS + 1)
    ]
    commit(writer.plan(list(map(len, creates))), creates, False)
    heads = [0] * (TOPICS + 1)
    writes: list[bytearray] = []
    for number in range(0, records, batch):
        topic = number // batch % TOPICS + 1
        made = []
        for at in range(batch):
            length = chance.randrange(DATA_BYTES // 2, 3 * DATA_BYTES // 2) if is_mixed else DATA_BYTES
            made.append(
                (b"", b"tag-%d" % (at % 7) if is_mixed and at % 3 == 0 else b"", b'"' + b"x" * (length - 2) + b'"', b"")
            )
        laid_out = lay_out(made)
        stamp(
            laid_out.buffer, laid_out.offset_len, topic, heads[topic] + 1, _TS_MS + number // (batch * GROUP_WRITES), 0
        )
        heads[topic] += batch
        writes.append(laid_out.buffer)
        if len(writes) == GROUP_WRITES:
            commit(writer.plan(list(map(len, writes))), writes, False)
            writes.clear()
    if writes:
        commit(writer.plan(list(map(len, writes))), writes, False)
    plan = writer.plan([1])
    writer.close()
    return WalPosition(plan.file_no, plan.offsets[0])


def follow(directory: str, end: WalPosition) -> Fold:
    fold = Fold(lambda _topic_id: UnlocatedIndex(), is_located=False)
    shard_copy = ShardCopy(
        "bench", cast(ShardLink, SimpleNamespace(shard=0)), LogTail(directory, WalPosition(1, 0)), fold
    )
    shard_copy.catch_up(end, lambda: None)
    return fold


def recover(directory: str) -> Fold:
    fold = Fold(lambda _topic_id: _LocatedIndex())
    for batch in Recovery(OsFileSystem(), directory, _IDENTITY):
        fold_frames(fold, batch, False)
    fold.apply_pending()
    return fold


def copy(directory: str, data_dir: str, located: dict[int, array[int]]) -> int:
    """Put the records into segments, as a cut does; return how many."""
    appender = SegmentAppender(OsFileSystem(), data_dir, _SEAL_AT, set())
    buffers = LogBuffers(directory)
    copied = 0
    try:
        for topic_id, entries in located.items():
            last: SegmentInfo | None = None
            at = 0
            while at < len(entries):
                step = entries[at : at + RECORDS_PER_STEP * ENTRY_WORDS]
                infos = appender.append(topic_id, last, step, buffers.get, _TS_MS)
                last = infos[-1]
                at += len(step)
                copied += len(step) // ENTRY_WORDS
    finally:
        buffers.close()
    return copied


class Cost(NamedTuple):
    """CPU time a record in ns: the program's own, and the system's for it."""

    user: float
    system: float

    def __str__(self) -> str:
        return f"{self.user:.0f} + {self.system:.0f}"


def cost(work: Callable[[], object], records: int, rounds: int) -> Cost:
    """Return the lowest cost of some rounds."""
    found = []
    for _ in range(rounds):
        began = resource.getrusage(resource.RUSAGE_SELF)
        work()
        ended = resource.getrusage(resource.RUSAGE_SELF)
        found.append((ended.ru_utime - began.ru_utime, ended.ru_stime - began.ru_stime))
    return Cost(*(min(seconds) * 1e9 / records for seconds in zip(*found, strict=True)))


def measure(root: str, records: int, rounds: int, batch: int, is_mixed: bool) -> list[Cost]:
    directory = f"{root}/wal"
    end = write_log(directory, records, batch, is_mixed)
    located = {topic.id: cast(_LocatedIndex, topic.index).located for topic in recover(directory).topics.values()}
    assert sum(map(len, located.values())) == records * ENTRY_WORDS

    def into_segments() -> None:
        shutil.rmtree(f"{root}/topics", ignore_errors=True)
        copy(directory, root, located)

    works = (lambda: follow(directory, end), into_segments, lambda: recover(directory))
    return [cost(work, records, rounds) for work in works]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to make the log, default a temporary one")
    options = parser.parse_args(arguments)
    print("| log | follow | into segments | recover |\n|---|---|---|---|")
    for batch, is_mixed in ((1000, False), (100, False), (100, True), (10, False), (1, False)):
        with tempfile.TemporaryDirectory(prefix="cut-cost-", dir=options.directory) as root:
            costs = measure(root, options.records, options.rounds, batch, is_mixed)
        print(f"| batch {batch}{', lengths and tags mixed' if is_mixed else ''} | {' | '.join(map(str, costs))} |")


if __name__ == "__main__":
    main()
