"""A cut moves everything in the logs into segments and a snapshot, so that a start needs only the logs behind it.

    log      ──────────────────────────────●──────────────▶
                     P(previous)           P = committed when the cut began
    1. fold up to P             every topic's head, floors, configuration
    2. records ≤ P → segments   synced; the shard marks them in its log, behind P, and syncs that
    3. snapshot of the fold     and of the segments; a start reads the log behind P on top of it
    4. trim                     log files before P(previous), so a start from the previous snapshot stays possible
    5. sweep                    files that neither of the two snapshots needs

A shard that cannot take part keeps its part of the last snapshot and holds up no other shard. The disk is full if
shards take no records, or steps 2 or 3 have no room: then the sweep does not wait for two snapshots (`_make_room`).

If the previous snapshot turns out to be damaged, an older one is the fallback, and steps 4 and 5 wait for the next cut.

If the process is killed at any step, its next life begins again from the newest snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from topics.compactor.checkpoints import Checkpoints, DurableMarks, Refused, mark
from topics.compactor.leftovers import Leftovers, Swept, TopicFiles
from topics.compactor.life import Life
from topics.compactor.relocation import Relocation
from topics.compactor.rewriting import Rewriting
from topics.compactor.segment_building import LogBuffers
from topics.compactor.shard_copy import ShardCopy
from topics.compactor.snapshots import Snapshots
from topics.core.clock import doubled_ms
from topics.core.errors import TopicsError
from topics.log import LastingFailures, get_logger
from topics.shm.topic_messages import Trim
from topics.storage.filesystem import NO_ROOM
from topics.storage.kill_points import reached
from topics.storage.logfile import WalPosition
from topics.storage.snapshot import ShardPart

MEASURED_PER_STEP: Final = 16
"""The most segments measured in one step of upkeep: small ones hardly count against the bytes/s of `Rewriting`."""
_NOT_CUT: Final = "a checkpoint failed and will be repeated, so the log keeps its length"
_NOT_SAVED: Final = "a snapshot could not be saved, so the logs keep their length"
_NOT_TRIMMED: Final = "log files could not be removed"
_NOT_SYNCED: Final = "the disk is full, and a log cannot be synced"
_SUPERFLUOUS_STAY: Final = "superfluous files could not be removed, which will be repeated"
_COLD_STAYS: Final = "superfluous files in the cold directory could not be removed, which will be repeated"

RETRY_MS: Final = 2_000
"""The pause after a cut that was not complete; doubled each time, up to the interval or RETRY_MAX_MS."""
RETRY_MAX_MS: Final = 60_000
"""The longest such pause, even if the interval is longer: a full disk must get its room back."""

TIDY_MIN_MS: Final = 1_000
"""The least time between two tries to remove files that a cut could not remove: each try reads all pins."""
SHORT_OF_ROOM_MS: Final = 1_000
"""The time between two cuts while the disk has little room, so that a delete soon gives its room back."""
SHORT_OF_ROOM_BYTES: Final = 1024 * 1024
"""With this many new bytes the next cut does not wait for SHORT_OF_ROOM_MS."""

log = get_logger()


class CutTimes:
    """Decides when to cut: `interval_ms` after the last cut, at once when a shard has written `wal_bytes` since, or
    soon when the disk has little room.

    It repeats a failed cut earlier, but less and less often. Pure; `now_ms` is monotonic.
    """

    def __init__(self, interval_ms: int, wal_bytes: int, now_ms: int) -> None:
        self._interval_ms = interval_ms
        self._wal_bytes = wal_bytes
        self._retry_max_ms = min(interval_ms, RETRY_MAX_MS)
        self._begun_ms = self._last_ms = self._tidied_ms = now_ms
        self._has_tried = False
        self._failed = 0

    def is_due(self, new_bytes: int, now_ms: int, left_bytes: int = sys.maxsize) -> bool:
        """True if it is time to begin a cut. `left_bytes` is the room on the disk, see `room_left_bytes`."""
        since_ms = now_ms - self._last_ms
        if self._failed:
            wait_ms = doubled_ms(RETRY_MS, self._failed - 1, max(RETRY_MS, self._retry_max_ms))
        else:
            wait_ms = self._interval_ms
        if left_bytes <= 2 * new_bytes:
            wait_ms = min(wait_ms, SHORT_OF_ROOM_MS)
        return since_ms >= wait_ms or new_bytes >= min(self._wal_bytes, max(SHORT_OF_ROOM_BYTES, left_bytes // 2))

    def done(self, complete: bool, now_ms: int, was_made: bool = True) -> None:
        """Note the end of a try. `was_made` False: there was nothing to cut. `complete`: all shards took part."""
        self._last_ms = now_ms
        self._has_tried = True
        self._failed = 0 if complete else self._failed + 1
        if complete and was_made:
            self._tidied_ms = now_ms

    def is_tidying_due(self, now_ms: int) -> bool:
        """True if it is time to try again to remove files that a cut could not remove."""
        return now_ms - self._tidied_ms >= max(TIDY_MIN_MS, self._retry_max_ms)

    def tidied(self, now_ms: int) -> None:
        """Note that the compactor has tried to remove them."""
        self._tidied_ms = now_ms

    def may_keep_up(self, now_ms: int) -> bool:
        """True if upkeep may be done. The first cut comes first: otherwise an error in upkeep that ends each life of
        the process would prevent all cuts. Upkeep does not wait out a long interval, as `wal_bytes` bounds the log
        then.
        """
        return self._has_tried or now_ms - self._begun_ms >= RETRY_MAX_MS


@dataclass(eq=False)
class Compactor:
    """Makes cuts: it moves the contents of the logs into segments and a snapshot, then removes superfluous files.

    It owns the order of the steps; each collaborator owns its part. It guarantees that a failure of one shard holds up
    no other, and that it removes nothing that a start from one of the two newest snapshots needs.
    """

    shard_copies: list[ShardCopy]
    _snapshots: Snapshots
    _checkpoints: Checkpoints
    marks: DurableMarks
    _leftovers: Leftovers
    _rewriting: Rewriting
    _relocation: Relocation | None
    _life: Life

    def __post_init__(self) -> None:
        self._cell, self._clock, self._alive = self._life.cell, self._life.clock, self._life.alive
        self._cell.set("snapshot_bytes", self._snapshots.size_bytes)
        self._lasting = LastingFailures(lambda: self._clock.monotonic_ms() / 1000)
        self._tried_bytes = [self._cell.get(f"absorbed_bytes_{one.shard:02d}") for one in self.shard_copies]

    def follow(self, step_bytes: int) -> None:
        """Read on in each log that has `step_bytes` of news or more, so that the next cut has less to do at once."""
        for shard_copy in self.shard_copies:
            until = shard_copy.link.committed
            shard_copy.link.take_notices()
            if until is not None and _bytes_between(shard_copy.tail.position, until) >= step_bytes:
                shard_copy.catch_up(until, self._alive)

    def upkeep(self) -> int | None:
        """Do one step of the work that can wait (relocating, rewriting, ending a loan). Return the ms until the next
        step, None without one. Raise OSError, Refused.
        """
        if self._relocation is not None:
            # Relocate first: that makes room, and on a full disk rewriting fails.
            relocated, failed = self._relocation.step(self.shard_copies)
            self._cell.add("segments_relocated", relocated)
            self._cell.add("failures", failed)
        for shard_copy in self.shard_copies:
            # Records in a sealed segment may have been deleted before it was sealed.
            for sealed in shard_copy.sealed:
                self._rewriting.consider(shard_copy, *sealed)
            shard_copy.sealed.clear()
        self._tell_borrowed()
        for _ in range(MEASURED_PER_STEP):
            if self._rewriting.step(self.shard_copies):
                self._cell.add("segments_rewritten")
            if self._rewriting.due_in_ms() != 0:
                break
        return self._rewriting.due_in_ms()

    def _tell_borrowed(self) -> None:
        if (loan := self._rewriting.loan) is not None:
            self._cell.set("segments_borrowed", loan.segments)
            self._cell.set("borrowed_bytes", loan.data_bytes)

    @property
    def new_bytes(self) -> int:
        """The bytes that the busiest shard has written since the last cut or try."""
        return max(
            shard_copy.link.written_bytes - self._tried_bytes[shard_copy.shard] for shard_copy in self.shard_copies
        )

    @property
    def has_news(self) -> bool:
        """True if a cut would find news in the logs, remove files, or seal an old segment."""
        for shard_copy in self.shard_copies:
            kept = self._snapshots.positions.get(shard_copy.shard)
            if kept is None or shard_copy.link.committed not in (None, kept):
                return True
        if self._leftovers.waiting or (self._relocation is not None and self._relocation.waiting):
            return True
        if self._rewriting.loan is not None and self._rewriting.loan.waits_for_snapshot:
            return True
        return any(map(self._checkpoints.has_old, self.shard_copies))

    def cut(self, is_full: bool = False) -> bool:
        """Make a cut, and call `_make_room` if the disk is full. Return False if a shard could not take part, refused
        or failed, or the snapshot could not be saved: then repeat the cut later.

        Raise TailLost, FoldError, and OSError from reading a log: do not use this object any more then.
        """
        written_bytes: dict[int, int] = {}
        begun_ms = self._clock.now_ms()
        parts: dict[int, ShardPart] = {}
        for shard_copy in self.shard_copies:
            self._tried_bytes[shard_copy.shard] = written = shard_copy.link.written_bytes
            until = shard_copy.link.committed
            if until is None:
                log.info("a shard is recovering, so its part of the last snapshot stays", shard=shard_copy.shard)
                continue
            shard_copy.catch_up(until, self._alive)
            reached("checkpoint.followed")
            try:
                self._checkpoint(shard_copy)
            except (OSError, Refused) as error:
                is_full |= self._not_cut(shard_copy, error)
                continue
            parts[shard_copy.shard] = self._snapshots.part_of(shard_copy, self._alive)
            written_bytes[shard_copy.shard] = written
        reached("snapshot.due")
        for shard_copy in [self.shard_copies[shard] for shard in parts]:
            try:
                for topic_id, info in self.marks.sync(shard_copy):
                    self._rewriting.consider(shard_copy, topic_id, info.first_seq)
            except (OSError, Refused) as error:
                is_full |= self._not_cut(shard_copy, error)
                del parts[shard_copy.shard]
        saved = False
        if self._snapshots.can_save(parts):
            try:
                self._save_and_remove(parts, begun_ms, written_bytes)
                saved = True
            except OSError as error:
                self._cell.add("failures")
                self._lasting.failed(_NOT_SAVED, error)
                is_full |= error.errno in NO_ROOM
        if is_full:
            self._make_room()
        complete = saved and len(parts) == len(self.shard_copies)
        if complete:
            self._lasting.over(_NOT_CUT, _NOT_SAVED, _NOT_SYNCED)
        return complete

    def _not_cut(self, shard_copy: ShardCopy, error: OSError | Refused) -> bool:
        """Count and log the failure of one shard. True if the disk is full."""
        if isinstance(error, OSError):
            self.marks.doubt()
        self._cell.add("failures")
        self._lasting.failed(_NOT_CUT, error, shard=shard_copy.shard)
        return isinstance(error, OSError) and error.errno in NO_ROOM

    def _checkpoint(self, shard_copy: ShardCopy) -> None:
        with closing(LogBuffers(shard_copy.tail.directory)) as buffers:
            written = self._checkpoints.run(shard_copy, buffers)
        if self._relocation is not None:
            for topic_id in shard_copy.touched:
                if (topic := shard_copy.fold.topics.get(topic_id)) is not None:
                    self._relocation.consider(shard_copy, topic)
        shard_copy.touched.clear()
        self._cell.add("checkpoints")
        self._cell.add("checkpointed_records", written.records)
        self._cell.add("checkpointed_bytes", max(0, written.data_bytes))
        self._cell.add("segments_sealed", written.sealed)

    def _save_and_remove(self, parts: dict[int, ShardPart], begun_ms: int, written_bytes: dict[int, int]) -> None:
        """Save a snapshot, then remove superfluous files. Raise OSError when there is no new snapshot."""
        former = self._snapshots.positions
        former_is_fallback = self._snapshots.save(parts)
        self._cell.add("snapshots")
        self._cell.set("snapshot_bytes", self._snapshots.size_bytes)
        self._cell.set("last_snapshot_ms", self._clock.now_ms())
        reached("snapshot.saved")
        self._cell.set("absorbed_ms", begun_ms)
        for shard in parts:
            self._cell.set(f"absorbed_bytes_{shard:02d}", written_bytes[shard])
        if former_is_fallback:
            self._trim({shard: former[shard] for shard in parts if shard in former})
            self._sweep(parts)
            if self._rewriting.loan is not None and len(parts) == len(self.shard_copies):
                self._rewriting.loan.snapshot_saved(self.shard_copies)

    def _trim(self, positions: dict[int, WalPosition]) -> None:
        all_trimmed = True
        for shard, position in positions.items():
            try:
                self.shard_copies[shard].link.call(Trim(position.file_no))
            except TopicsError as error:
                # The next trim removes these files, too.
                self._cell.add("failures")
                self._lasting.failed(_NOT_TRIMMED, error, shard=shard)
                all_trimmed = False
            reached("trim.some")
        if all_trimmed:
            self._lasting.over(_NOT_TRIMMED)
        reached("trim.done")

    def consider_all(self) -> None:
        """Queue all work that former lives may have left undone. Raise OSError."""
        self._leftovers.consider_all()
        if self._rewriting.loan is not None:
            self._rewriting.loan.count(self.shard_copies)
            self._tell_borrowed()
        for shard_copy in self.shard_copies:
            self._rewriting.consider_all(shard_copy)
            if self._relocation is not None:
                for topic in shard_copy.fold.topics.values():
                    self._relocation.consider(shard_copy, topic)

    def tidy(self) -> None:
        """Try again to remove files that two snapshots found superfluous: that needs no further snapshot."""
        self._count_removed(self._leftovers.tidy(self._files_of))
        if self._relocation is not None:
            self._count_failures(_COLD_STAYS, self._relocation.tidy(self._files_of))

    def _sweep(self, shards: Collection[int]) -> None:
        """Sweep the topics of these shards: the shards whose state is new in the last snapshot."""
        for shard in shards:
            shard_copy = self.shard_copies[shard]
            for topic_id in shard_copy.shrunk:
                self._leftovers.consider(topic_id)
            shard_copy.shrunk.clear()
        complete = len(shards) == len(self.shard_copies)

        def in_snapshot(topic_id: int) -> bool:
            shard = self._shard_of(topic_id)
            return shard in shards if shard is not None else complete

        self._count_removed(self._leftovers.sweep(self._files_of, in_snapshot))
        if self._relocation is not None:
            self._count_failures(_COLD_STAYS, self._relocation.sweep(self._files_of, in_snapshot))

    def _make_room(self) -> None:
        """On a full disk, remove all files that are superfluous by the logs, so that snapshots fit again.

        Once a log is synced, a start that reads it needs none of these files, whichever snapshot it begins with.
        Waiting for the second snapshot protects only against a log that is damaged later. Without this, the disk would
        stay full whatever clients delete, and that is worse.
        """
        synced: set[int] = set()
        for shard_copy in self.shard_copies:
            until = shard_copy.link.committed
            if until is None:
                continue
            try:
                mark(shard_copy, [])
                # The shard's answer means that its log is synced up to `until`.
                shard_copy.catch_up(until, self._alive)
            except (OSError, Refused) as error:
                self._lasting.failed(_NOT_SYNCED, error, shard=shard_copy.shard)
            else:
                synced.add(shard_copy.shard)
        shrunk = set().union(*(self.shard_copies[shard].shrunk for shard in synced))

        def files_of(topic_id: int) -> TopicFiles | None:
            return self._files_of(topic_id) if self._shard_of(topic_id) in synced else None

        removed = self._count_removed(self._leftovers.make_room(shrunk, files_of))
        if removed:
            log.warning("the disk is full, so files of deleted records were removed at once", segments=removed)

    def _count_removed(self, swept: Swept) -> int:
        """Count and log the result of a sweep. Return the number of removed segments."""
        self._count_failures(_SUPERFLUOUS_STAY, swept.failures)
        self._cell.add("segments_dropped", len(swept.removed))
        self._cell.set("orphans", self._leftovers.unexplained)
        if self._relocation is not None:
            for key in swept.removed:
                self._relocation.removed(key)
        return len(swept.removed)

    def _count_failures(self, event: str, failures: list[OSError]) -> None:
        if failures:
            self._cell.add("failures", len(failures))
            self._lasting.failed(event, failures[0])
        else:
            self._lasting.over(event)

    def _shard_of(self, topic_id: int) -> int | None:
        """Return the shard of a topic. None: no log ever created it."""
        for shard_copy in self.shard_copies:
            if topic_id in shard_copy.fold.topics or topic_id in shard_copy.fold.created_ids:
                return shard_copy.shard
        return None

    def _files_of(self, topic_id: int) -> TopicFiles | None:
        shard = self._shard_of(topic_id)
        if shard is None:
            return None
        shard_copy = self.shard_copies[shard]
        topic = shard_copy.fold.topics.get(topic_id)
        if topic is None:
            return TopicFiles(None, 0)
        return TopicFiles(shard_copy.index_of(topic).segments, topic.earliest_seq)


def _bytes_between(start: WalPosition, end: WalPosition) -> int:
    """Return the bytes of log between two positions, or a large number if they are in different files."""
    return end.offset - start.offset if end.file_no == start.file_no else max(end.offset, 1 << 30)
