"""The requirements of a start: what the machine must offer, and `topics-supervisor check`, which tests all of them."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from threading import Thread
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from topics.archive.ownership import following_problem, require_there, shipping_problem
from topics.archive.promoting import role_problem
from topics.setting_values import MIB, overlap
from topics.settings import Settings
from topics.shm.instance import SharedMemory
from topics.shm.shm_names import SHM_ROOT, identity, objects
from topics.storage import layout, service_id
from topics.storage.archive_objects import Archive, ArchiveDamagedError, open_archive
from topics.storage.borrowed import read_borrowed
from topics.storage.bucket_store import BucketStore, probe
from topics.storage.filesystem import OsFileSystem, said
from topics.storage.follow_note import read_note
from topics.storage.lock import DataDirLocked, holder_pid, inspecting
from topics.storage.logfile import RefusedLog
from topics.storage.snapshot import UnknownSnapshotVersion
from topics.storage.upgrade import check_upgrade, has_mark
from topics.supervisor.listeners import AddressError, close_all, listen, show

OPEN_FILES_MIN: Final = 1024
"""A frontend needs this many for its rings, logs and a few hundred connections."""

StatVfs = Callable[[str], os.statvfs_result]


def shared_memory_shortage(settings: Settings, statvfs: StatVfs = os.statvfs) -> str | None:
    """Return why /dev/shm is too small for these settings, None when it is large enough."""
    needed = SharedMemory.needed_bytes(settings.wal_shards, settings.frontends, settings.ring_bytes)
    figures = statvfs(SHM_ROOT)
    free = figures.f_bavail * figures.f_frsize
    if free >= needed:
        return None
    return (
        f"{SHM_ROOT} has {free / MIB:.1f} MiB free and {needed / MIB:.1f} MiB are needed with"
        f" TOPICS_WAL_SHARDS={settings.wal_shards}, TOPICS_FRONTENDS={settings.frontends} and"
        f" TOPICS_RING_BYTES={settings.ring_bytes}; lower one of them or enlarge {SHM_ROOT} (mount -o remount,size=…"
        f" {SHM_ROOT}, or --shm-size for a container)"
    )


def strangers_memory(data_dir: str, user: int | None = None) -> str | None:
    """Return why `user` (this one) may not remove what a killed service has left in /dev/shm, None if it may."""
    user = os.geteuid() if user is None else user
    with suppress(OSError):  # there is no directory yet, or a service is just removing them
        name = identity(data_dir)
        owners = {os.lstat(f"{SHM_ROOT}/{left}").st_uid for left in objects(name)} - {user}
        if owners and user:
            return (
                f"user {owners.pop()} ran this service, was killed and has left {SHM_ROOT}/topics-{name}-*, which user"
                f" {user} may not use; as root: chown -R {user} {SHM_ROOT}/topics-{name}-*"
            )
    return None


def open_files_shortage(most: int) -> str | None:
    """Return why `most` open files are too few, None when they are enough."""
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES_MIN:
        return None
    return (
        f"this process may open {most} files and {OPEN_FILES_MIN} are needed; raise the limit (ulimit -n, LimitNOFILE=)"
    )


def file_size_shortage(settings: Settings, most: int) -> str | None:
    """Return why files of at most `most` bytes are too small for these settings, None when they are large enough."""
    needed = max(
        SharedMemory.needed_bytes(settings.wal_shards, settings.frontends, settings.ring_bytes),
        settings.wal_file_bytes,
        settings.segment_max_bytes,
    )
    if most == resource.RLIM_INFINITY or most >= needed:
        return None
    return (
        f"this process may write files of {most} bytes and {needed} are needed; raise the limit (ulimit -f, "
        "LimitFSIZE=), best to unlimited"
    )


def raise_limits(settings: Settings) -> str | None:
    """Raise the limits of this process and its children to the highest allowed; return why one is too low."""
    most_files, most_bytes = (resource.getrlimit(limit)[1] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    return open_files_shortage(most_files) or file_size_shortage(settings, most_bytes)


COLD_VARIABLE: Final = "TOPICS_COLD_DIR"
COLD_TIMEOUT_S: Final = 5.0
BUCKET_TIMEOUT_MS: Final = 5_000
TOPICS_SEARCHED_MAX: Final = 10_000
"""The check searches at most this many topics for a cold segment."""


class CheckFinding(NamedTuple):
    """The result of checking one thing; `problem` is None if nothing there prevents a start."""

    subject: str
    problem: str | None


def check(settings: Settings, statvfs: StatVfs = os.statvfs) -> list[CheckFinding]:
    """Check the data directory, its lock and format, the cold tier and the archive if they are set, shared memory,
    address, limits. The service also starts without cold tier or archive: then reads of cold records fail, or logs
    stay.
    """
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    cold = [] if settings.cold_dir is None else [_cold_dir_finding(settings.cold_dir, settings.data_dir)]
    cold += [] if settings.cold_url is None else [_bucket_finding(settings.cold_url, settings.data_dir)]
    cold += _lender_findings(settings.data_dir)
    cold += [] if settings.archive_url is None else [_archive_finding(settings.archive_url, settings.data_dir)]
    cold += [] if settings.follow is None else [_followed_finding(settings.follow, settings)]
    if settings.port_file is not None:
        cold.append(CheckFinding(f"port file {settings.port_file}", _port_file_problem(settings.port_file)))
    lock_problem = _lock_problem(settings.data_dir)
    # The memory of a service that runs is not left behind; nor is it known to be, if the lock cannot be read.
    strange = None if lock_problem else strangers_memory(settings.data_dir)
    return [
        CheckFinding(f"data directory {settings.data_dir}", _dir_problem(settings.data_dir, "TOPICS_DATA_DIR")),
        *cold,
        CheckFinding("lock", lock_problem),
        CheckFinding("data format", _format_problem(settings)),
        CheckFinding(f"shared memory in {SHM_ROOT}", strange or shared_memory_shortage(settings, statvfs)),
        CheckFinding(f"address {show(settings.host, settings.port)}", _address_problem(settings)),
        CheckFinding(f"open files ({most_files})", open_files_shortage(most_files)),
        CheckFinding("file size", file_size_shortage(settings, most_bytes)),
    ]


def _dir_problem(path: str, variable: str) -> str | None:
    """Return why the directory cannot be created or written. Creates nothing."""
    nearest = _existing(path)
    if not os.path.isdir(nearest):
        return f"{nearest} is not a directory; choose another {variable}"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"user {os.geteuid()} may not write {nearest}; give it the right or choose another {variable}"
    return None


def _port_file_problem(path: str) -> str | None:
    """Return why the file cannot be written. A start makes no directory for it."""
    folder = os.path.dirname(path)
    if os.path.isdir(path) or not os.path.isdir(folder):
        found = f"{path} is a directory" if os.path.isdir(path) else f"there is no directory {folder}"
        return f"{found}; choose another TOPICS_PORT_FILE"
    return _dir_problem(folder, "TOPICS_PORT_FILE")


def _existing(path: str) -> str:
    """Return the path itself, or the nearest directory above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _cold_dir_finding(cold_dir: str, data_dir: str) -> CheckFinding:
    """Check a cold directory. Its disk may hang, so a thread does it, with a time-out."""
    found: list[CheckFinding] = []

    def check_directory() -> None:
        subject = f"cold directory {cold_dir}"
        with suppress(OSError):
            same = os.stat(_existing(cold_dir)).st_dev == os.stat(_existing(data_dir)).st_dev
            subject += ", on the device of the data directory" if same else ", on another device"
        problem = _dir_problem(cold_dir, COLD_VARIABLE) or _same_dir_problem(cold_dir, data_dir)
        found.append(CheckFinding(subject, problem or _missing_segments(cold_dir, data_dir)))

    thread = Thread(target=check_directory, daemon=True)
    thread.start()
    thread.join(COLD_TIMEOUT_S)
    if found:
        return found[0]
    return CheckFinding(
        f"cold directory {cold_dir}",
        f"it has not answered within {COLD_TIMEOUT_S:g} s; the service would start, but reads of records in it would"
        " fail",
    )


