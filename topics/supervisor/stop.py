"""Stopping a service that runs as another process."""

from __future__ import annotations

import select
import signal

from topics.supervisor.holder import holder


def stop(data_dir: str, patience_ms: int) -> int | None:
    """SIGTERM to the data directory's service, and waits for its end.

    Returns the pid that has ended, None when nothing ran. Raises TimeoutError when it still runs after `patience_ms`
    and PermissionError when it belongs to somebody else.
    """
    with holder(data_dir) as service:
        if service is None:
            return None
        try:
            service.signal(signal.SIGTERM)
        except ProcessLookupError:
            return None
        poll = select.poll()
        poll.register(service.process_fd, select.POLLIN)
        if not poll.poll(patience_ms):
            raise TimeoutError(f"process {service.pid} still runs after {patience_ms} ms")
        return service.pid
