"""The status of a service, read from outside (control page, lock, process table), and that status as text.

It asks no process, so it works while one is dead, hangs or replays its log. The figures that a process has written
about itself count only while it runs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

import msgspec
import psutil

from topics import __version__
from topics.core.clock import Clock
from topics.setting_values import MIB
from topics.shm import shm_names
from topics.shm.control import HEARTBEAT_STALE_MS, ControlPage, ProcessState, Role, latency_quantile_us
from topics.storage.filesystem import WritePath
from topics.storage.lock import holder_pid, is_running, may_hold
from topics.supervisor.listeners import show
from topics.supervisor.signals import show_exit
from topics.terminal import Cell, Paint, Styled, duration, plain, plural, table

_ENDED: Final = (ProcessState.DEAD, ProcessState.STOPPED)


class SupervisorStatus(msgspec.Struct, frozen=True):
    """CPU time, memory and last heartbeat of the supervisor. A figure is None if this process cannot read it."""

    cpu_seconds: float | None
    rss_bytes: int | None
    heartbeat_age_ms: int | None

    @property
    def hangs(self) -> bool:
        return (self.heartbeat_age_ms or 0) > HEARTBEAT_STALE_MS


class ProcessStatus(msgspec.Struct, frozen=True):
    """One child process. Figures that are unknown while it is down are None. `last_exit` is 128 + n for signal n."""

    role: str
    index: int
    pid: int | None
    state: str
    uptime_ms: int | None
    restarts: int
    last_exit: int | None
    cpu_seconds: float | None
    rss_bytes: int | None
    heartbeat_age_ms: int | None
    pressure: float | None

    @property
    def hangs(self) -> bool:
        return self.state == "ready" and (self.heartbeat_age_ms or 0) > HEARTBEAT_STALE_MS


class ShardStatus(msgspec.Struct, frozen=True):
    """The figures of a shard, or of its last life while it is down. `progress` is None unless it recovers."""

    index: int
    topics: int
    wal_file: int
    wal_offset: int
    wal_read_only: bool
    unsynced_bytes: int
    queue_depth: int
    fsyncs: int
    fsync_p50_us: int | None
    fsync_p99_us: int | None
    commit_window_ms: float
    write_errors: int
    brake: float
    """The part of full braking, 0 to 1, while the compactor is behind."""
    lag_bytes: int
    """Bytes of its log that are in no snapshot yet; a restart reads them again."""
    progress: float | None


class CompactorStatus(msgspec.Struct, frozen=True):
    """The compactor's work since the service was started. `snapshot_age_ms` is None before the first snapshot."""

    snapshot_age_ms: int | None
    snapshots: int
    checkpointed_records: int
    checkpointed_bytes: int
    segments_sealed: int
    segments_dropped: int
    segments_rewritten: int
    segments_relocated: int
    segments_borrowed: int
    """Segments whose data are still in the archive that the service was restored from."""
    borrowed_bytes: int
    orphans: int
    failures: int


class PromotionStatus(msgspec.Struct, frozen=True):
    """A promotion that has not come about: one that was asked for, or a takeover that has begun."""

    age_ms: int
    begun: bool
    """True once the takeover has begun: nobody can withdraw it, and it goes on by itself. `age_ms` is since then."""


class ArchiverStatus(msgspec.Struct, frozen=True):
    """The archive since the service was started. `lag_ms` is 0 while the archive has everything that is committed. In a
    follower `lag_ms` is how old its state may be.
    """

    lag_ms: int
    moment_age_ms: int | None
    """Age of the newest moment in it; None before the first one in this life of the service."""
    moments: int
    bases: int
    objects: int
    bytes: int
    failures: int
    holes: int
    segments_borrowed: int
    """Segments whose data this follower has not fetched yet."""
    borrowed_bytes: int
    taken_over: bool
    """True if another service took over: this one only reads."""
    follows: bool
    """True if this service is a copy of the one in the archive."""
    takeover_blocked: bool = False
    """True if a damaged object of the archive keeps this copy from taking over."""
    promotion: PromotionStatus | None = None


class FrontendStatus(msgspec.Struct, frozen=True):
    """The figures of a frontend. `requests_per_s` is None without an earlier sample."""

    index: int
    connections: int
    sse_connections: int
    requests: int
    requests_per_s: float | None
    ready_topics: int
    scheduling_ms: float
    coalesce_ms: float
    throttled: int


