"""What `run` would find, without starting anything."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

from topics.settings import Settings
from topics.shm.names import SHM_ROOT
from topics.storage.lock import holder_pid
from topics.supervisor import limits
from topics.supervisor.limits import StatVfs
from topics.supervisor.listeners import AddressError, listen, show


class Finding(NamedTuple):
    """One thing looked at: `problem` is None when it is as it should be."""

    subject: str
    problem: str | None


def check(settings: Settings, statvfs: StatVfs = os.statvfs) -> list[Finding]:
    """Looks at the data directory, its lock, the shared memory, the address and the limits."""
    findings = [Finding(f"data directory {settings.data_dir}", _data_dir_problem(settings.data_dir))]
    findings.append(Finding("lock", _lock_problem(settings.data_dir)))
    findings.append(Finding(f"shared memory in {SHM_ROOT}", limits.shared_memory_shortage(settings, statvfs)))
    findings.append(Finding(f"address {show(settings.host, settings.port)}", _address_problem(settings)))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    findings.append(Finding(f"open files ({most})", limits.open_files_shortage(most)))
    return findings


def _data_dir_problem(data_dir: str) -> str | None:
    """Whether it could be made and written; nothing is made."""
    existing = data_dir
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        return f"{existing} is not a directory; choose another TOPICS_DATA_DIR"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"user {os.geteuid()} may not write {existing}; give it the right or choose another TOPICS_DATA_DIR"
    return None


def _lock_problem(data_dir: str) -> str | None:
    try:
        pid = holder_pid(data_dir)
    except OSError as error:
        return f"cannot be asked for: {error.strerror}; run this as the user of the service"
    return None if pid is None else f"a service runs on it as process {pid}; stop it before you start another"


def _address_problem(settings: Settings) -> str | None:
    try:
        listeners = listen(settings.host, settings.port)
    except AddressError as error:
        return str(error)
    for listener in listeners:
        listener.close()
    return None
