"""The control page: figures of every process of a service. Anyone can read them without asking a process.

    +----------+----------+----------+-- … --+----------+
    | header   | cell     | cell     |       | cell     |      CELL_WORDS u64 words each
    +----------+----------+----------+-- … --+----------+
      supervisor frontend 0..M-1, walshard 0..N-1, compactor, archiver (if there is one)

The supervisor writes the first SUPERVISOR_WORDS words of a cell, and the process itself writes the rest. So each word
has one writer, and `status` works while a child is dead or recovering.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Final

from topics import __version__
from topics.core.config import CLASSES
from topics.core.errors import TopicsError
from topics.core.scheduler import BANDS
from topics.shm.memory import SharedObject

CELL_WORDS: Final = 192
SHARDS_MAX: Final = 64
HEARTBEAT_MS: Final = 250
"""The time between two signs of life that a process gives in its cell."""
SUPERVISOR_WORDS: Final = 16
MAGIC: Final = 0x31535049434F5454  # "TTOCIPS1"
VERSION: Final = 12

EXIT_NEXT_LIFE: Final = 74
"""Exit code of a process that wants to be started again at once: nothing is wrong with it."""
EXIT_AGAIN: Final = 75
"""Exit code of a process that wants all processes of the service to start again."""
EXIT_REFUSED: Final = 78
"""Exit code of a child that must not be restarted: a human has to decide about its data (the log says where)."""


class Role(IntEnum):
    FRONTEND = 1
    WALSHARD = 2
    COMPACTOR = 3
    ARCHIVER = 4


BESIDE: Final = frozenset({Role.COMPACTOR, Role.ARCHIVER})
"""Roles for whose processes no client waits."""


class ProcessState(IntEnum):
    NONE = 0
    STARTING = 1
    RECOVERING = 2
    READY = 3
    DRAINING = 4
    STOPPED = 5
    DEAD = 6
    DEGRADED = 7


HEARTBEAT_STALE_MS: Final = 5_000
"""A ready process without a heartbeat for longer than this hangs."""

LATENCY_BUCKETS: Final = 24
"""Bucket i counts latencies of at most 2^(i+3) µs that fit no earlier one: 8 µs … 34 s; the last one all longer."""
MOMENT_TRIES_MAX: Final = 200


def _fields(words: str) -> tuple[str, ...]:
    return tuple(words.replace("*", "").split())


def _series(form: str, names: Iterable[object]) -> str:
    return " ".join(form.format(name) for name in names)


HEADER_FIELDS: Final = _fields(
    "magic version supervisor_pid state started_ms shards frontends archivers port reshard_ppm keys_serial reloads"
    " write_path clock_offset_ms follows heartbeat_ms"
)
SUPERVISOR_FIELDS: Final = _fields("pid state restarts last_exit since_ms ended")
"""`ended`: the last incarnation that is over, 0 for none."""
_COMMON: Final = "pid state incarnation started_ms heartbeat_ms progress_ppm pressure_ppm busy_ppm deferring"
_WORDS: Final = {
    Role.FRONTEND: f"""{_COMMON}
        connections sse_connections sse_admitted connections_admitted ws_connections work_streams
        requests* responses_4xx* responses_5xx* records_in* records_out* sse_frames* long_polls ring_full* throttled*
        keys_serial ready_topics {_series("ready_band_{}", range(BANDS))} scheduling_us loop_lag_us coalesce_us
        archive_waits clock_offset_ms*""",
    Role.WALSHARD: f"""{_COMMON}
        generation* topics* {_series("topics_{}*", CLASSES)} queue_topics* leases_in_flight* records_live* bytes_live*
        wal_file wal_offset committed* lost_tails* wal_read_only wal_frames* wal_batches* wal_fsyncs* wal_bytes_written*
        wal_bytes_found* wal_rotations* wal_unsynced_bytes queue_depth queue_depth_peak commit_window_us brake_ppm
        write_errors*
        sessions* routers* router_copies* router_lag_records torn_bytes arena_bytes
        fsync_us_sum* {_series("fsync_us_{:02d}*", range(LATENCY_BUCKETS))} router_oversize* clock_offset_ms*
        bases_loaded*""",
    Role.COMPACTOR: f"""{_COMMON}
        absorbed_ms* last_snapshot_ms* snapshots* checkpoints* checkpointed_records* checkpointed_bytes*
        segments_sealed* segments_dropped* segments_rewritten* segments_relocated* orphans failures* snapshot_bytes*
        segments_borrowed* borrowed_bytes*
        {_series("absorbed_bytes_{:02d}*", range(SHARDS_MAX))}""",
    Role.ARCHIVER: f"""{_COMMON}
        moment_ms* moments* objects* bytes* bases* base_ms* failures* holes* taken_over* segments_borrowed
        borrowed_bytes promotion_ms promotion_begun takeover_blocked
        {_series("shipped_{:02d}*", range(SHARDS_MAX))} {_series("readable_{:02d}*", range(SHARDS_MAX))}""",
}
"""The words of each child. A new life of the process keeps the words with a `*`. So counters never go down while the
service runs, readers use the former arena `generation` until there is a new one, and the topics, records, sessions … of
a shard count against the quotas of the service even while the shard is down.

