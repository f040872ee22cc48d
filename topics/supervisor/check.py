"""Everything a start needs: what the machine must give, and what `run` would find, without starting anything."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from threading import Thread
from typing import Final, NamedTuple

from topics.setting_values import MIB
from topics.settings import Settings
from topics.shm.instance import SharedMemory
from topics.shm.shm_names import SHM_ROOT
from topics.storage import layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.format_mark import has_mark
from topics.storage.lock import DataDirLocked, holder_pid, inspecting
from topics.storage.logfile import RefusedLog
from topics.storage.snapshot import UnknownSnapshotVersion
from topics.storage.upgrade import check_upgrade
from topics.supervisor.listeners import AddressError, listen, show

OPEN_FILES_MIN: Final = 1024
"""With fewer files a frontend could not even hold its rings, logs and a few hundred connections."""

StatVfs = Callable[[str], os.statvfs_result]


def shared_memory_shortage(settings: Settings, statvfs: StatVfs = os.statvfs) -> str | None:
    """Says why /dev/shm is too small for these settings, None when it is not."""
    needed = SharedMemory.needed_bytes(settings.wal_shards, settings.frontends, settings.ring_bytes)
    figures = statvfs(SHM_ROOT)
    free = figures.f_bavail * figures.f_frsize
    if free >= needed:
        return None
    return (
        f"{SHM_ROOT} has {free / MIB:.1f} MiB free and {needed / MIB:.1f} MiB are needed with"
        f" TOPICS_WAL_SHARDS={settings.wal_shards}, TOPICS_FRONTENDS={settings.frontends} and"
        f" TOPICS_RING_BYTES={settings.ring_bytes}; lower one of them or make it larger (mount -o remount,size=…"
        f" {SHM_ROOT}, or --shm-size for a container)"
    )


def raise_open_files() -> int:
    """Takes all open files this process may have, for itself and its children; returns their number."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def open_files_shortage(most: int) -> str | None:
    """Says why `most` open files are too few, None when they are not."""
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES_MIN:
        return None
    return (
        f"this process may open {most} files and {OPEN_FILES_MIN} are needed; raise the limit (ulimit -n, LimitNOFILE=)"
    )


COLD_VARIABLE: Final = "TOPICS_COLD_DIR"
COLD_TIMEOUT_S: Final = 5.0
TOPICS_LOOKED_AT_MAX: Final = 10_000
"""So many topics are looked at for segments that have gone to an empty cold directory."""


class CheckFinding(NamedTuple):
    """One result of the check: `problem` is None when all is well."""

    subject: str
    problem: str | None


def check(settings: Settings, statvfs: StatVfs = os.statvfs) -> list[CheckFinding]:
    """Looks at the data directory, its lock and its format, the cold directory if there is one, the shared memory, the
    address and the limits.

    A bad cold directory does not keep the service from starting: only its own records cannot be read, and older ones go
    there later.
    """
    problem = _dir_problem(settings.data_dir, "TOPICS_DATA_DIR")
    findings = [CheckFinding(f"data directory {settings.data_dir}", problem)]
    if settings.cold_dir is not None:
        findings.append(_cold_dir(settings.cold_dir, settings.data_dir))
    findings.append(CheckFinding("lock", _lock_problem(settings.data_dir)))
    findings.append(CheckFinding("data format", _format_problem(settings.data_dir)))
    findings.append(CheckFinding(f"shared memory in {SHM_ROOT}", shared_memory_shortage(settings, statvfs)))
    findings.append(CheckFinding(f"address {show(settings.host, settings.port)}", _address_problem(settings)))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    findings.append(CheckFinding(f"open files ({most})", open_files_shortage(most)))
    return findings


def _dir_problem(path: str, variable: str) -> str | None:
    """Says why the directory could not be made or written; nothing is made."""
    existing = _existing(path)
    if not os.path.isdir(existing):
        return f"{existing} is not a directory; choose another {variable}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"user {os.geteuid()} may not write {existing}; give it the right or choose another {variable}"
    return None


def _existing(path: str) -> str:
    """Returns the path itself, or the nearest directory above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _cold_dir(cold_dir: str, data_dir: str) -> CheckFinding:
    """Looks at a cold directory. It may be on a disk that hangs, so a thread looks, and has only so much time."""
    found: list[CheckFinding] = []

    def look() -> None:
        subject = f"cold directory {cold_dir}"
        with suppress(OSError):
            same = os.stat(_existing(cold_dir)).st_dev == os.stat(_existing(data_dir)).st_dev
            subject += ", on the device of the data directory" if same else ", on a device of its own"
        problem = _dir_problem(cold_dir, COLD_VARIABLE) or _same_dir_problem(cold_dir, data_dir)
        found.append(CheckFinding(subject, problem or _missing_segments(cold_dir, data_dir)))

    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(COLD_TIMEOUT_S)
    if found:
        return found[0]
    return CheckFinding(
        f"cold directory {cold_dir}",
        f"it has not answered within {COLD_TIMEOUT_S:g} s; the service starts, but reads of what is in it would fail",
    )


def _same_dir_problem(cold_dir: str, data_dir: str) -> str | None:
    if not os.path.exists(cold_dir) or not os.path.exists(data_dir) or not os.path.samefile(cold_dir, data_dir):
        return None
    return f"is the data directory itself, by another name; choose another {COLD_VARIABLE}"


def _missing_segments(cold_dir: str, data_dir: str) -> str | None:
    """Says so if segments have gone there (the data directory has no more than an index of them), and it is empty."""
    with suppress(OSError):
        if any(os.scandir(layout.topics_dir(cold_dir))):
            return None
    with suppress(OSError):
        for topic in islice(os.scandir(layout.topics_dir(data_dir)), TOPICS_LOOKED_AT_MAX):
            files = set(os.listdir(topic))
            if any(file.endswith(".idx") and f"{file[:-4]}.data" not in files for file in files):
                return "nothing is in it, but segments have gone there; mount its disk or bring it back"
    return None


def _lock_problem(data_dir: str) -> str | None:
    try:
        pid = holder_pid(data_dir)
    except OSError as error:
        return f"cannot be asked for: {error.strerror}; run this as the user of the service"
    return None if pid is None else f"a service runs on it as process {pid}; stop it before you start another"


def _format_problem(data_dir: str) -> str | None:
    """Why this release must not use the data; None when it may, and while a service runs: the lock's problem."""
    try:
        with suppress(DataDirLocked), inspecting(data_dir):
            # Without `wal` the data are new, or a start of the release that wrote them has to come first.
            if not has_mark(OsFileSystem(), data_dir) and os.path.isdir(layout.wal_dir(data_dir)):
                check_upgrade(data_dir, accept_data_loss=False, progress=lambda _share: None)
    except (RefusedLog, UnknownSnapshotVersion) as error:
        return str(error)
    except OSError as error:
        return f"cannot be told: {error}; run this as the user of the service"
    return None


def _address_problem(settings: Settings) -> str | None:
    try:
        listeners = listen(settings.host, settings.port)
    except AddressError as error:
        return str(error)
    for listener in listeners:
        listener.close()
    return None
