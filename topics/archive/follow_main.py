"""The process of a follower that takes what the leader ships, in the place of an archiver.

It writes the follower's logs, segments and snapshots; the shards read them as far as the control page says. SIGUSR1
(`topics-supervisor promote`) has it take over from the leader, SIGUSR2 (`promote --cancel`) withdraws that. A thread
does the work, since a request to a bucket may hang.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from topics.archive.archiver import LEADER_SIGN_MS
from topics.archive.leader_tail import LeaderAwayError, LeaderTail
from topics.archive.main import REQUEST_MS, STOP, stand_by
from topics.archive.promoting import begin_promotion, promote, require_history
from topics.archive.replica import BeginAnewError, OtherShardsError, Replica, begin_anew
from topics.core.clock import Clock, SystemClock, doubled_ms
from topics.log import get_logger
from topics.settings import Settings
from topics.shm.control import EXIT_AGAIN, EXIT_REFUSED, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage import kill_points
from topics.storage.archive_objects import Archive, ArchiveDamagedError, Piece, open_archive
from topics.storage.filesystem import FileSystem, OsFileSystem, said
from topics.storage.follow_note import read_note
from topics.storage.pins import pins_dir, read_pinned

LOOK_MS: Final = 10_000
"""Interval of looks for a new base."""
RETRY_MS: Final = (200, 10_000)
TOLD_S: Final = 0.025
"""Pause after each answer of the leader, which bounds the cost of asking."""

log = get_logger()

_FOLLOWING: Final = "the archive cannot be followed now"
_PROMOTING: Final = (
    "this service cannot take over: put the object back from a copy, or restore an earlier moment (docs/archive.md)"
)
_FAILURES: Final = (OSError, EOFError, ArchiveDamagedError)


class Follower:
    """The work of the process. Owns the process's words in the control page, but for those that `stand_by` sets."""

    def __init__(
        self,
        replica: Replica,
        fs: FileSystem,
        settings: Settings,
        shared: SharedMemory,
        clock: Clock,
        leader: LeaderTail,
        helper: Executor,
    ) -> None:
        """`helper` looks at the archive, and fetches data from it, while this thread listens to the leader."""
        self._replica = replica
        self._fs = fs
        self._settings = settings
        page = shared.control
        self._cell = page.cell(Role.ARCHIVER, 0)
        self._shards = [page.cell(Role.WALSHARD, shard) for shard in range(page.shards)]
        self._wakes = shared.shard_wakes
        self._pins_dir = pins_dir(shared.ram_dir)
        self._clock = clock
        self._leader = leader
        self._helper = helper
        self._newest: Future[Piece | None] | None = None
        """The helper's search for the newest piece of the archive; None if none is under way."""
        self._skim_not_before_ms = 0
        self._tells = False
        """True while the leader itself tells what it commits."""
        self._has_begun = False
        self._failures = 0
        self._told: dict[str, str] = {}
        """The last reasons that were logged, by what cannot be done."""
        self._told_of_leader = ""
        self._look_not_before_ms = 0
        self._sign_by_ms = 0
        """Monotonic time at which the leader counts as gone unless it gives a sign."""
        self.exit_code: int | None = None
        self._beginning = threading.RLock()
        """Held while a promotion is asked for, withdrawn or begun. A handler of a signal may interrupt another one."""

    def ask_promotion(self) -> None:
        """Take over from the leader as soon as the archive is there. Another thread may call this."""
        with self._beginning:
            if not self._cell.get("promotion_ms"):
                self._cell.set("promotion_ms", self._clock.now_ms())

    def withdraw_promotion(self) -> None:
        """Do not take over, unless that has begun. Another thread may call this."""
        with self._beginning:
            if self._cell.get("promotion_ms") and not self._cell.get("promotion_begun"):
                self._cell.set("promotion_ms", 0)
                self._has_sign()  # the leader was not asked meanwhile

    def _begin_promotion(self, is_gone: bool = False) -> bool:
        """Begin to take over, if a command asks for that or the leader is gone. False without an effect if neither."""
        with self._beginning:
            is_asked = self._cell.get("promotion_ms") > 0
            is_gone = is_gone and self._clock.monotonic_ms() >= self._sign_by_ms  # unless one was withdrawn meanwhile
            if not is_gone and not is_asked:
                return False
            try:
                begin_promotion(self._replica)
            finally:
                note = read_note(self._fs, self._settings.data_dir)
                if note is not None and note.fence_id:  # also a note whose writing failed may be there
                    self._show_promotion()
                    if not is_asked:
                        after_ms = self._settings.takeover_after_ms
                        log.error("the leader has given no sign: this service takes over", after_ms=after_ms)
            return True

    def _show_promotion(self) -> None:
        """Show that a promotion is under way, which nobody can withdraw."""
        if not self._cell.get("promotion_begun"):
            self._cell.set_all({"promotion_ms": self._clock.now_ms(), "promotion_begun": 1})

    def work(self, stop: threading.Event) -> None:
        """Follow until `stop` is set or `exit_code` says how the process has to end."""
        poll_s = min(self._settings.archive_interval_ms, 500) / 1000
        while not stop.is_set() and self.exit_code is None:
            stop.wait(self.step() or (TOLD_S if self._tells else poll_s))

    def step(self) -> float:
        """Take what is new. Return the pause in s before it is repeated after a failure, else 0."""
        cell, replica, now_ms = self._cell, self._replica, self._clock.now_ms()
        replica.looked_ms = min(replica.looked_ms, now_ms)  # the clock may have been put back
        cell.set("moment_ms", min(cell.get("moment_ms"), now_ms))
        is_first = not self._has_begun
        try:
            if is_first:
                note = read_note(self._fs, self._settings.data_dir)
                assert note is not None
                if note.fence_id:  # begun in a former life
                    self._show_promotion()
                if self._replica.begin(note):
                    log.info("the service is copied; it starts", generation=self._replica.note.generation)
                    self.exit_code = EXIT_AGAIN
                    return 0
                if any(self._cell.get(f"readable_{end.shard:02d}") > end.position.word for end in note.ends):
                    log.info("the shards have read what the leader told: they begin again at the last moment noted")
                    self.exit_code = EXIT_AGAIN
                    return 0
                self._has_begun = True
                self._has_sign()
                if not self._cell.get("bases"):
                    self._load()
                self._show()  # what is here is served while the archive cannot be read
                self._look()  # first: the leader is asked for what is behind all bytes of the archive
            has_news = self._listen()
            if not is_first:
                has_news |= self._skim() if self._tells else self._look()
            self._show()
            is_gone = self._is_leader_gone(has_news)  # asked before the rest, which may take longer than a sign may
            self._fetch()
            if self._clock.monotonic_ms() >= self._look_not_before_ms and not cell.get("promotion_ms"):
                self._look_not_before_ms = self._clock.monotonic_ms() + LOOK_MS
                with self._uncounted():
                    self._tend_base()
            if is_gone or cell.get("promotion_ms"):
                require_history(replica)
                if self._begin_promotion(is_gone):
                    promote(replica, self._clock, socket.gethostname())
                    log.info("this service leads from now on; it starts again", url=replica.note.url)
                    self.exit_code = EXIT_AGAIN
        except BeginAnewError as error:
            log.error("following begins anew: everything is copied again", reason=str(error))
            begin_anew(self._fs, self._settings.data_dir, self._replica.note.url, self._replica.note)
            self.exit_code = EXIT_AGAIN
        except OtherShardsError as error:
            log.error("cannot follow", reason=str(error))
            self.exit_code = EXIT_REFUSED
        except _FAILURES as error:
            is_blocked = isinstance(error, ArchiveDamagedError)
            if is_blocked:
                cell.set("takeover_blocked", 1)
            is_wanted = bool(self._replica.note.fence_id) or self._is_leader_gone(False)
            self._fail(_PROMOTING if is_blocked and is_wanted else _FOLLOWING, error)
            pause_ms = doubled_ms(RETRY_MS[0], self._failures, RETRY_MS[1])
            self._failures += 1
            return pause_ms / 1000
        else:
            self._failures = 0
            self._told.pop(_PROMOTING, None)
            if not self._tells:  # else a step does without the archive, and `_skim` finds it well
                self._told.pop(_FOLLOWING, None)
            cell.set("takeover_blocked", 0)
        return 0

    def _fail(self, what: str, error: Exception) -> None:
        """Count a failure, and log it unless it is the same again."""
        self._cell.add("failures")
        if said(error) != self._told.get(what):
            self._told[what] = said(error)
            log.error(f"{what}, which will be repeated", reason=said(error))

    def _listen(self) -> bool:
        """Ask the leader, if it can be asked. True if it has answered: it lives."""
        note = self._replica.note
        if self._replica.is_over:
            self._tells = False  # it would tell of the next generation
        is_heard = not self._cell.get("promotion_ms") and not self._replica.is_over
        if not is_heard or not self._leader.is_due(note.leader_url):
            return False
        told, asked_ms = self._tells, self._clock.now_ms()
        try:
            piece, payload = self._leader.ask(self._replica.laid_ends)
            self._tells = self._replica.take_tail(piece, payload, asked_ms)
        except LeaderAwayError as error:
            self._tells = False
            if told or str(error) != self._told_of_leader:
                self._told_of_leader = str(error)
                log.warning("the leader tells nothing now: the archive is followed", reason=str(error))
            return False
        if self._tells and not told:
            self._told_of_leader = ""
            log.info("the leader tells what it commits", url=note.leader_url)
        return True

    def _skim(self) -> bool:
        """Pass over new pieces of the archive that the leader has told already. True if there was a new one."""
        if self._newest is None:
            if self._clock.monotonic_ms() >= self._skim_not_before_ms:
                self._newest = self._helper.submit(self._replica.newest_piece)
            return False
        if not self._newest.done():
            return False
        found, self._newest = self._newest, None
        self._skim_not_before_ms = self._clock.monotonic_ms() + self._settings.archive_interval_ms
        try:
            piece = found.result()
        except _FAILURES as error:
            self._fail(_FOLLOWING, error)  # the leader goes on telling
            return False
        self._told.pop(_FOLLOWING, None)
        if piece is None:
            return False
        if self._replica.skip_to(piece):
            self._cell.add("moments")
            return True
        return self._look()

    def _look(self) -> bool:
        """Take what is new in the archive. True if there was something."""
        self._newest, moment = None, self._replica.note.piece
        try:
            with self._uncounted():
                self._replica.step()
        except _FAILURES as error:
            if self._replica.has_grown or not isinstance(error, ArchiveDamagedError):
                self._has_sign()  # the leader lives, or may not reach the archive either
            if isinstance(error, ArchiveDamagedError):  # a base may be behind the damage
                self._begin_promotion()
                with self._uncounted():
                    self._tend_base()
            raise
        if self._replica.note.piece != moment:
            self._cell.add("moments")
        return self._replica.has_grown

    def _show(self) -> None:
        """Show the shards how far they may read their logs, and everybody how old that state may be."""
        replica, cell = self._replica, self._cell
        # `taken_ms` is by the leader's clock.
        cell.set("moment_ms", replica.looked_ms or min(replica.note.taken_ms, self._clock.now_ms()))
        for shard, (end, archived) in enumerate(zip(replica.ends, replica.archived_ends, strict=True)):
            words = {f"readable_{shard:02d}": end.word, f"shipped_{shard:02d}": archived.word}
            if any(cell.get(name) != word for name, word in words.items()):
                cell.set_all(words)
                self._wakes[shard].signal_always()

    def _fetch(self) -> None:
        """Fetch data that are still in the archive, and say how much is left."""
        homecoming, cell = self._replica.homecoming, self._cell
        if (error := homecoming.step(self._helper)) is not None:
            self._fail("data are still read in the archive: they cannot be fetched now", error)
        if cell.get("segments_borrowed") != len(homecoming.missing):
            cell.set("segments_borrowed", len(homecoming.missing))
            cell.set("borrowed_bytes", homecoming.missing_bytes)

    def _is_leader_gone(self, has_news: bool) -> bool:
        """Return whether a leader that gives signs of life has given none for `takeover_after_ms`. Each new piece is a
        sign, also a piece of the next generation.
        """
        if has_news or self._cell.get("promotion_ms"):  # while a promotion waits, the leader is not asked
            self._has_sign()
        gives_signs = self._settings.takeover_after_ms and self._replica.note.leader_url
        return bool(gives_signs) and self._clock.monotonic_ms() >= self._sign_by_ms

    def _has_sign(self) -> None:
        self._sign_by_ms = self._clock.monotonic_ms() + self._settings.takeover_after_ms

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Use the archive inside the block. A long wait for it is no silence: the leader may have to wait, too."""
        began_ms = self._clock.monotonic_ms()
        try:
            yield
        finally:
            took_ms = self._clock.monotonic_ms() - began_ms
            if took_ms >= LEADER_SIGN_MS:
                with self._beginning:  # a withdrawal sets it, too
                    self._sign_by_ms += took_ms

    def _load(self) -> None:
        """Have the shards load the present base."""
        self._cell.add("bases")
        for wake in self._wakes:
            wake.signal_always()

    def _tend_base(self) -> None:
        if any(cell.get("bases_loaded") < self._cell.get("bases") for cell in self._shards):
            return  # they still read files of the former base
        if not read_pinned(self._fs, self._pins_dir, self._clock.monotonic_ms()):
            self._replica.remove_leftovers()
        try:
            if self._replica.homecoming.come_home():
                self._load()
                return
        except OSError as error:
            self._fail("the loan of what was borrowed cannot be ended now", error)
        try:
            if self._replica.look_for_base():
                self._cell.set("base_ms", self._clock.now_ms())
                self._load()
        except ArchiveDamagedError as error:
            self._fail("the newest base cannot be taken: moments are taken as far as they go on", error)


def run(settings: Settings, shared: SharedMemory, incarnation: int) -> int:
    """Run the process. Return EXIT_AGAIN when all processes of the service have to start again, with another role or
    directory, and EXIT_REFUSED when it cannot follow.
    """
    assert settings.follow is not None
    kill_points.arm_as_told(settings.test_kill_at, incarnation)
    clock, fs = SystemClock(), OsFileSystem()
    cell = shared.control.cell(Role.ARCHIVER, 0)
    cell.begin_life(incarnation, clock.now_ms(), ProcessState.STARTING)
    note = read_note(fs, settings.data_dir)
    archive = Archive(open_archive(fs, settings.follow, REQUEST_MS, new=note is None or not note.piece))
    replica = Replica(archive, fs, settings.data_dir, settings.wal_shards, clock)
    helper = ThreadPoolExecutor(2, "archive")
    follower = Follower(replica, fs, settings, shared, clock, LeaderTail(settings.follow_key, clock), helper)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    signal.signal(signal.SIGUSR1, lambda _number, _frame: follower.ask_promotion())
    signal.signal(signal.SIGUSR2, lambda _number, _frame: follower.withdraw_promotion())
    return stand_by(cell, clock, follower.work, helper, code=lambda: follower.exit_code)