class Status(msgspec.Struct, frozen=True):
    """The whole service; `state` is one of those in operations.md, Status."""

    state: str
    data_dir: str
    version: str = __version__
    pid: int | None = None
    uptime_ms: int | None = None
    listen: str | None = None
    topics: int = 0
    routers: int = 0
    pressure: float = 0.0
    deferring: bool = False
    shared_memory_bytes: int = 0
    write_path: str | None = None
    reshard_progress: float | None = None
    supervisor: SupervisorStatus | None = None
    processes: list[ProcessStatus] = []
    shards: list[ShardStatus] = []
    frontends: list[FrontendStatus] = []
    compactor: CompactorStatus | None = None
    archiver: ArchiverStatus | None = None


class StatusReader:
    """Reads the status of one data directory's service. Keeps the last sample, from which it computes rates."""

    def __init__(self, data_dir: str, clock: Clock) -> None:
        self._data_dir = data_dir
        self._clock = clock
        self._page: ControlPage | None = None
        self._page_inode = 0
        self._requests: dict[int, tuple[int, int]] = {}

    def read(self) -> Status:
        """Return the status now. OSError when it cannot be read (no access, another release)."""
        pid = holder_pid(self._data_dir)
        if pid is None:
            return Status(state="stopped", data_dir=self._data_dir)
        page = self.page()
        if page is None:
            if not may_hold(self._data_dir, pid) and holder_pid(self._data_dir) == pid:
                raise OSError(
                    f"process {pid} here is not the service: that runs in a container, so ask there, or is ending"
                )
            return Status(state="starting", data_dir=self._data_dir, pid=pid)
        return self._describe(pid, page)

    def page(self) -> ControlPage | None:
        """Return the control page of the running service; None if there is none, for example between two lives."""
        name = shm_names.shm_name(shm_names.identity(self._data_dir), "control")
        try:
            inode = os.stat(shm_names.SHM_ROOT + name).st_ino
            if self._page is None or inode != self._page_inode:
                self._page = ControlPage.attach(name)
                self._page_inode = inode
        except FileNotFoundError:
            return None
        return self._page

    def _describe(self, pid: int, page: ControlPage) -> Status:
        now_ms = self._clock.now_ms()
        header = page.header.read()
        processes = [_process(page, role, index, now_ms) for role, index in page.cells]
        shards = [_shard(page, process.index, process.state) for process in processes if process.role == "walshard"]
        frontends = [self._frontend(page, process.index) for process in processes if process.role == "frontend"]
        supervisor, announced = None, ProcessState.DRAINING
        if is_running(pid):
            supervisor = SupervisorStatus(*_usage(pid), _age_ms(header["heartbeat_ms"], now_ms))
            announced = ProcessState(header["state"])
        hangs = any(one.hangs for one in (*processes, supervisor) if one is not None)
        return Status(
            state=_overall(announced, hangs, processes, shards, page.is_taken_over),
            data_dir=self._data_dir,
            pid=pid,
            uptime_ms=_age_ms(header["started_ms"], now_ms),
            listen=_listen_address(pid, header["port"]),
            topics=sum(shard.topics for shard in shards),
            routers=sum(cell.get("routers") for (role, _), cell in page.cells.items() if role is Role.WALSHARD),
            pressure=page.pressure(),
            deferring=any(page.cell(role, index).get("deferring") for role, index in page.cells),
            shared_memory_bytes=_shared_memory_bytes(shm_names.identity(self._data_dir)),
            write_path=WritePath(header["write_path"]).name.lower() if header["write_path"] else None,
            reshard_progress=header["reshard_ppm"] / 1e6 if header["state"] == ProcessState.RECOVERING else None,
            supervisor=supervisor,
            processes=processes,
            shards=shards,
            frontends=frontends,
            compactor=None if page.follows else _compactor(page, now_ms),
            archiver=_archiver(page, now_ms) if page.has_archiver else None,
        )

    def _frontend(self, page: ControlPage, index: int) -> FrontendStatus:
        cell = page.cell(Role.FRONTEND, index).read()
        now_ms, requests = self._clock.monotonic_ms(), cell["requests"]
        rate = None
        if (before := self._requests.get(index)) is not None and now_ms > before[0]:
            rate = max(0, requests - before[1]) * 1000 / (now_ms - before[0])  # a restarted service counts from zero
        self._requests[index] = (now_ms, requests)
        return FrontendStatus(
            index=index,
            requests_per_s=rate,
            scheduling_ms=max(cell["scheduling_us"], cell["loop_lag_us"]) / 1000,
            coalesce_ms=cell["coalesce_us"] / 1000,
            **_figures(cell, "connections sse_connections requests ready_topics throttled"),
        )


