"""The upkeep of a shard between its groups: syncs, expiry, memory and files that are not needed any more."""

from __future__ import annotations

from dataclasses import dataclass

from topics.core.clock import Clock
from topics.storage.topic_frames import head_frame
from topics.walshard.commit.draft import Draft, LogWrite, Steps
from topics.walshard.commit.log_trim import LogTrim, RamTrim
from topics.walshard.commit.logs import BackgroundSync
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.handlers.watch_sessions import WatchSessions
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.hosted.segment_files import SegmentFiles


@dataclass(eq=False)
class Upkeep:
    """Does the upkeep of one shard. Nothing is prepared while it runs."""

    _catalog: Catalog
    _files: SegmentFiles
    _syncs: BackgroundSync
    _log_trim: LogTrim
    _ram_trim: RamTrim
    _deletes: Deletes
    _sessions: WatchSessions
    _clock: Clock

    @property
    def busy(self) -> bool:
        """Return whether there is more to do at once."""
        return self._log_trim.busy or self._deletes.is_sweeping or self._ram_trim.due

    def sync(self) -> list[Hosted]:
        """Start and end background syncs; return topics that became durable by them, at most MOVED_MAX."""
        moved = self._syncs.poll(self._clock.monotonic_ms())
        self._log_trim.poll()
        return moved

    def idle(self) -> bool:
        """Do a little of the work that can wait, when there is nothing else to do. False if there is none."""
        return self._deletes.index_some()

    def sweep(self) -> Steps[None]:
        """Once a second, expire records of topics that nobody touches, free memory, and collect idle sessions."""
        yield from self._deletes.sweep()
        yield from self.sweep_followed()

    def sweep_followed(self) -> Steps[None]:
        """Do the part of `sweep` that changes no topic, which is all that a follower may do."""
        yield from self._sessions.collect()
        self._files.drop_replaced()
        self._files.mark_again()
        self._files.count_some()
        self._ram_trim.relieve()

    def step(self) -> Steps[bool]:
        """Go on with the sweep, and trim the RAM log if that is worth its cost. True if topics may have changed."""
        sweeping = self._deletes.is_sweeping
        if sweeping:
            yield from self._deletes.sweep_some()
        if self._ram_trim.due:
            yield from self._ram_trim.trim(self._clock.now_ms())
        return sweeping

    def close(self) -> Steps[None]:
        """Log the heads of `ephemeral` topics exactly as they are, at a clean end."""
        now_ms = self._clock.now_ms()
        yield Draft(
            LogWrite([head_frame(hosted.topic, hosted.topic.head_seq, now_ms, exact=True)])
            for hosted in self._catalog
            if hosted.topic.config.durability == "ephemeral" and hosted.topic.head_seq < hosted.topic.ceilings.seq
        )
