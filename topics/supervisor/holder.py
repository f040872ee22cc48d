"""The service of a data directory, as another process that can be signalled."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from topics.storage.lock import holder_pid


class Holder(NamedTuple):
    """`process_fd` means this one process for good; the number may be given to another one after its end."""

    pid: int
    process_fd: int

    def signal(self, number: signal.Signals) -> None:
        """PermissionError when it belongs to somebody else, ProcessLookupError when it has ended."""
        signal.pidfd_send_signal(self.process_fd, number)


@contextmanager
def holder(data_dir: str) -> Iterator[Holder | None]:
    """The supervisor that holds the lock of `data_dir`, None when nothing runs."""
    pid = holder_pid(data_dir)
    process_fd = None
    if pid is not None:
        try:
            process_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            pid = None
    try:
        if pid is None or process_fd is None or holder_pid(data_dir) != pid:
            yield None
        else:
            yield Holder(pid, process_fd)
    finally:
        if process_fd is not None:
            os.close(process_fd)