def _figures(cell: dict[str, int], fields: str) -> dict[str, int]:
    """Return figures that have the same names in the control page and in the status."""
    return {field: cell[field] for field in fields.split()}


def _age_ms(then_ms: int, now_ms: int) -> int | None:
    return max(0, now_ms - then_ms) if then_ms else None


def _usage(pid: int | None) -> tuple[float | None, int | None]:
    """Return CPU seconds and bytes of memory; None for a process that does not run, or is hidden here."""
    with suppress(psutil.Error):
        if pid is not None:
            process = psutil.Process(pid)
            times = process.cpu_times()
            return times.user + times.system, process.memory_info().rss
    return None, None


def _process(page: ControlPage, role: Role, index: int, now_ms: int) -> ProcessStatus:
    cell = page.cell(role, index)
    known, own = cell.supervisor.read(), cell.read()
    pid = known["pid"] or None
    state = ProcessState(known["state"])
    heartbeat_age_ms = None
    if pid is not None and not is_running(pid):
        pid, state = None, ProcessState.DEAD  # the supervisor has not noticed its end yet, or has ended too
    if pid is not None and own["pid"] == pid:
        state = ProcessState(own["state"]) or state
        heartbeat_age_ms = _age_ms(own["heartbeat_ms"], now_ms)
    cpu_seconds, rss_bytes = _usage(pid)
    return ProcessStatus(
        role=page.name_of(role),
        index=index,
        pid=pid,
        state=state.name.lower(),
        uptime_ms=max(0, now_ms - known["since_ms"]) if pid is not None else None,
        restarts=known["restarts"],
        last_exit=known["last_exit"] if known["restarts"] or state in _ENDED else None,
        cpu_seconds=cpu_seconds,
        rss_bytes=rss_bytes,
        heartbeat_age_ms=heartbeat_age_ms,
        pressure=own["pressure_ppm"] / 1e6 if pid is not None else None,
    )


def _compactor(page: ControlPage, now_ms: int) -> CompactorStatus:
    cell = page.cell(Role.COMPACTOR, 0).read()
    return CompactorStatus(
        snapshot_age_ms=_age_ms(cell["last_snapshot_ms"], now_ms),
        **{field: cell[field] for field in CompactorStatus.__struct_fields__[1:]},
    )


def _archiver(page: ControlPage, now_ms: int) -> ArchiverStatus:
    cell, promotion = page.cell(Role.ARCHIVER, 0).read(), None
    if (age_ms := _age_ms(cell["promotion_ms"], now_ms)) is not None:
        promotion = PromotionStatus(age_ms, bool(cell["promotion_begun"]))
    return ArchiverStatus(
        lag_ms=page.archive_lag_ms(now_ms),
        moment_age_ms=_age_ms(cell["moment_ms"], now_ms),
        taken_over=page.is_taken_over,
        follows=page.follows,
        takeover_blocked=bool(cell["takeover_blocked"]),
        promotion=promotion,
        **_figures(cell, "moments bases objects bytes failures holes segments_borrowed borrowed_bytes"),
    )


def _shard(page: ControlPage, index: int, state: str) -> ShardStatus:
    cell = page.cell(Role.WALSHARD, index).read()
    return ShardStatus(
        index=index,
        wal_read_only=bool(cell["wal_read_only"]),
        unsynced_bytes=cell["wal_unsynced_bytes"],
        fsyncs=cell["wal_fsyncs"],
        fsync_p50_us=latency_quantile_us(cell, 0.50),
        fsync_p99_us=latency_quantile_us(cell, 0.99),
        commit_window_ms=cell["commit_window_us"] / 1000,
        brake=cell["brake_ppm"] / 1e6,
        lag_bytes=page.lag_bytes(index),
        progress=cell["progress_ppm"] / 1e6 if state == "recovering" else None,
        **_figures(cell, "topics wal_file wal_offset queue_depth write_errors"),
    )


