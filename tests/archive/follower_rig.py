"""A service that follows an archive, in this process: its follower and its shards, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from tests.executors import Inline
from tests.storage.faults import FaultyFileSystem
from tests.storage.page_cache import PageCache
from tests.walshard.rig import Rig, TestClock
from topics.archive.follow_main import Follower
from topics.archive.leader_tail import PATH, LeaderAwayError, LeaderTail
from topics.archive.promoting import finish_promotion, is_promotion_due, take_role
from topics.archive.replica import Replica, begin_anew
from topics.shm.control import EXIT_AGAIN, EXIT_REFUSED, ProcessState, Role
from topics.storage.archive_objects import Archive, LogEnd, Piece, decode
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import read_note
from topics.storage.origin import OriginGoneError

URL = "file:///nowhere"
Tell = Callable[[str, Sequence[LogEnd]], bytes | None]
"""The part of a leader's frontends: they answer at this address with what is behind these ends."""


class LeaderHere(LeaderTail):
    """The way to a leader in this process."""

    def __init__(self, clock: TestClock, tell: Tell) -> None:
        super().__init__(None, clock)
        self._tell = tell
        self._leader = ""

    def is_due(self, url: str) -> bool:
        self._leader = url
        return super().is_due(url)

    def ask(self, ends: Sequence[LogEnd]) -> tuple[Piece, memoryview]:
        try:
            found = self._tell(self._leader, ends)
        except (OriginGoneError, OSError) as error:
            raise LeaderAwayError(str(error)) from error
        if found is None:
            raise LeaderAwayError("no moment can be told now")
        return decode(found, Piece, PATH)


class ProcessFileSystem(FaultyFileSystem):
    """A disk as one process sees it, which may end at any call."""

    def __init__(self, disk: PageCache) -> None:
        super().__init__(disk)
        self._disk = disk

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        self._disk.fdatasync(fd)

    def sync_all(self, path: str) -> None:
        super().sync_all(path)
        self._disk.sync_all(path)


class FollowerRig(Rig):
    """Its shards start once the follower has said how far their logs are."""

    def __init__(
        self, data_dir: str, shards: int, archive: Archive, clock: TestClock, tell: Tell, **settings: str
    ) -> None:
        self.archive = archive
        self.is_refused = False
        """True once it has the wrong number of shards."""
        self.helper: Executor = Inline()
        self.disk = PageCache()
        self.process_fs = ProcessFileSystem(self.disk)
        """The disk as the process of the follower sees it."""
        self._tell = tell
        self._leader_clock = clock
        fs = OsFileSystem()
        if read_note(fs, data_dir) is None:
            begin_anew(fs, data_dir, URL)
        super().__init__(data_dir, fs, shards, follow=URL, **settings)

    def make_clock(self) -> TestClock:
        return self._leader_clock

    def boot(self) -> None:
        self.shared.control.header.set("follows", 1)
        self.every = []
        self.follower_dies()

    def follower_dies(self) -> None:
        """Another process of the follower goes on."""
        settings = self.settings
        self.process_fs.bury()
        self.process_fs = fs = ProcessFileSystem(self.disk)
        self.shared.control.cell(Role.ARCHIVER, 0).begin_life(1, self.clock.now_ms(), ProcessState.READY)
        self.replica = Replica(self.archive, fs, settings.data_dir, settings.wal_shards, self.clock)
        leader = LeaderHere(self.clock, self._tell)
        self.follower = Follower(self.replica, fs, settings, self.shared, self.clock, leader, self.helper)

    def advance(self) -> None:
        """Take a step, and have the shards see it. The service starts again if it wants to."""
        self.follower.step()
        if self.follower.exit_code == EXIT_REFUSED:
            self.is_refused = True
            return
        if self.follower.exit_code is not None:
            assert self.follower.exit_code == EXIT_AGAIN
            self.restart_service()
            return
        control, numbers = self.shared.control, range(self.settings.wal_shards)
        if not all(map(control.readable, numbers)):
            return
        if not self.every:
            self.every = [self.recover(shard) for shard in numbers]
        for shard in numbers:
            if control.is_outdated(shard):
                self.every[shard] = self.recover(shard)
            self.every[shard].shard.copy()
            self.every[shard].shard.sweep()

    def lose_power(self) -> None:
        """The machine fails: what its disk does not have yet is lost."""
        self.disk.power_loss()
        self.restart_service()

    def shard_dies(self, shard: int) -> None:
        if self.every:
            self.every[shard] = self.recover(shard)

    @property
    def shown(self) -> tuple[int, int] | None:
        """The (generation, piece) of the moment that the shards show; None if it is not sure."""
        words = [end.word for end in self.replica.ends]
        if not words or not self.every or words != [self.shared.control.readable(shard) for shard in range(len(words))]:
            return None
        return self.replica.note.generation, self.replica.note.piece

    @property
    def state(self) -> tuple[object, ...]:
        """Another one once its shards may show something else: there is more in the logs, a shard or the process began
        again, or a call has changed the disk.
        """
        arenas = [self.shared.control.cell(Role.WALSHARD, shard).get("generation") for shard in range(len(self.every))]
        return self.replica, len(self.process_fs.log), self.shown, self.shown_words, tuple(arenas)

    @property
    def shown_words(self) -> tuple[int, ...]:
        """The ends of the logs at that moment."""
        return tuple([end.word for end in self.replica.ends])

    @property
    def noted_words(self) -> tuple[int, ...]:
        """The ends of the logs with which a start goes on."""
        note = read_note(self.fs, self.settings.data_dir)
        assert note is not None
        return tuple([end.position.word for end in note.ends])

    @property
    def leads(self) -> bool:
        note = read_note(self.fs, self.settings.data_dir)
        return note is not None and note.leads

    def end_promotion(self) -> None:
        """Do what a start does with a service that is about to lead. The rig is closed."""
        self.close()
        settled = take_role(self.fs, self.settings, self.clock)
        assert (settled.follow, settled.archive_url) == (None, URL)
        assert is_promotion_due(self.fs, settled.data_dir)
        finish_promotion(self.fs, settled.data_dir, self.clock)
        assert not is_promotion_due(self.fs, settled.data_dir)

    def _assert_counted(self, *_: object) -> None: ...  # the log of such a shard is another service's