Shard: `committed` is file_no << 32 | offset behind the last frame that is in the log for good, 0 before the first
recovery. It is one word, so that nobody combines the file of one position with the offset of another. `lost_tails`
counts topics that have lost their last records while the log does not say so yet. Both words are kept over lives: the
supervisor reads them after the whole service was killed, perhaps while the shard recovered. `wal_bytes_found` are the
bytes of its log behind the newest snapshot when the service started.

Compactor: `absorbed_bytes_NN` is the `log_bytes()` of a shard at the begin of its last snapshot, and `absorbed_ms` the
time of that. The bytes written since are the lag, which also grows while the compactor is dead.

Archiver: `shipped_NN` is the `committed` of a shard at the last moment in the archive, 0 before the first moment in the
life of the service. `moment_ms` is the time of that moment. `holes` counts how often logs were removed before they were
shipped. In a follower, `readable_NN` is the `committed` up to which a shard may read its log; the archive may not have
all of it yet. There `moment_ms` is a time at which the leader had the state that the logs have. `bases` counts the
snapshots that the shards have to load; a shard notes the current count in `bases_loaded` when it loads one.
`promotion_ms` is the time at which a promotion was asked for, 0 if none is wanted. Once one has begun, by a command or
because the leader is gone, it is the time of that, `promotion_begun` is 1, and nobody can withdraw it.
`takeover_blocked` is 1 while a damaged object of the archive keeps a follower from getting to the end of it.

`clock_offset_ms` is the wall time minus the monotonic time that the process trusts (`core/clock.py`), 0 before it
looked. CLOCK_BIAS is added, because words are unsigned and a clock that was never set is behind the uptime. In the
header it is the offset that the previous service trusted, 0 to trust the clock.
"""
CLOCK_BIAS: Final = 1 << 63
CHILD_FIELDS: Final = {role: _fields(words) for role, words in _WORDS.items()}
KEPT_FIELDS: Final = {
    role: frozenset(word[:-1] for word in words.split() if word.endswith("*")) for role, words in _WORDS.items()
}
"""The words that a new life of a process keeps."""


class Cell:
    """Named u64 words in shared memory. Only their one writer calls `set` and `add`."""

    def __init__(self, words: memoryview, fields: tuple[str, ...]) -> None:
        assert len(fields) <= len(words)
        self._words = words
        self._index = {field: index for index, field in enumerate(fields)}

    def set(self, field: str, value: int) -> None:
        self._words[self._index[field]] = value

    def set_all(self, values: Mapping[str, int]) -> None:
        """Set several words, in the order of `values`."""
        words, index = self._words, self._index
        for field, value in values.items():
            words[index[field]] = value

    def add(self, field: str, amount: int = 1) -> None:
        self._words[self._index[field]] += amount

    def get(self, field: str) -> int:
        value: int = self._words[self._index[field]]
        return value

    def read(self) -> dict[str, int]:
        return dict(zip(self._index, self._words.tolist(), strict=False))

    @property
    def clock_offset_ms(self) -> int | None:
        """Wall minus monotonic time as the process or its former life trusts it; None before it looked."""
        word = self.get("clock_offset_ms")
        return word - CLOCK_BIAS if word else None

    @clock_offset_ms.setter
    def clock_offset_ms(self, offset_ms: int) -> None:
        self.set("clock_offset_ms", offset_ms + CLOCK_BIAS)

    def clear(self, keep: Collection[str] = ()) -> None:
        """Set all words but those to `keep` to 0."""
        kept = {self._index[field] for field in keep}
        for index in range(len(self._words)):
            if index not in kept:
                self._words[index] = 0


class ProcessCell(Cell):
    """The words of one process; `supervisor` has the words that the supervisor writes about it."""

    def __init__(self, words: memoryview, role: Role) -> None:
        super().__init__(words[SUPERVISOR_WORDS:], CHILD_FIELDS[role])
        self.supervisor = Cell(words[:SUPERVISOR_WORDS], SUPERVISOR_FIELDS)
        self._role = role

    def begin_life(self, incarnation: int, now_ms: int, state: ProcessState) -> None:
        """Make this process the writer of the cell; clear the words that are not kept over lives."""
        self.clear(KEPT_FIELDS[self._role])
        self.set("incarnation", incarnation)
        self.set("pid", os.getpid())
        self.set("started_ms", now_ms)
        self.set("heartbeat_ms", now_ms)
        self.set("state", state)

    @property
    def present_state(self) -> ProcessState:
        """The state of the process. One that the process wrote itself counts only if its present life wrote it."""
        pid = self.supervisor.get("pid")
        if not pid:
            return ProcessState(self.supervisor.get("state"))
        own = ProcessState(self.get("state")) if self.get("pid") == pid else ProcessState.NONE
        return own or ProcessState.STARTING


def log_bytes(shard: Cell) -> int:
    """Return the bytes of a shard's log since the snapshot with which the service started. It only grows."""
    return shard.get("wal_bytes_found") + shard.get("wal_bytes_written")