def _bucket_finding(url: str, data_dir: str) -> CheckFinding:
    """Make, read and delete an object in the bucket, and check its owner. All requests have time-outs."""
    problems = list(probe(url, BUCKET_TIMEOUT_MS))
    if not problems:
        try:
            known = service_id.known_id(OsFileSystem(), data_dir)
            own = None if known is None else service_id.describe(known, data_dir)
            problem = BucketStore(f"{url}/topics", BUCKET_TIMEOUT_MS).owner_problem(own)
        except (OSError, EOFError) as error:
            problem = f"its owner cannot be read: {said(error)}"
        problems += [] if problem is None else [problem]
    return CheckFinding(f"cold tier {url}", "; ".join(problems) or None)


def _lender_findings(data_dir: str) -> list[CheckFinding]:
    """Check the archive from which a restored directory still borrows data."""
    fs = OsFileSystem()
    try:
        note = read_borrowed(fs, data_dir)
    except OSError as error:
        return [CheckFinding(f"what {data_dir} borrows", said(error))]
    if note is None:
        return []
    problem = None
    try:
        open_archive(fs, note.place, BUCKET_TIMEOUT_MS).len(note.files[0].name)
    except OSError as error:
        problem = f"{said(error)}; the service would start, but reads of records that are still there would fail"
    return [CheckFinding(f"archive {note.place}, from which data are borrowed", problem)]


