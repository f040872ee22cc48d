"""The work of the archiver: a moment each interval, and bases beside them so that a restore has few pieces to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from threading import Event
from typing import Final, NamedTuple

from topics.archive.base_files import BaseFiles
from topics.archive.inspection import prune
from topics.archive.ownership import OtherShipperError, TakenOverError
from topics.archive.shipping import PIECE_BYTES, NoMomentError, OldSnapshotError, Shipped, Shipper
from topics.core.clock import Clock, ExpiryClock, doubled_ms
from topics.log import get_logger
from topics.shm.control import ControlPage, Role, log_bytes
from topics.shm.ring import Wake
from topics.storage.archive_objects import Archive, ArchiveDamagedError
from topics.storage.filesystem import said
from topics.storage.logfile import RefusedLog
from topics.storage.origin import OriginGoneError

POLL_MS: Final = 100
SOON_MS: Final = 50
"""The least time between two moments that somebody waits for."""
GATHER_MS: Final = (10, 60)
"""The shortest and the longest pause after a moment: a quarter of its time. In the pause writers whom it answered can
write again. Without it their next writes would wait for the moment after the next one.
"""
SOON_POLL_MS: Final = 5
NO_MOMENT_MS: Final = 50
RETRY_MS: Final = (200, 10_000)
"""The shortest and the longest pause after a failure; it doubles with each."""
BASE_BYTES: Final = 256 << 20
"""Bytes of pieces behind a base that make the next one due: a restore reads so much more than it needs."""
BASE_PIECES: Final = 3600
BASE_MS: Final = 86_400_000
"""The age of a base that makes the next one due if anything was shipped since: what was deleted leaves the archive with
the last base that has it.
"""
BASE_RETRY_MS: Final = 60_000
"""The pause before another try of a base if a file of a segment cannot be read (each try reads the others again), or a
later snapshot is needed.
"""
PRUNE_MS: Final = 3_600_000
LEADER_SIGN_MS: Final = 2_000

log = get_logger()

_FAILURES: Final = (OSError, EOFError, RefusedLog, OtherShipperError, ArchiveDamagedError)
_NOT_SHIPPED: Final = "the archive cannot be written now, which will be repeated; the logs are kept"


class ArchiverPlan(NamedTuple):
    """The longest time between two moments, and the history that pruning leaves (0: all)."""

    interval_ms: int
    keep_ms: int
    gives_signs: bool = False
    """True if there is to be a moment every LEADER_SIGN_MS, for those who follow."""


class _BaseUnderway(NamedTuple):
    files: BaseFiles
    work: Future[None]


class Archiver:
    """Ships a running service. Owns the process's words in the control page, but for those that `stand_by` sets."""

    def __init__(
        self,
        archive: Archive,
        make_shipper: Callable[[], Shipper],
        page: ControlPage,
        shard_wakes: Sequence[Wake],
        plan: ArchiverPlan,
        clock: Clock,
        helpers: Executor,
    ) -> None:
        """`helpers` copies the files of a base, and prunes."""
        self._archive = archive
        self._make_shipper = make_shipper
        self._cell = page.cell(Role.ARCHIVER, 0)
        self._shards = [page.cell(Role.WALSHARD, shard) for shard in range(page.shards)]
        self._waiters = [page.cell(Role.FRONTEND, frontend) for frontend in range(page.frontends)]
        self._shard_wakes = shard_wakes
        self._plan = plan
        self._clock = clock
        # A clock that was put forward must not make pruning remove history, just as it makes no record expire.
        self._expiry = ExpiryClock(clock, log.warning, page.trusted_offset_ms(Role.WALSHARD, 0))
        self._helpers = helpers
        self._shipper: Shipper | None = None
        self._failures = 0
        self._underway: _BaseUnderway | None = None
        self._base_not_before_ms = self._prune_not_before_ms = 0
        self._based_ms = clock.monotonic_ms()
        """Monotonic time of the last base, or of the start: a base's own time is wrong if the clock was ahead then."""
        self._shipped_ms = 0
        """Monotonic time of the last piece."""
        self._counted = Shipped(0, 0, 0, 0)
        """The end of the archive as it was noted last."""
        self._bytes_behind_base = 0
        self._noted_bytes = 0
        """Bytes of the logs when the last moment was begun: what came meanwhile counts for the next one."""
        self._took_ms = 0
        self._told = ""

    def work(self, stop: Event) -> None:
        """Ship until `stop` is set, and then the last moment."""
        while True:
            is_last = stop.is_set()
            pause_ms = self.step()
            # The end is when a restore can get to what was shipped last, unless no base can be made now.
            shipper = self._shipper
            is_based = shipper is None or shipper.is_based or not (self._underway or self._is_base_due(shipper))
            if is_last and (pause_ms is not None or is_based):
                return
            if pause_ms is None:
                self._sleep(stop)
            else:
                stop.wait(pause_ms / 1000)

    def step(self) -> int | None:
        """Ship a moment, and take the next step of a base. Return the pause in ms before it is repeated, None if it
        succeeded.
        """
        cell = self._cell
        cell.set("moment_ms", min(cell.get("moment_ms"), self._clock.now_ms()))  # the clock may have been put back
        try:
            if self._shipper is None:
                self._shipper, self._counted = self._make_shipper(), Shipped(0, 0, 0, 0)
                self._shipper.begin()
            self._ship(self._shipper)
        except NoMomentError:
            pause_ms = NO_MOMENT_MS
        except _FAILURES as error:
            if isinstance(error, TakenOverError):
                cell.set("taken_over", 1)
            pause_ms = doubled_ms(RETRY_MS[0], self._failures, RETRY_MS[1])
            self._failures += 1
            self._tell(error)
            if self._shipper is not None and self._shipper.is_own and isinstance(error, OSError):
                with suppress(*_FAILURES):
                    self._prune(self._shipper)  # the archive's disk may be full
        else:
            self._failures, self._told = 0, ""
            return None
        self._shipper = None
        self._give_up_base()
        return pause_ms

    # -- moments

    def _ship(self, shipper: Shipper) -> None:
        """Ship a moment, and take the next step of a base."""
        began_ms, self._noted_bytes = self._clock.monotonic_ms(), self._log_bytes
        try:
            shipped = shipper.ship(self._plan.gives_signs and began_ms - self._shipped_ms >= LEADER_SIGN_MS)
        except OriginGoneError as gone:
            if shipper.last_base is not None:
                self._cell.add("holes")
                log.error("logs were removed before they were in the archive, which begins anew", reason=str(gone))
            shipped = self._counted
        self._took_ms = self._clock.monotonic_ms() - began_ms
        self._note(shipper, shipped)
        self._tend_base(shipper)
        self._prune(shipper)

    def _note(self, shipper: Shipper, shipped: Shipped) -> None:
        """Show how far the archive is, once a restore can get there."""
        cell, counted = self._cell, self._counted
        cell.add("objects", shipped.objects - counted.objects)
        cell.add("bytes", shipped.size_bytes - counted.size_bytes)
        self._bytes_behind_base += shipped.size_bytes - counted.size_bytes
        self._counted = shipped
        if shipped.piece != counted.piece:
            self._shipped_ms = self._clock.monotonic_ms()
        if not shipper.is_based:
            return
        if shipped.piece != counted.piece:
            cell.add("moments")
        cell.set("moment_ms", min(shipped.taken_ms, self._clock.now_ms()))  # times of moments never go back
        for shard, end in enumerate(shipper.ends):
            if cell.get(f"shipped_{shard:02d}") != end.word:
                cell.set(f"shipped_{shard:02d}", end.word)
                self._shard_wakes[shard].signal()

    def _sleep(self, stop: Event) -> None:
        """Wait until the next step is due: after the interval, once there is a piece to ship or a base to end, or soon
        if somebody waits for the archive.
        """
        began_ms = self._clock.monotonic_ms()
        soon_ms = max(SOON_MS - self._took_ms, min(GATHER_MS[1], max(GATHER_MS[0], self._took_ms // 4)))
        poll_ms = SOON_POLL_MS if any(cell.get("topics_archived") for cell in self._shards) else POLL_MS
        while (left_ms := began_ms + self._plan.interval_ms - self._clock.monotonic_ms()) > 0:
            is_soon = self._plan.interval_ms - left_ms >= soon_ms
            if is_soon and any(cell.get("archive_waits") for cell in self._waiters):
                return
            step_s = min(left_ms, poll_ms) / 1000
            if self._log_bytes - self._noted_bytes > PIECE_BYTES:
                return
            if self._underway is not None:
                if wait([self._underway.work], step_s).done or stop.is_set():
                    return
            elif stop.wait(step_s):
                return

    @property
    def _log_bytes(self) -> int:
        return sum(map(log_bytes, self._shards))

    # -- bases

    def _tend_base(self, shipper: Shipper) -> None:
        """Begin a base that is due, or end the one whose files are copied."""
        if self._underway is None:
            if self._is_base_due(shipper):
                try:
                    files = shipper.begin_base()
                    self._underway = _BaseUnderway(files, self._helpers.submit(files.copy))
                except OldSnapshotError:
                    self._base_not_before_ms = self._clock.monotonic_ms() + BASE_RETRY_MS
                except OriginGoneError:
                    pass  # a newer snapshot has taken its place: next time
            return
        files, work = self._underway
        if not work.done():
            return
        self._underway = None
        if isinstance(error := work.exception(), Exception) and files.has_unread:
            self._base_not_before_ms = self._clock.monotonic_ms() + BASE_RETRY_MS
            so = "moments are shipped" if shipper.is_based else "nothing new can be restored until then"
            self._tell(error, f"no base can be made now, which will be repeated; {so}")
            return
        try:
            work.result()
            shipped = shipper.end_base(files)
        except OriginGoneError:
            return  # segments were removed meanwhile: the next snapshot does without them
        self._cell.add("bases")
        self._cell.set("base_ms", shipped.taken_ms)
        self._note(shipper, shipped)
        self._bytes_behind_base, self._based_ms = 0, self._clock.monotonic_ms()

    def _is_base_due(self, shipper: Shipper) -> bool:
        if self._clock.monotonic_ms() < self._base_not_before_ms:
            return False
        base = shipper.last_base
        if base is None or shipper.lacks_base:
            return True
        pieces = self._counted.piece - base.number
        age_ms = max(self._clock.now_ms() - base.taken_ms, self._clock.monotonic_ms() - self._based_ms)
        is_old = pieces > 0 and age_ms >= BASE_MS
        return is_old or self._bytes_behind_base >= BASE_BYTES or pieces >= BASE_PIECES

    def _give_up_base(self) -> None:
        if self._underway is not None:
            self._underway.files.give_up()
            self._underway = None

    def _prune(self, shipper: Shipper) -> None:
        """Once in PRUNE_MS, have a helper look at the newest base, and remove what only moments older than `keep_ms`
        need.
        """
        now_ms, trusted_ms = self._clock.monotonic_ms(), self._expiry.now_ms()
        if now_ms < self._prune_not_before_ms or self._underway is not None:
            return
        shipper.require_end()  # a service that was taken over from must not prune
        self._prune_not_before_ms = now_ms + PRUNE_MS
        self._helpers.submit(self._prune_before, shipper, trusted_ms - self._plan.keep_ms)

    def _prune_before(self, shipper: Shipper, before_ms: int) -> None:
        try:
            shipper.look_at_base()
            if not self._plan.keep_ms:
                return
            removed = prune(self._archive, before_ms)
        except (OSError, ArchiveDamagedError) as error:
            self._tell(error, "the archive cannot be pruned now, which will be repeated")
            return
        log.info("pruned the archive", **{kind: getattr(removed, kind) for kind in removed.__struct_fields__})
        if removed.damaged:
            damage = ArchiveDamagedError("; ".join(removed.damaged))
            self._tell(damage, "the archive is damaged; all that can be judged without these objects was pruned")

    # -- failures

    def _tell(self, error: Exception, what: str = _NOT_SHIPPED) -> None:
        """Count a failure, and log it unless it is the same again."""
        self._cell.add("failures")
        if said(error) != self._told:
            self._told = said(error)
            log.error(what, reason=self._told)