def _overall(
    announced: ProcessState, hangs: bool, processes: list[ProcessStatus], shards: list[ShardStatus], is_taken_over: bool
) -> str:
    """Return the state of the whole service: the worst that holds."""
    if announced in (ProcessState.DRAINING, ProcessState.STOPPED):
        return "draining"
    states = {process.state for process in processes}
    if states & {"dead", "degraded", "stopped"} or hangs or any(shard.wal_read_only for shard in shards):
        return "degraded"
    if announced == ProcessState.RECOVERING or "recovering" in states:
        return "recovering"
    if states != {"ready"}:
        return "starting"
    return "taken over" if is_taken_over else "running"


def _listen_address(pid: int, port: int) -> str | None:
    """Return the address on which the supervisor listens now, None once it has closed its sockets."""
    with suppress(psutil.Error):
        for connection in psutil.Process(pid).net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return show(connection.laddr.ip, connection.laddr.port)
    return None


def _shared_memory_bytes(identity: str) -> int:
    """Return the bytes of /dev/shm that the service takes, files of ephemeral topics included."""
    total = 0
    for name in shm_names.objects(identity):
        path = os.path.join(shm_names.SHM_ROOT, name)
        for folder, _, files in os.walk(path):
            total += sum(_allocated_bytes(os.path.join(folder, file)) for file in files)
        total += _allocated_bytes(path)
    return total


