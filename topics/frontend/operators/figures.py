"""The metrics of the whole service (api §8), read from shared memory: the control page and the durations of requests.
No process is asked, so any frontend answers for all, also while processes are dead or recovering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from topics import __version__
from topics.core.config import CLASSES
from topics.core.scheduler import BANDS
from topics.frontend.operators.exposition import Buckets, Family, Sample, Value, single
from topics.shm.control import BESIDE, LATENCY_BUCKETS, ControlPage, ProcessState, Role, replay_progress
from topics.shm.durations import Durations

_BOUNDS_US: Final = [1 << (bucket + 3) for bucket in range(LATENCY_BUCKETS - 1)]
_BOUNDS_S: Final = [repr(bound / 1_000_000) for bound in _BOUNDS_US]
_SHARD, _FRONTEND = Role.WALSHARD, Role.FRONTEND
_LABELS: Final = {_SHARD: "shard", _FRONTEND: "frontend"}

_WAL_TOTALS: Final = {"frames": "frames", "bytes": "bytes_written", "fsyncs": "fsyncs"}
_SUMS: Final = (
    ("topics", _SHARD, "topics", "Topics"),
    ("queue_topics", _SHARD, "queue_topics", "Topics of type queue"),
    ("records_live", _SHARD, "records_live", "Live records in all topics"),
    ("bytes_live", _SHARD, "bytes_live", "Live bytes in all topics"),
    ("queue_leases_in_flight", _SHARD, "leases_in_flight", "Leases held by consumers of queues"),
    ("routers", _SHARD, "routers", "Routers"),
    ("router_copies_total", _SHARD, "router_copies", "Copies made by routers"),
    ("router_oversize_total", _SHARD, "router_oversize", "Copies left out because their dest could never hold them"),
    ("router_lag_records", _SHARD, "router_lag_records", "Source records not copied yet, as of a second ago"),
    ("watch_sessions", _SHARD, "sessions", "Watch sessions that are kept"),
    ("sse_connections", _FRONTEND, "sse_connections work_streams", "Open event streams"),
    ("ws_connections", _FRONTEND, "ws_connections", "Open WebSockets"),
    ("wal_frames_total", _SHARD, "wal_frames", "Frames written to the logs"),
    ("wal_batches_total", _SHARD, "wal_batches", "Groups committed, each with one write"),
    ("wal_fsyncs_total", _SHARD, "wal_fsyncs", "Syncs of the logs, those in the background included"),
    ("wal_bytes_written_total", _SHARD, "wal_bytes_written", "Bytes written to the logs"),
    ("wal_rotations_total", _SHARD, "wal_rotations", "Log files begun after the first"),
    ("wal_submit_full_total", _FRONTEND, "ring_full", "Requests that found the ring of a shard full"),
    ("wal_queue_depth", _SHARD, "queue_depth", "Requests in the groups that the shards took last"),
    ("requests_total", _FRONTEND, "requests", "Requests that reached a route, and commands over WebSockets"),
    ("records_written_total", _FRONTEND, "records_in", "Records committed for clients"),
    ("records_delivered_total", _FRONTEND, "records_out", "Records sent to clients, by diff and watch"),
    ("sse_frames_total", _FRONTEND, "sse_frames", "Frames sent on event streams"),
    ("throttled_total", _FRONTEND, "throttled", "Requests refused with 429 because a ring was full, not by limits"),
)
"""(name, role, fields, help) of each metric that is a sum of fields over all processes of the role."""

_EACH: Final = (
    ("shard_topics", _SHARD, "topics", 1, "Topics of one shard"),
    ("shard_records_live", _SHARD, "records_live", 1, "Live records of one shard"),
    ("shard_bytes_live", _SHARD, "bytes_live", 1, "Live bytes of one shard"),
    ("shard_wal_queue_depth", _SHARD, "queue_depth", 1, "Requests in the group that one shard took last"),
    ("shard_wal_read_only", _SHARD, "wal_read_only", 1, "1 if the log of one shard cannot be written any more"),
    ("shard_wal_unsynced_bytes", _SHARD, "wal_unsynced_bytes", 1, "Bytes in one shard's log that are not synced yet"),
    ("shard_wal_bytes_written_total", _SHARD, "wal_bytes_written", 1, "Bytes written to the log of one shard"),
    ("shard_wal_batches_total", _SHARD, "wal_batches", 1, "Groups committed by one shard"),
    ("shard_wal_fsyncs_total", _SHARD, "wal_fsyncs", 1, "Syncs of the log of one shard"),
    ("shard_wal_write_errors_total", _SHARD, "write_errors", 1, "Groups, or writes on a full disk, that failed"),
    ("shard_commit_window_seconds", _SHARD, "commit_window_us", 1e6, "Least time between the groups of one shard"),
    ("shard_brake_ratio", _SHARD, "brake_ppm", 1e6, "Share of full braking of writers while the compactor is behind"),
    ("frontend_connections", _FRONTEND, "connections", 1, "Open HTTP/1.1 connections of one frontend"),
    ("frontend_sse_connections", _FRONTEND, "sse_connections", 1, "Open event streams of one frontend"),
    ("frontend_ws_connections", _FRONTEND, "ws_connections", 1, "Open WebSockets of one frontend"),
    ("frontend_work_streams", _FRONTEND, "work_streams", 1, "Open streams of queue workers of one frontend"),
    ("frontend_long_polls", _FRONTEND, "long_polls", 1, "Long polls that wait in one frontend"),
    ("frontend_requests_total", _FRONTEND, "requests", 1, "Requests to one frontend"),
    ("frontend_ready_topics", _FRONTEND, "ready_topics", 1, "Topics that wait to be delivered by one frontend"),
    ("frontend_throttled_total", _FRONTEND, "throttled", 1, "429s of one frontend for want of room to a shard"),
    ("scheduler_wait_seconds", _FRONTEND, "scheduling_us", 1e6, "Mean wait of topics for delivery, last interval"),
    ("event_loop_lag_seconds", _FRONTEND, "loop_lag_us", 1e6, "Delay of one frontend's event loop, last sample"),
    ("coalesce_seconds", _FRONTEND, "coalesce_us", 1e6, "Least time between one frontend's frames of one topic"),
)
"""(name, role, field, divisor, help) of each metric with a series for each process of the role."""

_COMPACTOR: Final = (
    ("snapshots_total", "snapshots", "Snapshots made"),
    ("records_total", "checkpointed_records", "Records moved from the logs to segments"),
    ("bytes_total", "checkpointed_bytes", "Bytes of frames written to segments by checkpoints"),
    ("segments_sealed_total", "segments_sealed", "Segments sealed"),
    ("segments_dropped_total", "segments_dropped", "Segments whose files were removed"),
    ("segments_rewritten_total", "segments_rewritten", "Segments rewritten without deleted records"),
    ("segments_relocated_total", "segments_relocated", "Segments moved to the cold directory"),
    ("segments_borrowed", "segments_borrowed", "Segments that are still in the archive of the restore"),
    ("borrowed_bytes", "borrowed_bytes", "Bytes of these segments"),
    ("segments_unexplained", "orphans", "Segments on the disk that belong to nothing known, and stay"),
    ("failures_total", "failures", "Checkpoints and other work that failed and was repeated later"),
)
"""(name, field, help) of each metric that is a field of the compactor."""

_ARCHIVER: Final = (
    ("moments_total", "moments", "Moments shipped to the archive"),
    ("objects_total", "objects", "Objects put into the archive"),
    ("bytes_total", "bytes", "Bytes put into the archive"),
    ("bases_total", "bases", "Bases completed in the archive"),
    ("failures_total", "failures", "Times that the archive could not be written, which was repeated"),
    ("holes_total", "holes", "Times that logs were removed before they were in the archive"),
    ("segments_borrowed", "segments_borrowed", "Segments that a service that follows another one has not fetched yet"),
    ("borrowed_bytes", "borrowed_bytes", "Bytes of these segments"),
    ("taken_over", "taken_over", "1 if another service took over from this one, which only reads now"),
    ("takeover_blocked", "takeover_blocked", "1 while a damaged object there keeps this copy from taking over"),
)
"""(name, field, help) of each metric that is a field of the archiver."""


def _each(name: str, role: Role, help: str, values: Sequence[Value]) -> Family:
    """Return a metric with a series for each process of the role."""
    samples: list[Sample] = [((str(index),), value) for index, value in enumerate(values)]
    return Family(f"topics_{name}", help, (_LABELS[role],), samples)


Rows = Mapping[Role, list[dict[str, int]]]
"""The words of each frontend and shard, all read at once."""


def _sum(rows: list[dict[str, int]], field: str) -> int:
    return sum([row[field] for row in rows])


class ServiceFigures:
    """All metrics of the service but the series of single topics."""

    def __init__(self, control: ControlPage, durations: Durations, now_ms: Callable[[], int]) -> None:
        self._control = control
        self._durations = durations
        self._now_ms = now_ms
        self._shards = [control.cell(_SHARD, shard) for shard in range(control.shards)]
        frontends = [control.cell(_FRONTEND, frontend) for frontend in range(control.frontends)]
        self._cells = {_SHARD: self._shards, _FRONTEND: frontends}

    def families(self) -> Iterator[Family]:
        rows = self._read()
        for name, role, fields, help in _SUMS:
            yield single(f"topics_{name}", help, sum([_sum(rows[role], field) for field in fields.split()]))
        for name, role, field, divisor, help in _EACH:
            values = [row[field] for row in rows[role]]
            yield _each(name, role, help, values if divisor == 1 else [value / divisor for value in values])
        yield from self._service(rows)
        yield from self._log(rows[_SHARD])
        if not self._control.follows:
            yield from self._compactor()
        if self._control.has_archiver:
            yield from self._archiver()
        yield from self._requests(rows[_FRONTEND])
        yield from self._processes()

    def totals(self) -> dict[str, Any]:
        """Return the plain totals with which JSON metrics begin."""
        shards = self._read()[_SHARD]
        wal = {name: _sum(shards, f"wal_{field}") for name, field in _WAL_TOTALS.items()}
        return {"topics": _sum(shards, "topics"), "queue_topics": _sum(shards, "queue_topics"), "wal": wal}

    def _read(self) -> Rows:
        return {role: [cell.read() for cell in cells] for role, cells in self._cells.items()}

    def _service(self, rows: Rows) -> Iterator[Family]:
        uptime_ms = max(0, self._now_ms() - self._control.header.get("started_ms"))
        ready = all(cell.get("generation") for cell in self._shards)
        deferring = any(cell.get("deferring") for cell in self._control.cells.values())
        singles: tuple[tuple[str, str, Value], ...] = (
            ("ready", "1 if all topics can be read", int(ready)),
            ("recovery_progress", "Share of the logs that has been read, 0 to 1", replay_progress(self._shards)),
            ("uptime_ms", "Milliseconds since the service was started", uptime_ms),
            ("pressure", "Pressure of the service, 0 to 1", self._control.pressure()),
            ("deferring", "1 while topics of negative priority wait and routers copy less at a time", int(deferring)),
        )
        for name, help, value in singles:
            yield single(f"topics_{name}", help, value)
        yield Family("topics_build_info", "The version that runs", ("version",), [((__version__,), 1)])
        by_class: list[Sample] = [((name,), _sum(rows[_SHARD], f"topics_{name}")) for name in CLASSES]
        yield Family("topics_topics_by_class", "Topics by durability class", ("class",), by_class)

    def _log(self, shards: list[dict[str, int]]) -> Iterator[Family]:
        peak = max(row["queue_depth_peak"] for row in shards)
        yield single("topics_wal_queue_depth_peak", "Most requests in one group since its shard started", peak)
        read_only = int(any(row["wal_read_only"] for row in shards))
        yield single("topics_wal_read_only", "1 if the log of a shard cannot be written any more", read_only)
        counts = [_sum(shards, f"fsync_us_{bucket:02d}") for bucket in range(LATENCY_BUCKETS)]
        buckets = Buckets([str(bound) for bound in _BOUNDS_US], counts, _sum(shards, "fsync_us_sum"))
        yield Family("topics_wal_fsync_latency_us", "Microseconds that a group waits for its sync", (), [((), buckets)])
        each: list[Value] = []
        for row in shards:
            own = [row[f"fsync_us_{bucket:02d}"] for bucket in range(LATENCY_BUCKETS)]
            each.append(Buckets(_BOUNDS_S, own, row["fsync_us_sum"] / 1_000_000))
        yield _each("shard_wal_fsync_seconds", _SHARD, "Seconds that a group of one shard waits for its sync", each)

    def _compactor(self) -> Iterator[Family]:
        cell = self._control.cell(Role.COMPACTOR, 0)
        lags = [self._control.lag_bytes(shard) for shard in range(len(self._shards))]
        yield _each("compactor_lag_bytes", _SHARD, "Bytes in the log of one shard that are in no snapshot", lags)
        since_ms = cell.get("absorbed_ms") or self._control.header.get("started_ms")
        behind_ms = max(0, self._now_ms() - since_ms) if any(lags) else 0
        help = "Seconds since the newest snapshot was begun, 0 if it has all records"
        yield single("topics_compactor_lag_seconds", help, behind_ms / 1000)
        help = "Time of the newest snapshot, seconds since 1970; 0: none yet"
        last_s = cell.get("last_snapshot_ms") / 1000
        yield single("topics_compactor_last_snapshot_timestamp_seconds", help, last_s)
        for name, field, help in _COMPACTOR:
            yield single(f"topics_compactor_{name}", help, cell.get(field))

    def _archiver(self) -> Iterator[Family]:
        cell = self._control.cell(Role.ARCHIVER, 0)
        help = "Age of the newest moment in the archive, 0 if it has everything that is committed"
        yield single("topics_archive_lag_seconds", help, self._control.archive_lag_ms(self._now_ms()) / 1000)
        help = "Time of the newest base in the archive, seconds since 1970; 0: none in this life of the service"
        yield single("topics_archive_last_base_timestamp_seconds", help, cell.get("base_ms") / 1000)
        since_ms = cell.get("promotion_ms") or self._now_ms()
        help = "Seconds since a promotion was asked for or has begun that has not come about, 0 without one"
        yield single("topics_archive_promotion_seconds", help, max(0, self._now_ms() - since_ms) / 1000)
        for name, field, help in _ARCHIVER:
            yield single(f"topics_archive_{name}", help, cell.get(field))

    def _requests(self, frontends: list[dict[str, int]]) -> Iterator[Family]:
        errors: list[Sample] = [((s,), _sum(frontends, f"responses_{s}")) for s in ("4xx", "5xx")]
        yield Family("topics_error_responses_total", "Requests that were refused", ("status",), errors)
        durations: list[Sample] = []
        for route, (counts, sum_us) in self._durations.read().items():
            durations.append(((route.name.lower(),), Buckets(_BOUNDS_S, counts, sum_us / 1_000_000)))
        help = "Seconds from a request to the end of its answer, event streams left out"
        yield Family("topics_request_duration_seconds", help, ("route",), durations)
        depths: list[Sample] = [
            ((str(index), str(band)), row[f"ready_band_{band}"])
            for index, row in enumerate(frontends)
            for band in range(BANDS)
        ]
        help = "Topics that wait to be delivered, by band of priority, 0 is the most urgent"
        yield Family("topics_scheduler_band_depth", help, ("frontend", "band"), depths)

    def _processes(self) -> Iterator[Family]:
        every = [
            ((self._control.name_of(role), str(index)), cell) for (role, index), cell in self._control.cells.items()
        ]
        beside = {self._control.name_of(role) for role in BESIDE}
        pressed = [(labels, cell) for labels, cell in every if labels[0] not in beside]
        pressure: list[Sample] = [(labels, cell.get("pressure_ppm") / 1e6) for labels, cell in pressed]
        busy: list[Sample] = [(labels, cell.get("busy_ppm") / 1e6) for labels, cell in pressed]
        up: list[Sample] = [(labels, int(cell.supervisor.get("pid") > 0)) for labels, cell in every]
        restarts: list[Sample] = [(labels, cell.supervisor.get("restarts")) for labels, cell in every]
        exits: list[Sample] = [(labels, cell.supervisor.get("last_exit")) for labels, cell in every]
        since: list[Sample] = [(labels, cell.supervisor.get("since_ms") / 1000) for labels, cell in every]
        now_ms = self._now_ms()
        beats_ms = {("supervisor", "0"): self._control.header.get("heartbeat_ms") or now_ms}
        for labels, cell in every:
            beats_ms[labels] = cell.get("heartbeat_ms") if cell.present_state is ProcessState.READY else now_ms
        ages: list[Sample] = [(labels, max(0, now_ms - beat_ms) / 1000) for labels, beat_ms in beats_ms.items()]
        for name, help, samples in (
            ("heartbeat_age_seconds", "Seconds since a process that is ready was seen at work; 0 for others", ages),
            ("last_exit_code", "Exit code of the life before, 128 + n for signal n", exits),
            ("since_timestamp_seconds", "Time of the last start or end, seconds since 1970", since),
            ("pressure", "Pressure of one process, 0 to 1", pressure),
            ("busy_ratio", "Share of the time that one process computes or waits for the disk", busy),
            ("up", "1 while the process runs", up),
            ("restarts_total", "Starts of the process after its first", restarts),
        ):
            yield Family(f"topics_process_{name}", help, ("process", "index"), samples)
