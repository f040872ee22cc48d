"""`topics-supervisor run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from threading import Thread
from typing import Final

from topics.archive.follow_main import run as run_follower
from topics.archive.main import run as run_archiver
from topics.compactor.main import run as run_compactor
from topics.core.clock import SystemClock
from topics.frontend.main import run as run_frontend
from topics.setting_values import overlap
from topics.settings import PREFIX, SECRET, Settings, is_loopback, load
from topics.supervisor import preparing
from topics.supervisor.children import ChildMains
from topics.supervisor.listeners import AddressError, inherited
from topics.supervisor.main import StartError, serve
from topics.supervisor.notify import Notify
from topics.walshard.main import run as run_walshard

EXIT_CANNOT_START: Final = 1
PLACES_TIMEOUT_S: Final = 5.0
MAINS: Final = ChildMains(
    frontend=run_frontend,
    walshard=run_walshard,
    compactor=run_compactor,
    archiver=run_archiver,
    follower=run_follower,
    reshard=preparing.run,
    needs_reshard=preparing.is_needed,
    take_role=preparing.take_role,
)


def run(settings: Settings, environ: MutableMapping[str, str], flags: Mapping[str, str]) -> int:
    """Run the service until it is stopped; return the exit code. `flags` are the settings of the command line, which
    come before those of `environ`.
    """
    try:
        listeners = inherited(environ)
        if listeners:
            # Check the settings with the addresses of these sockets: an address that others can reach needs keys.
            addresses = [listener.getsockname() for listener in listeners]
            host, port, *_ = next((address for address in addresses if not is_loopback(address[0])), addresses[0])
            settings = load(environ, dict(flags) | {"host": host, "port": str(port)})
        for name in SECRET:
            # The settings have a digest of the secret. The children must not inherit the secret itself.
            environ.pop(PREFIX + name.upper(), None)
        _require_apart(settings)
        return serve(settings, MAINS, _make_notify(environ), inherited=listeners)
    except (AddressError, StartError) as refusal:
        print(f"topics-supervisor: cannot start: {refusal}", file=sys.stderr)
        return EXIT_CANNOT_START


def _require_apart(settings: Settings) -> None:
    """Raise StartError if an archive lies in the data directory, or around it. A disk that hangs holds up no start
    for long: the service starts without its archive, too.
    """
    found: list[str] = []

    def look() -> None:
        for place in filter(None, (settings.archive_url, settings.follow)):
            if problem := overlap(settings.data_dir, place):
                found.append(f"the archive {place}: {problem}")

    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(PLACES_TIMEOUT_S)
    if found:
        raise StartError(found[0])


def _make_notify(environ: MutableMapping[str, str]) -> Notify:
    bar = None
    if sys.stderr.isatty():
        from topics.supervisor.start_bar import StartBar

        bar = StartBar()
    return Notify.of(environ, SystemClock(), bar)