def _archive_finding(url: str, data_dir: str) -> CheckFinding:
    """Check that the archive can be written, and its owner. In a bucket, make an object and delete it again."""
    fs = OsFileSystem()
    if url.startswith("file:"):
        problem = overlap(data_dir, url) or _dir_problem(unquote(urlsplit(url).path), "TOPICS_ARCHIVE_URL")
    else:
        problem = "; ".join(probe(url, BUCKET_TIMEOUT_MS)) or None
    if problem is None:
        try:
            note = read_note(fs, data_dir)
            own = note.promoted_id if note is not None and note.leads else service_id.known_id(fs, data_dir)
            archive = Archive(open_archive(fs, url, BUCKET_TIMEOUT_MS))
            require_there(archive, archive.generations(), fs, data_dir)
            problem = shipping_problem(archive, own)
        except (OSError, EOFError, ArchiveDamagedError) as error:
            problem = f"it cannot be told whose it is: {said(error)}"
    return CheckFinding(f"archive {url}", problem)


def _followed_finding(url: str, settings: Settings) -> CheckFinding:
    """Check that this service can follow the archive of another service."""
    fs = OsFileSystem()
    try:
        note = read_note(fs, settings.data_dir)
        if note is not None and note.leads:
            return CheckFinding(f"followed archive {note.url}, from which this service took over", None)
        problem = following_problem(Archive(open_archive(fs, url, BUCKET_TIMEOUT_MS)), settings.wal_shards)
    except (OSError, EOFError, ArchiveDamagedError) as error:
        problem = f"it cannot be read: {said(error)}"
    return CheckFinding(f"followed archive {url}", problem)


def _same_dir_problem(cold_dir: str, data_dir: str) -> str | None:
    if not os.path.exists(cold_dir) or not os.path.exists(data_dir) or not os.path.samefile(cold_dir, data_dir):
        return None
    return f"is the data directory under another name; choose another {COLD_VARIABLE}"


def _missing_segments(cold_dir: str, data_dir: str) -> str | None:
    """Return a problem if the cold directory is empty though a topic has an index without data here."""
    with suppress(OSError):
        if any(os.scandir(layout.topics_dir(cold_dir))):
            return None
    with suppress(OSError):
        if read_borrowed(OsFileSystem(), data_dir) is not None:
            return None  # the archive that the directory was restored from may have the data
        for topic in islice(os.scandir(layout.topics_dir(data_dir)), TOPICS_SEARCHED_MAX):
            files = set(os.listdir(topic))
            if any(file.endswith(".idx") and f"{file[:-4]}.data" not in files for file in files):
                return "it is empty, but segments were moved there; mount its disk, or restore it"
    return None


def _lock_problem(data_dir: str) -> str | None:
    try:
        pid = holder_pid(data_dir)
    except OSError as error:
        return f"cannot be read: {error.strerror}; run this as the user of the service"
    return None if pid is None else f"a service holds it (process {pid}); stop that one before you start another"


def _format_problem(settings: Settings) -> str | None:
    """Return why this release or these settings must not use the data, None if they may or while a service runs."""
    data_dir = settings.data_dir
    try:
        with suppress(DataDirLocked), inspecting(data_dir):
            service_id.epoch_masks(OsFileSystem(), data_dir)
            # Without `wal` the data are new, or a release that was interrupted has to start once more.
            if not has_mark(OsFileSystem(), data_dir) and os.path.isdir(layout.wal_dir(data_dir)):
                check_upgrade(data_dir, accept_data_loss=False, progress=lambda _share: None)
        return role_problem(OsFileSystem(), settings)
    except (RefusedLog, UnknownSnapshotVersion) as error:
        return str(error)
    except PermissionError as error:
        return f"cannot be read: {said(error)}; run this as the user of the service"
    except OSError as error:
        return f"{error.filename or data_dir} {error.strerror or error}"


def _address_problem(settings: Settings) -> str | None:
    try:
        close_all(listen(settings.host, settings.port))
    except AddressError as error:
        return str(error)
    return None