def latency_bucket(latency_us: int) -> int:
    """Return the bucket that counts this latency."""
    return min(LATENCY_BUCKETS - 1, max(0, (latency_us - 1).bit_length() - 3))


def latency_quantile_us(cell: dict[str, int], quantile: float) -> int | None:
    """Return the upper bound of the bucket that holds the quantile, None before the first sample."""
    counts = [cell[f"fsync_us_{bucket:02d}"] for bucket in range(LATENCY_BUCKETS)]
    rank = sum(counts) * quantile
    for bucket, count in enumerate(counts):
        rank -= count
        if count and rank <= 0:
            return 1 << (bucket + 3)
    return None


def replay_progress(shards: Sequence[Cell]) -> float:
    """Return the share of all logs that has been read, 0 to 1. A shard that was ready once counts as read."""
    ppm = sum(1_000_000 if cell.get("generation") else cell.get("progress_ppm") for cell in shards)
    return ppm / len(shards) / 1_000_000


def not_ready(shards: Sequence[Cell], message: str = "the log is still being replayed") -> TopicsError:
    """Return the error of a request that needs one of these shards before it has read its log."""
    return TopicsError("not_ready", message, {"replay_progress": replay_progress(shards)})


class ControlPage:
    """The mapped control page of one service."""

    def __init__(self, shared: SharedObject, shards: int, frontends: int, archivers: int) -> None:
        self.shards = shards
        self.frontends = frontends
        self.has_archiver = archivers > 0
        words = shared.words
        self.header = Cell(words[:CELL_WORDS], HEADER_FIELDS)
        roles = [(Role.FRONTEND, i) for i in range(frontends)] + [(Role.WALSHARD, i) for i in range(shards)]
        roles += [(Role.COMPACTOR, 0)] + [(Role.ARCHIVER, 0)] * archivers
        self._cells = {
            key: ProcessCell(words[CELL_WORDS * (1 + at) : CELL_WORDS * (2 + at)], key[0])
            for at, key in enumerate(roles)
        }

    @property
    def cells(self) -> dict[tuple[Role, int], ProcessCell]:
        """The cells of all processes, in the order of the page. A service that follows another one cuts nothing."""
        skipped = Role.COMPACTOR if self.follows else None
        return {key: cell for key, cell in self._cells.items() if key[0] is not skipped}

    def all_use_newest_keys(self) -> bool:
        """True if every frontend uses the newest keys. A frontend that does not run will start with them."""
        serial, silent = self.header.get("keys_serial"), (ProcessState.NONE, ProcessState.DEAD, ProcessState.STOPPED)
        cells = [self.cell(Role.FRONTEND, index) for index in range(self.frontends)]
        return all(cell.get("keys_serial") >= serial or cell.supervisor.get("state") in silent for cell in cells)

    @staticmethod
    def size_bytes(shards: int, frontends: int) -> int:
        return CELL_WORDS * 8 * (3 + shards + frontends)

    @classmethod
    def create(cls, name: str, shards: int, frontends: int, archivers: int = 0) -> ControlPage:
        page = cls(SharedObject.create(name, cls.size_bytes(shards, frontends)), shards, frontends, archivers)
        page.header.set("version", VERSION)
        page.header.set("shards", shards)
        page.header.set("frontends", frontends)
        page.header.set("archivers", archivers)
        page.header.set("magic", MAGIC)
        return page

    @classmethod
    def attach(cls, name: str) -> ControlPage:
        """Map the page of a running service. FileNotFoundError: there is none yet; OSError: one of another release."""
        shared = SharedObject.attach(name)
        header = Cell(shared.words[:CELL_WORDS], HEADER_FIELDS)
        if not header.get("magic"):
            raise FileNotFoundError(f"shared memory {name} is not ready yet")
        version = header.get("version")
        if header.get("magic") != MAGIC or version != VERSION:
            versions = f"its shared memory has version {version}, topics {__version__} knows {VERSION}"
            raise OSError(f"the service is of another release ({versions}): use its commands, or restart it")
        return cls(shared, header.get("shards"), header.get("frontends"), header.get("archivers"))

    def cell(self, role: Role, index: int) -> ProcessCell:
        return self._cells[role, index]

    def trusted_offset_ms(self, role: Role, index: int) -> int | None:
        """Return the offset with which a new life of the process compares its clock; None if there is none."""
        offset_ms = self.cell(role, index).clock_offset_ms
        return self.header.clock_offset_ms if offset_ms is None else offset_ms

    def pressure(self) -> float:
        """Return the service's pressure, 0 to 1: the greatest of all running processes."""
        return max(cell.get("pressure_ppm") if cell.supervisor.get("pid") else 0 for cell in self._cells.values()) / 1e6

    def lag_bytes(self, shard: int) -> int:
        """Return the bytes of a shard's log that are in no snapshot."""
        absorbed = self.cell(Role.COMPACTOR, 0).get(f"absorbed_bytes_{shard:02d}")
        return max(0, log_bytes(self.cell(Role.WALSHARD, shard)) - absorbed)

    def moment_ends(self) -> list[int] | None:
        """Return the values that `committed` had in all shards at one time; None if nobody can tell now.

        A shard notes its end before anybody sees what it wrote. So if two readings in a row are the same, no log has an
        effect whose cause another log lacks. Return None also while a shard has lost its tail and not logged that yet:
        a copy of its log would look as if nothing were lost.
        """
        cells = [self.cell(Role.WALSHARD, shard) for shard in range(self.shards)]
        words = [cell.get("committed") for cell in cells]
        for _ in range(MOMENT_TRIES_MAX):
            before, words = words, [cell.get("committed") for cell in cells]
            if before == words:
                is_moment = all(words) and not any(
                    cell.get("state") == ProcessState.RECOVERING or cell.get("lost_tails") for cell in cells
                )
                return words if is_moment else None
        return None

    def shipped(self, shard: int) -> int:
        """Return the `committed` up to which the archive has the log of a shard; 0 if that is not known."""
        return self.cell(Role.ARCHIVER, 0).get(f"shipped_{shard:02d}")

    def readable(self, shard: int) -> int:
        """Return the `committed` up to which a shard of a follower may read its log; 0 if that is not known yet."""
        return self.cell(Role.ARCHIVER, 0).get(f"readable_{shard:02d}")

    @property
    def is_taken_over(self) -> bool:
        """True if another service took over from this one: it has closed this service's generation in the archive."""
        return self.has_archiver and self.cell(Role.ARCHIVER, 0).get("taken_over") > 0

    @property
    def follows(self) -> bool:
        """True if this service is a copy of another one."""
        return self.header.get("follows") > 0

    def name_of(self, role: Role) -> str:
        """Return the name of a process for people. The archiver of a service that follows another is its "follower"."""
        return "follower" if role is Role.ARCHIVER and self.follows else role.name.lower()

    @property
    def bases(self) -> int:
        """The number of snapshots that the shards of a follower have had to load."""
        return self.cell(Role.ARCHIVER, 0).get("bases") if self.follows else 0

    def is_outdated(self, shard: int) -> bool:
        """Return whether a shard that follows has to begin again with a newer snapshot."""
        return self.cell(Role.WALSHARD, shard).get("bases_loaded") < self.bases

    def follow_lag_ms(self, now_ms: int) -> int:
        """Return how old a follower's state may be, in addition to the leader's archive interval."""
        return max(0, now_ms - (self.cell(Role.ARCHIVER, 0).get("moment_ms") or self.header.get("started_ms")))

    def archive_lag_ms(self, now_ms: int) -> int:
        """Return how old the last moment in the archive is; 0 if everything that is committed is in it."""
        if not self.follows and all(
            self.cell(Role.WALSHARD, shard).get("committed") == self.shipped(shard) != 0 for shard in range(self.shards)
        ):
            return 0
        return self.follow_lag_ms(now_ms)

    def cut_bytes(self) -> int:
        """Return the room that a cut of all logs needs: 3/2 of their bytes for segments, and two snapshots."""
        lag_bytes = sum(map(self.lag_bytes, range(self.header.get("shards"))))
        return lag_bytes * 3 // 2 + 2 * self.cell(Role.COMPACTOR, 0).get("snapshot_bytes")