def _allocated_bytes(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def render(status: Status, paint: Paint = plain) -> str:
    """Return the status as text. The first line sums it up; a table follows for each kind of process."""
    if status.pid is None:
        return f"topics  {paint(status.state, _STYLES.get(status.state, 'warn'))}  {status.data_dir}\n"
    borrowers: tuple[CompactorStatus | ArchiverStatus | None, ...] = (status.compactor, status.archiver)
    tables = (
        _table([_process_row(process) for process in status.processes], paint),
        _table([_shard_row(shard) for shard in status.shards], paint),
        _table([_frontend_row(frontend) for frontend in status.frontends], paint),
        _table([_compactor_row(one) for one in (status.compactor,) if one is not None], paint),
        _table([_archiver_row(one) for one in (status.archiver,) if one is not None], paint),
        *(_borrowed_line(one, paint) for one in borrowers if one is not None and one.segments_borrowed),
        "" if status.archiver is None else _takeover_lines(status.archiver, paint),
    )
    return "\n".join([_summary(status, paint), *filter(None, tables)])


def _summary(status: Status, paint: Paint) -> str:
    state = paint(status.state, _STYLES.get(status.state, "warn"))
    facts = [f"topics {status.version}", state, status.listen or "not listening", f"pid {status.pid}"]
    if status.supervisor is not None and status.supervisor.hangs:
        facts[-1] += paint(" hangs", "bad")
    if (uptime := duration(status.uptime_ms)) is not None:
        facts.append(f"up {uptime}")
    facts.append(plural(status.topics, "topic"))
    if status.routers:
        facts.append(plural(status.routers, "router"))
    facts.append(f"pressure {status.pressure:.2f}{' deferring' if status.deferring else ''}")
    facts.append(f"shared memory {status.shared_memory_bytes / MIB:.0f} MiB")
    if status.write_path is not None:
        facts.append(f"writes by {status.write_path}")
    if status.reshard_progress is not None:
        facts.append(f"preparing the logs {status.reshard_progress:.0%}")
    return "  ".join(facts) + f"\n{status.data_dir}\n"


_Row = dict[str, Cell]  # by their heads
_STYLES: Final = {
    "running": "good",
    "ready": "good",
    "degraded": "bad",
    "dead": "bad",
    "stopped": "bad",
    "taken over": "bad",
}
"""Styles of states; any other state is a transition."""


def _process_row(process: ProcessStatus) -> _Row:
    return {
        "process": f"{process.role} {process.index}",
        "pid": process.pid,
        "state": Styled("hangs", "bad") if process.hangs else Styled(process.state, _STYLES.get(process.state, "warn")),
        "uptime": duration(process.uptime_ms),
        "restarts": Styled(process.restarts, "warn" if process.restarts else ""),
        "last_exit": None if process.last_exit is None else show_exit(process.last_exit),
        "cpu_s": None if process.cpu_seconds is None else f"{process.cpu_seconds:.1f}",
        "rss_mib": None if process.rss_bytes is None else f"{process.rss_bytes / MIB:.0f}",
        "pressure": None if process.pressure is None else f"{process.pressure:.2f}",
    }


def _shard_row(shard: ShardStatus) -> _Row:
    notes = ["read-only"] if shard.wal_read_only else []
    if shard.progress is not None:
        notes.append(f"recovering {shard.progress:.0%}")
    return {
        "shard": Styled(" ".join([str(shard.index), *notes]), "bad" if shard.wal_read_only else ""),
        "topics": shard.topics,
        "wal_file": shard.wal_file,
        "wal_offset": shard.wal_offset,
        "queue": shard.queue_depth,
        "fsync_p50": None if shard.fsync_p50_us is None else f"{shard.fsync_p50_us} µs",
        "fsync_p99": None if shard.fsync_p99_us is None else f"{shard.fsync_p99_us} µs",
        "window_ms": f"{shard.commit_window_ms:.1f}",
        "lag": f"{shard.lag_bytes / MIB:.1f} MiB",
        "brake": f"{shard.brake:.0%}",
    }


def _compactor_row(compactor: CompactorStatus) -> _Row:
    age = duration(compactor.snapshot_age_ms)
    return {
        "compactor": "no snapshot yet" if age is None else f"{age} ago",
        "snapshots": compactor.snapshots,
        "records": compactor.checkpointed_records,
        "segments": compactor.segments_sealed,
        "dropped": compactor.segments_dropped,
        "rewritten": compactor.segments_rewritten,
        "cold": compactor.segments_relocated,
        "failures": compactor.failures,
    }


def _borrowed_line(one: CompactorStatus | ArchiverStatus, paint: Paint) -> str:
    what = f"{one.segments_borrowed} segments ({one.borrowed_bytes / MIB:,.1f} MiB)"
    return f"{paint(what, 'warn')} are still in the archive that this service was made of: keep it\n"


def _takeover_lines(archiver: ArchiverStatus, paint: Paint) -> str:
    lines, promotion = "", archiver.promotion
    if promotion is not None:
        what, goes_on = "promotion was asked for", "`topics-supervisor promote --cancel` withdraws it"
        if promotion.begun:
            what, goes_on = "takeover has begun", "it goes on by itself"
        what = paint(f"a {what} {duration(promotion.age_ms)} ago", "warn")
        lines = f"{what} and has not come about (the log says why): {goes_on}\n"
    if archiver.takeover_blocked:
        what = paint("this service cannot take over", "bad")
        lines += f"{what}: an object that it needs in the archive is damaged, and the log names it\n"
    return lines


def _archiver_row(archiver: ArchiverStatus) -> _Row:
    lag = f"{duration(archiver.lag_ms)} behind" if archiver.lag_ms else "up to date"
    if archiver.moment_age_ms is None and (archiver.lag_ms or archiver.follows):
        lag = "not copied yet" if archiver.follows else "no moment yet"
    lag = f"follows it, {lag}" if archiver.follows else lag
    return {
        "archive": "TAKEN OVER by another service" if archiver.taken_over else lag,
        "moments": archiver.moments,
        "bases": archiver.bases,
        "objects": archiver.objects,
        "mib": archiver.bytes // MIB,
        "failures": archiver.failures,
        "holes": archiver.holes,
    }


def _frontend_row(frontend: FrontendStatus) -> _Row:
    return {
        "frontend": frontend.index,
        "connections": frontend.connections,
        "sse": frontend.sse_connections,
        "requests": frontend.requests,
        "req/s": None if frontend.requests_per_s is None else f"{frontend.requests_per_s:.0f}",
        "ready": frontend.ready_topics,
        "wait_ms": f"{frontend.scheduling_ms:.1f}",
        "coalesce_ms": f"{frontend.coalesce_ms:.1f}",
        "throttled": frontend.throttled,
    }


def _table(rows: list[_Row], paint: Paint) -> str:
    """Return rows with their heads as a table; nothing without rows."""
    if not rows:
        return ""
    return table([[head.replace("_", " ").upper() for head in rows[0]], *(list(row.values()) for row in rows)], paint)
