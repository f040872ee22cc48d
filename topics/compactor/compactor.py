"""A cut: everything that the logs say so far goes into segments and a snapshot, then the logs need not say it any more.

    log      ──────────────────────────────●──────────────▶
                     P(previous)           P = committed when the cut began
    1. fold up to P             every topic's head, floors, configuration
    2. records ≤ P → segments   synced; the shard marks them in its log, behind P, and syncs that
    3. snapshot of the fold     and of the segments; what the log says behind P comes on top of it
    4. trim                     log files before P(previous): the previous snapshot stays good for a start
    5. sweep                    files that neither of the two snapshots can ask for

Where the previous snapshot turns out to be damaged, an older one stays to fall back on: then 4 and 5 are left to the
next cut, for which this snapshot is the previous one.

Killed anywhere, the next life begins with the newest snapshot and does what was not done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final

from topics.compactor.checkpoints import Checkpoints, Refused
from topics.compactor.durable_marks import DurableMarks
from topics.compactor.follower import Follower
from topics.compactor.leftovers import Leftovers, TopicFiles
from topics.compactor.log_buffers import LogBuffers
from topics.compactor.relocation import Relocation, object_names
from topics.compactor.rewrites import Rewriting
from topics.core.clock import Clock
from topics.core.errors import TopicsError
from topics.log import get_logger
from topics.shm.compactor_messages import Trim
from topics.shm.control import ProcessCell
from topics.shm.messages import Done
from topics.storage.filesystem import FileSystem
from topics.storage.kill_points import reached
from topics.storage.logfile import WalPosition
from topics.storage.snapshot import save_snapshot
from topics.storage.state import ShardPart, encode_part, encode_parts, load

LOOKS_PER_STEP: Final = 16
"""Segments that are so small that the rate at which they may be rewritten is no bound."""

log = get_logger()


class Compactor:
    """`newest`: the number of the newest snapshot, `kept`: where it goes on in each shard's log; `log_dirs`: each
    shard's log and RAM log.
    """

    def __init__(
        self,
        fs: FileSystem,
        data_dir: str,
        followers: list[Follower],
        log_dirs: list[tuple[str, str]],
        newest: int | None,
        kept: dict[int, WalPosition],
        checkpoints: Checkpoints,
        marks: DurableMarks,
        leftovers: Leftovers,
        rewriting: Rewriting,
        relocation: Relocation | None,
        cell: ProcessCell,
        clock: Clock,
        alive: Callable[[], None],
    ) -> None:
        self._fs = fs
        self._data_dir = data_dir
        self._followers = followers
        self._log_dirs = log_dirs
        self._newest = newest
        self._kept = kept
        self._checkpoints = checkpoints
        self._marks = marks
        self._leftovers = leftovers
        self._rewriting = rewriting
        self._relocation = relocation
        self._cell = cell
        self._clock = clock
        self._alive = alive

    def follow(self, step_bytes: int) -> None:
        """Reads the logs on where there is that much to read: then a cut has less to do at one go."""
        for follower in self._followers:
            until = follower.link.committed
            follower.link.take_notices()
            if until is not None and _bytes_between(follower.position, until) >= step_bytes:
                follower.catch_up(until, self._alive)

    def upkeep(self) -> int | None:
        """A step of what can wait; in how many ms the next one is due, None without one. Raises OSError, Refused."""
        if self._relocation is not None:
            # First: a full disk makes rewriting fail, and this makes room.
            step = self._relocation.step(self._followers)
            self._cell.add("segments_relocated", step.relocated)
            self._cell.add("failures", step.failed)
        for _ in range(LOOKS_PER_STEP):
            if self._rewriting.step(self._followers):
                self._cell.add("segments_rewritten")
            if self._rewriting.due_in_ms() != 0:
                break
        return self._rewriting.due_in_ms()

    @property
    def new_bytes(self) -> int:
        """The most that one shard has written since the last snapshot."""
        return max(
            follower.link.written_bytes - self._cell.get(f"absorbed_bytes_{follower.shard:02d}")
            for follower in self._followers
        )

    @property
    def has_news(self) -> bool:
        """Whether a snapshot would say anything that the last one does not, or let files go, or segments are old."""
        for follower in self._followers:
            kept = self._kept.get(follower.shard)
            if kept is None or follower.link.committed not in (None, kept):
                return True
        if self._leftovers.waiting or (self._relocation is not None and self._relocation.waiting):
            return True
        return any(map(self._checkpoints.has_old, self._followers))

    def cut(self) -> bool:
        """False when a shard could not take part or refused; the cut may be repeated then, and after an OSError.

        Raises TailLost, FoldError: this object is of no use any more.
        """
        written_bytes: dict[int, int] = {}
        begun_ms = self._clock.now_ms()
        parts: dict[int, ShardPart] = {}
        for follower in self._followers:
            written = follower.link.written_bytes
            until = follower.link.committed
            if until is None:
                log.info("a shard recovers, its part of the last snapshot stays", shard=follower.shard)
                continue
            follower.catch_up(until, self._alive)
            reached("checkpoint.followed")
            try:
                self._checkpoint(follower)
            except OSError:
                self._marks.doubt()
                raise
            except Refused as error:
                self._cell.add("failures")
                log.error("a checkpoint was refused, the log stays as long as it is", reason=str(error))
                continue
            parts[follower.shard] = encode_part(
                follower.shard, len(self._followers), follower.log_id(), follower.position, follower.fold.state()
            )
            written_bytes[follower.shard] = written
        reached("snapshot.due")
        if not parts or len(parts.keys() | self._kept.keys()) < len(self._followers):
            return False
        self._sync_marks(parts)
        former = self._kept
        former_is_fallback = self._save(parts)
        self._cell.set("absorbed_ms", begun_ms)
        for shard, written in written_bytes.items():
            self._cell.set(f"absorbed_bytes_{shard:02d}", written)
        if former_is_fallback:
            self._trim({shard: former[shard] for shard in parts if shard in former})
        if len(parts) < len(self._followers):
            return False
        if former_is_fallback:
            self._sweep()
        return True

    def _checkpoint(self, follower: Follower) -> None:
        buffers = LogBuffers(*self._log_dirs[follower.shard])
        try:
            written = self._checkpoints.run(follower, buffers)
        finally:
            buffers.close()
        if self._relocation is not None:
            for topic_id in follower.touched:
                if (topic := follower.fold.topics.get(topic_id)) is not None:
                    self._relocation.consider(follower, topic)
        follower.touched.clear()
        self._cell.add("checkpoints")
        self._cell.add("checkpointed_records", written.records)
        self._cell.add("checkpointed_bytes", max(0, written.data_bytes))
        self._cell.add("segments_sealed", written.sealed)

    def _sync_marks(self, shards: Iterable[int]) -> None:
        try:
            marked = self._marks.sync([self._followers[shard] for shard in shards])
        except OSError:
            self._marks.doubt()
            raise
        for follower, topic_id, info in marked:
            self._rewriting.consider(follower, topic_id, info.first_seq)

    def _save(self, parts: dict[int, ShardPart]) -> bool:
        """What of a shard is not in `parts` is taken over from the newest snapshot. True when that is what is left to
        fall back on, or there was none.
        """
        if len(parts) < len(self._followers):
            newest = load(self._fs, self._data_dir)
            assert newest is not None, "this life has saved or loaded it"
            parts = {part.shard: part for part in newest.parts} | parts
        body = encode_parts([parts[shard] for shard in sorted(parts)])
        former = self._newest
        saved = save_snapshot(self._fs, self._data_dir, body)
        self._newest = saved.number
        self._kept = {shard: part.position for shard, part in parts.items()}
        self._cell.add("snapshots")
        self._cell.set("last_snapshot_ms", self._clock.now_ms())
        log.debug("snapshot", number=saved.number, size_bytes=len(body))
        reached("snapshot.saved")
        if former in (saved.fallback, None):
            return True
        log.error("the last snapshot is not the one to fall back on: nothing is removed before the next", number=former)
        return False

    def _trim(self, positions: dict[int, WalPosition]) -> None:
        for shard, position in positions.items():
            try:
                self._followers[shard].link.call(Trim(position.file_no), Done)
            except TopicsError as error:
                # The next one removes those files as well.
                self._cell.add("failures")
                log.error("log files could not be removed", shard=shard, reason=str(error))
            reached("trim.some")
        reached("trim.done")

    def look_at_all(self) -> None:
        """What former lives left undone. Raises OSError."""
        self._leftovers.look_at_all()
        for follower in self._followers:
            self._rewriting.consider_all(follower)
            if self._relocation is not None:
                for topic in follower.fold.topics.values():
                    self._relocation.consider(follower, topic)

    def _sweep(self) -> None:
        for follower in self._followers:
            for topic_id in follower.shrunk:
                self._leftovers.look_at(topic_id)
            follower.shrunk.clear()
        removed, failures = self._leftovers.sweep(self._files_of, self._alive)
        self._failed("files that nothing needs could not be removed, which will be repeated", failures)
        self._cell.add("segments_dropped", len(removed))
        self._cell.set("orphans", self._leftovers.unexplained)
        if self._relocation is not None:
            names = [object_names(topic_id, *name) for topic_id, name in removed]
            failures = self._relocation.sweep(self._files_of, itertools.chain.from_iterable(names))
            self._failed("what is superfluous in the cold directory stays for now", failures)

    def _failed(self, what: str, failures: list[OSError]) -> None:
        if failures:
            self._cell.add("failures", len(failures))
            log.error(what, count=len(failures), reason=str(failures[0]))

    def _files_of(self, topic_id: int) -> TopicFiles | None:
        for follower in self._followers:
            topic = follower.fold.topics.get(topic_id)
            if topic is not None:
                return TopicFiles(follower.index_of(topic).segments, topic.earliest_seq)
            if topic_id in follower.fold.created_ids:
                return TopicFiles(None, 0)
        return None


def _bytes_between(start: WalPosition, end: WalPosition) -> int:
    """At least so many bytes of log; of files in between only that there are some."""
    return end.offset - start.offset if end.file_no == start.file_no else max(end.offset, 1 << 30)
