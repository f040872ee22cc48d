"""`topics-supervisor`: run the service, check whether it could run, show its status, reload its keys, stop it."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import msgspec

from topics import __version__
from topics.core.clock import SystemClock
from topics.setting_values import show_bytes
from topics.settings import COMMAND_LINE_ONLY, PREFIX, SECRET, VARIABLES, Settings, SettingsError, load, read_keys
from topics.shm.control import ProcessState
from topics.storage.filesystem import said
from topics.storage.lock import running_supervisor
from topics.supervisor.signals import Signals
from topics.supervisor.status import Status, StatusReader, render
from topics.terminal import CLEAR, SHELLS, OptionParser, completions, paint_for
from topicsd import guarded

EXIT_IN_THE_WAY: Final = 1
EXIT_BAD_SETTINGS: Final = 2
EXIT_DEGRADED: Final = 1
EXIT_NOT_RUNNING: Final = 3
EXIT_UNKNOWN: Final = 4
EXIT_LEADS: Final = 5
STOP_MARGIN_MS: Final = 5_000
RELOAD_TIMEOUT_MS: Final = 10_000
PROMOTE_TIMEOUT_MS: Final = 60_000
RATE_SAMPLE_S: Final = 0.1
POLL_MS: Final = 10
WATCH_INTERVAL_MS: Final = 1_000

_RUN_CODES = """exit codes:
  0  stopped as asked
  1  could not start: data directory, lock, shared memory, address, limits (the message says which)
  2  bad settings or usage
  4  stopped as asked, but a process had to be killed
  78 the data cannot be used as they are: the log is damaged and needs a decision (a log line says where, and what
     would be lost), or another release wrote the data (a log line says how to go on)"""
_CHECK_CODES = """exit codes:
  0  `run` would start
  1  something is in the way
  2  bad settings or usage"""
_STATUS_CODES = """exit codes:
  0  running, every process ready
  1  starting, recovering, degraded, draining or taken over
  2  bad settings or usage
  3  not running
  4  cannot be known (no access, or a service of another release)"""
_RELOAD_CODES = """exit codes:
  0  every frontend uses the keys as they are now
  1  the former keys stay (the service's log says why), it took too long, or the service belongs to another user
  2  bad settings or usage
  3  not running"""
_STOP_CODES = """exit codes:
  0  stopped, or nothing was running
  1  still running after the grace, or the service belongs to another user
  2  bad settings or usage"""

_PROMOTE_CODES = """The former leader can acknowledge nothing as archived any more, even if it hangs now, and only reads
once it notices. All that it had shipped is here. The rest is lost, and told: topics have another epoch and a gap.

exit codes:
  0  the service leads, and every process is ready; with --cancel: the promotion is withdrawn
  1  not promoted within the time, or refused: the service's log says why. After the time it goes on to try: --cancel
     ends that, unless it has begun to take over, as the message says then. With --cancel: too late, or none waits
  2  bad settings or usage
  3  not running
  5  it leads already"""
_COMPLETION_EXAMPLES = """examples:
  topics-supervisor completion bash > ~/.local/share/bash-completion/completions/topics-supervisor
  topics-supervisor completion zsh > "${fpath[1]}/_topics-supervisor"
  topics-supervisor completion fish > ~/.config/fish/completions/topics-supervisor.fish"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.Namespace(command=None)
    code = guarded("topics-supervisor", lambda: _parse_and_do(arguments, options))
    return _do(options) if options.command is _run and not code else code


def _parse_and_do(arguments: Sequence[str] | None, options: argparse.Namespace) -> int:
    """Fill `options`, and do what they say unless that is `run`: an OSError of the service is none of its output."""
    _parser().parse_args(arguments, options)
    return 0 if options.command is _run else _do(options)


def _do(options: argparse.Namespace) -> int:
    try:
        return int(options.command(load(os.environ, _flags(options)), options))
    except SettingsError as error:
        for problem in error.problems:
            print(f"topics-supervisor: {problem}", file=sys.stderr)
        return EXIT_BAD_SETTINGS


def _flags(options: argparse.Namespace) -> dict[str, str]:
    names = (*VARIABLES, *COMMAND_LINE_ONLY)
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _run(settings: Settings, options: argparse.Namespace) -> int:
    from topics.supervisor.run_command import run  # with a web framework, which the other commands must not wait for

    return run(settings, os.environ, _flags(options))


def _check(settings: Settings, options: argparse.Namespace) -> int:
    from topics.supervisor.check import check

    read_keys(settings)
    findings = check(settings)
    if options.json:
        print(msgspec.json.encode(findings).decode())
    for subject, problem in [] if options.json else findings:
        print(f"{'ok  ' if problem is None else 'FAIL'} {subject}" + (f": {problem}" if problem else ""))
    return EXIT_IN_THE_WAY if any(finding.problem for finding in findings) else 0


def _status(settings: Settings, options: argparse.Namespace) -> int:
    reader = StatusReader(settings.data_dir, SystemClock())
    try:
        if options.watch:
            return _watch(reader, options)
        status = reader.read()
        if status.processes:
            time.sleep(RATE_SAMPLE_S)
            status = reader.read()
    except OSError as error:
        print(f"topics-supervisor: status cannot be read: {said(error)}", file=sys.stderr)
        return EXIT_UNKNOWN
    _print_status(status, options)
    return {"running": 0, "stopped": EXIT_NOT_RUNNING}.get(status.state, EXIT_DEGRADED)


def _watch(reader: StatusReader, options: argparse.Namespace) -> int:
    """Print the status every second until a signal comes, which never interrupts a line."""
    with Signals() as signals:
        while True:
            _print_status(reader.read(), options)
            if (number := signals.wait(WATCH_INTERVAL_MS)) is not None:
                return 128 + number


def _print_status(status: Status, options: argparse.Namespace) -> None:
    if options.json:
        print(msgspec.json.encode(status).decode(), flush=True)
        return
    if options.watch and sys.stdout.isatty():
        print(CLEAR, end="")
    print(render(status, paint_for(sys.stdout, os.environ)), end="", flush=True)


def _reload(settings: Settings, options: argparse.Namespace) -> int:
    try:
        pid = reload(settings.data_dir, RELOAD_TIMEOUT_MS)
    except ReloadRefused:
        reason = "the new keys cannot be used, the former ones stay; the service's log says what is wrong"
    except OSError as error:
        reason = said(error)
    else:
        print("not running" if pid is None else f"process {pid} has reloaded its keys")
        return EXIT_NOT_RUNNING if pid is None else 0
    print(f"topics-supervisor: not reloaded: {reason}", file=sys.stderr)
    return 1


def _stop(settings: Settings, options: argparse.Namespace) -> int:
    try:
        pid = stop(settings.data_dir, settings.shutdown_grace_ms + STOP_MARGIN_MS)
    except OSError as error:
        print(f"topics-supervisor: not stopped: {said(error)}", file=sys.stderr)
        return 1
    print("not running" if pid is None else f"stopped process {pid}")
    return 0


def _promote(settings: Settings, options: argparse.Namespace) -> int:
    from topics.supervisor.promote import NotFollowingError, cancel, promote

    work, what = (cancel, "withdrawn") if options.cancel else (promote, "promoted")
    try:
        done = work(settings.data_dir, options.timeout_ms)
    except NotFollowingError:
        problem, code = "the service follows no other one: it leads", EXIT_LEADS
    except OSError as error:
        problem, code = said(error), EXIT_DEGRADED
    else:
        if done is None:
            way_out = "" if options.cancel else ": start it, it promotes nothing by itself"
            problem, code = f"not running{way_out}", EXIT_NOT_RUNNING
        else:
            print(msgspec.json.encode(done).decode() if options.json else done.words)
            return 0
    print(f"topics-supervisor: not {what}: {problem}", file=sys.stderr)
    return code


def _completion(settings: Settings, options: argparse.Namespace) -> int:
    print(completions(_parser(), options.shell, {}))
    return 0


def stop(data_dir: str, timeout_ms: int) -> int | None:
    """Stop the service. Return its pid, None if none ran. Raise OSError if it is another user's, or still runs."""
    with suppress(ProcessLookupError), running_supervisor(data_dir) as (pid, process_fd):
        signal.pidfd_send_signal(process_fd, signal.SIGTERM)
        poll = select.poll()
        poll.register(process_fd, select.POLLIN)
        if not poll.poll(timeout_ms):
            raise TimeoutError(f"process {pid} still runs after {timeout_ms} ms")
        return pid
    return None


class ReloadRefused(Exception):  # noqa: N818 — named for what it is
    """The service read its keys again, found them unusable and keeps the former ones."""


def reload(data_dir: str, timeout_ms: int) -> int | None:
    """Send SIGHUP to the data directory's service, or its next life, and wait until every frontend uses the new keys.

    Return the service's pid, None when nothing ran. Raise ReloadRefused; TimeoutError when a frontend still uses the
    former keys after `timeout_ms`; PermissionError when the service belongs to another user; OSError when its control
    page cannot be read.
    """
    with suppress(ProcessLookupError), running_supervisor(data_dir) as (pid, process_fd):
        reader = StatusReader(data_dir, SystemClock())
        page, life, reloads, serial = reader.page(), 0, 0, 0
        if page is not None:
            life, reloads, serial = (page.header.get(word) for word in ("started_ms", "reloads", "keys_serial"))
        signal.pidfd_send_signal(process_fd, signal.SIGHUP)
        deadline_s, poll = time.monotonic() + timeout_ms / 1000, select.poll()
        poll.register(process_fd, select.POLLIN)
        while not poll.poll(POLL_MS):
            if page is not None and page.header.get("reloads") != reloads:
                if page.header.get("keys_serial") == serial:
                    raise ReloadRefused
                if page.all_use_newest_keys():
                    return pid
            elif (
                page is None
                or page.header.get("state") == ProcessState.STOPPED
                or page.header.get("supervisor_pid") != pid  # of a service that was killed
            ):
                newer = reader.page()
                if newer is not None and newer.header.get("started_ms") not in (0, life):
                    page, life, reloads, serial = newer, newer.header.get("started_ms"), 0, 0
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"process {pid} has not reloaded its keys after {timeout_ms} ms")
    return None


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="topics-supervisor",
        description="Runs topics, a persistent event engine. Every setting is a flag, an environment variable and an"
        " entry of the TOML file that TOPICS_CONFIG names; the flag wins, then the environment.",
    )
    parser.add_argument("--version", action="version", version=f"topics {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        command: Callable[[Settings, argparse.Namespace], int], help: str, codes: str, *names: str
    ) -> argparse.ArgumentParser:
        name, form = command.__name__.removeprefix("_"), argparse.RawDescriptionHelpFormatter
        added = commands.add_parser(name, help=help, description=help, epilog=codes, formatter_class=form)
        _add_settings(added, *names)
        added.set_defaults(command=command)
        return added

    run = add(_run, "run the service in the foreground", _RUN_CODES, *VARIABLES)
    run.add_argument(
        "--accept-data-loss", action="store_true", default=None, help=COMMAND_LINE_ONLY["accept_data_loss"].help
    )
    checking = add(_check, "say whether `run` would start", _CHECK_CODES, *VARIABLES)
    checking.add_argument("--json", action="store_true", help="one JSON list of what was checked")
    status = add(_status, "show a running service", _STATUS_CODES, "config", "data_dir")
    status.add_argument("--json", action="store_true", help="one JSON object a line")
    status.add_argument("--watch", action="store_true", help="every second, until interrupted")
    add(_reload, "have a running service read its keys again", _RELOAD_CODES, "config", "data_dir")
    help = "have a running service that follows another one take over from it"
    promoting = add(_promote, help, _PROMOTE_CODES, "config", "data_dir")
    promoting.add_argument("--json", action="store_true", help="one JSON object")
    promoting.add_argument("--cancel", action="store_true", help="withdraw a promotion that has not begun to take over")
    promoting.add_argument(
        "--timeout-ms", type=int, default=PROMOTE_TIMEOUT_MS, help="how long to wait, default %(default)s"
    )
    completion = add(_completion, "print completions for bash, zsh or fish", _COMPLETION_EXAMPLES)
    completion.add_argument("shell", choices=SHELLS, help="whose completions")
    add(_stop, "stop a running service gracefully", _STOP_CODES, "config", "data_dir", "shutdown_grace_ms")
    return parser


def _add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add a flag for each setting; its help names the variable and the default. `load` checks the values."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    for name in names:
        if name in SECRET:
            parser.add_argument("--" + name.replace("_", "-"), nargs="?", action=_SecretFlag, help=argparse.SUPPRESS)
            continue
        default = defaults[name]
        switch = default is False
        shown = show_bytes(default) if name.endswith("_bytes") and isinstance(default, int) else default
        known = f", default {shown}" if not switch and default not in (None, msgspec.NODEFAULT) else ""
        parser.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            metavar="1|0" if switch else name.rpartition("_")[2].upper(),
            nargs="?" if switch else None,
            const="1" if switch else None,
            help=f"{VARIABLES[name].help} [{PREFIX}{name.upper()}{known}]",
        )


class _SecretFlag(argparse.Action):
    """A flag for a secret: it is refused with a reason. For an unknown flag, argparse would repeat the secret."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        variable, file = PREFIX + self.dest.upper(), f"{self.dest}_file"
        other = f"{variable}_FILE" if file in VARIABLES else f"{self.dest} in the file that TOPICS_CONFIG names"
        parser.error(
            f"{self.option_strings[0]}: every user of this machine sees command lines; set {variable} or {other}, and"
            " replace the keys that were just shown"
        )
