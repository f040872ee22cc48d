"""Stopping a service that runs as another process."""

from __future__ import annotations

import os
import select
import signal

from topics.storage.lock import holder_pid


def stop(data_dir: str, patience_ms: int) -> int | None:
    """SIGTERM to the data directory's service, and waits for its end.

    Returns the pid that has ended, None when nothing ran. Raises TimeoutError when it still runs after `patience_ms`
    and PermissionError when it belongs to somebody else.
    """
    pid = holder_pid(data_dir)
    if pid is None:
        return None
    try:
        process_fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    try:
        # The descriptor means one process for good; the number may have been given to another one meanwhile.
        if holder_pid(data_dir) != pid:
            return None
        signal.pidfd_send_signal(process_fd, signal.SIGTERM)
        poll = select.poll()
        poll.register(process_fd, select.POLLIN)
        if not poll.poll(patience_ms):
            raise TimeoutError(f"process {pid} still runs after {patience_ms} ms")
    finally:
        os.close(process_fd)
    return pid
