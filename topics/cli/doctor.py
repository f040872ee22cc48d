"""`topics doctor`: what is wrong with this installation or its service, in sentences with the way out.

Each check is a function of values, and returns findings. `examine` collects them; it looks at this machine and asks the
service, and changes neither.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

import msgspec

import topicsd
from topics import __version__
from topics.cli import shared
from topics.cli.shared import EXIT_FOUND, UsageError, connect, key_file_of, print_line, put, url_of
from topics.client import ApiError, ClientError, NotAllowedError, ServiceBusyError, UnreachableError, calls
from topics.terminal import Paint, paint_for

DISTRIBUTION: Final = "topicsd"
EXTRAS: Final = {"server": sorted(topicsd.SERVER_MODULES), "spark": ["pyspark", "pyarrow"], "delta": ["deltalake"]}
FREE_SHARE_MIN: Final = 0.05
FREE_BYTES_MIN: Final = 1 << 30
AHEAD_MAX_S: Final = 60
UNITS: Final = ("/etc/systemd/system/topics.service", "/usr/lib/systemd/system/topics.service")
NTP_FOLDER: Final = "/run/systemd/timesync"
ASK_S: Final = 2.0
CHECK_TIMEOUT_S: Final = 30.0
_RELEASED_S: Final = 1_760_000_000
"""A time before this version, in seconds: a clock that shows less is wrong."""
_RUN: Final = "import sys, topicsd; sys.exit(topicsd.topics_supervisor())"
_STYLES: Final = {"ok": "good", "note": "faint", "bad": "bad"}
_EPILOG: Final = """examples:
  topics doctor
  topics doctor --data-dir /var/lib/topics --json

exit codes:
  0  nothing is wrong; notes are no fault
  2  usage
  6  something is wrong: each line that begins with `bad` says what, and the way out"""


class Diagnosis(NamedTuple):
    """The result of one check. `text` says what is wrong, or worth knowing, and the way out."""

    level: Literal["ok", "note", "bad"]
    subject: str
    text: str


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what is wrong with this installation, the settings in this environment, or the service that they name: "
        "packages, versions, data directory, shared memory, limits, disk, clock, modes of key files, units, and "
        "whether the service answers. Nothing is changed."
    )
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    shared.add_where(parser)
    parser.add_argument("--data-dir", metavar="DIR", help="the service's data directory (TOPICS_DATA_DIR)")
    parser.add_argument("--json", action="store_true", help="as NDJSON, a line for each check")
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    found = list(examine(options))
    if options.json:
        for one in found:
            print_line(one._asdict())
    else:
        put(render(found, paint_for(sys.stdout, options.environment)).encode())
    return EXIT_FOUND if any(one.level == "bad" for one in found) else 0


def render(found: Sequence[Diagnosis], paint: Paint) -> str:
    """Return the checks as lines, and a last one that counts what is wrong."""
    lines = [f"{paint(one.level.ljust(4), _STYLES[one.level])} {one.subject}: {one.text}" for one in found]
    bad = sum(one.level == "bad" for one in found)
    last = f"{bad} {'thing is' if bad == 1 else 'things are'} wrong" if bad else "nothing is wrong"
    return "".join(f"{line}\n" for line in [*lines, last])


def examine(options: argparse.Namespace) -> Iterator[Diagnosis]:
    environment = options.environment
    data_dir = options.data_dir or environment.get("TOPICS_DATA_DIR")
    yield python(sys.version_info[:2])
    yield from packages({one.name.lower(): one.version for one in metadata.distributions() if one.name})
    yield program(shutil.which("topics"), os.path.dirname(sys.executable))
    missing = {extra: [name for name in names if find_spec(name) is None] for extra, names in EXTRAS.items()}
    yield from extras(missing)
    if not missing["server"]:
        yield from service_checks(environment, options.data_dir)
    if data_dir is not None:
        yield from disk(data_dir)
    newest_s = None if data_dir is None else newest_write_s(data_dir)
    synchronized = os.path.exists(f"{NTP_FOLDER}/synchronized") if os.path.isdir(NTP_FOLDER) else None
    yield clock(time.time(), newest_s, synchronized)
    for name, path in (("key file", key_file_of(options)), ("keys", environment.get("TOPICS_API_KEYS_FILE"))):
        if path:
            yield key_file(name, path)
    yield from unit(UNITS)
    yield from service(options)


def python(version: tuple[int, ...]) -> Diagnosis:
    shown = ".".join(map(str, version))
    if version < (3, 11):
        return Diagnosis("bad", "Python", f"{shown} is too old: make the environment with Python 3.11 or newer")
    return Diagnosis("ok", "Python", shown)


def packages(versions: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Judge the distributions that are installed: ours, and a stranger's that is called like our package."""
    ours = versions.get(DISTRIBUTION)
    if ours is None:
        yield Diagnosis("note", "package", f"topics {__version__} runs from a folder and is not installed")
    elif ours != __version__:
        text = f"{ours} is installed and {__version__} runs: pip install --force-reinstall {DISTRIBUTION}"
        yield Diagnosis("bad", "package", text)
    else:
        yield Diagnosis("ok", "package", f"{DISTRIBUTION} {ours}")
    if "topics" in versions:
        text = (
            f"the distribution topics {versions['topics']} is somebody else's and shares our package's name: "
            f"pip uninstall topics, then pip install --force-reinstall --no-deps {DISTRIBUTION}"
        )
        yield Diagnosis("bad", "stranger", text)


def program(found: str | None, here: str) -> Diagnosis:
    """Judge the program that a shell finds as `topics`; `here` is the folder of this one."""
    if found is None:
        return Diagnosis("note", "program", f"no `topics` is in PATH: add {here} to it")
    if os.path.realpath(os.path.dirname(found)) != os.path.realpath(here):
        return Diagnosis("note", "program", f"a shell runs {found}, another one than this in {here}: mind PATH")
    return Diagnosis("ok", "program", found)


def extras(missing: Mapping[str, Sequence[str]]) -> Iterator[Diagnosis]:
    for extra, names in missing.items():
        if names:
            text = f"not installed ({', '.join(names)}); if it is needed here: pip install '{DISTRIBUTION}[{extra}]'"
            yield Diagnosis("note", f"extra {extra}", text)
        else:
            yield Diagnosis("ok", f"extra {extra}", "installed")


def service_checks(environment: Mapping[str, str], data_dir: str | None) -> list[Diagnosis]:
    """Ask `topics-supervisor check`, which judges settings, data directory, shared memory, address and limits."""
    command = [sys.executable, "-c", _RUN, "check", "--json", *([] if data_dir is None else ["--data-dir", data_dir])]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"`topics-supervisor check` has not ended within {CHECK_TIMEOUT_S:g} s: is a disk hanging?"
        return [Diagnosis("bad", "settings", text)]
    return judge_checks(done.stdout, done.stderr)


def judge_checks(printed: str, said: str) -> list[Diagnosis]:
    """Return the output of `check --json` as diagnoses. A service that runs holds lock and address, as it should."""
    if not printed.strip():
        return [Diagnosis("bad", "settings", line.removeprefix("topics-supervisor: ")) for line in said.splitlines()]
    checks = msgspec.json.decode(printed, type=list[dict[str, str | None]])
    runs = any(one["subject"] == "lock" and "a service holds it" in (one["problem"] or "") for one in checks)
    found = []
    for one in checks:
        subject, problem = one["subject"] or "", one["problem"]
        if runs and problem and (subject == "lock" or subject.startswith(("address ", "shared memory"))):
            found.append(Diagnosis("ok", subject, "in use by the service that runs"))
        else:
            found.append(Diagnosis("ok" if problem is None else "bad", subject, problem or "as a start needs it"))
    return found


def disk(data_dir: str) -> Iterator[Diagnosis]:
    if not os.path.isdir(data_dir):
        yield Diagnosis("note", "disk", f"{data_dir} is not there yet: the first start makes it")
        return
    figures = shutil.disk_usage(data_dir)
    yield disk_room(data_dir, figures.free, figures.total)


def disk_room(data_dir: str, free: int, total: int) -> Diagnosis:
    shown = f"{free / (1 << 30):.1f} GiB of {total / (1 << 30):.1f} GiB are free at {data_dir}"
    if free < FREE_BYTES_MIN or free < total * FREE_SHARE_MIN:
        return Diagnosis("bad", "disk", f"{shown}: delete records, set cap_bytes or ttl_ms, or give it a larger disk")
    return Diagnosis("ok", "disk", shown)


def newest_write_s(data_dir: str) -> float | None:
    """Return when a log or snapshot was written last, in seconds since the epoch; None when nothing can be seen."""
    times = []
    for folder in ("wal", "meta"):
        for place, _, files in os.walk(os.path.join(data_dir, folder)):
            for file in files:
                try:
                    times.append(os.stat(os.path.join(place, file)).st_mtime)
                except OSError:
                    continue
    return max(times, default=None)


def clock(now_s: float, newest_s: float | None, synchronized: bool | None) -> Diagnosis:
    """Judge the wall clock by this release's age, the newest file of the data, and the time service."""
    if now_s < _RELEASED_S:
        return Diagnosis(
            "bad", "clock", f"it shows {time.strftime('%Y-%m-%d', time.gmtime(now_s))}: set it, by NTP best"
        )
    if newest_s is not None and newest_s > now_s + AHEAD_MAX_S:
        text = f"data were written {newest_s - now_s:.0f} s in the future: the clock went back; set it before a start"
        return Diagnosis("bad", "clock", text)
    if synchronized is False:
        return Diagnosis("note", "clock", "no time server has been reached since boot; see timedatectl timesync-status")
    return Diagnosis("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)))


def key_file(name: str, path: str) -> Diagnosis:
    subject = f"{name} {path}"
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        return Diagnosis("bad", subject, f"{error.strerror}: correct the variable that names it, or make the file")
    if mode & 0o077:
        return Diagnosis("bad", subject, f"others may use it (mode {mode:03o}): chmod 600 {path}")
    return Diagnosis("ok", subject, f"mode {mode:03o}")


def unit(paths: Sequence[str]) -> Iterator[Diagnosis]:
    """Judge the installed unit of systemd, if there is one: the program that it starts has to be there."""
    path = next(filter(os.path.exists, paths), None)
    if path is None:
        return
    with open(path, encoding="utf-8") as file:
        started = re.search(r"(?m)^ExecStart=[-@:+!|]*(\S+)", file.read())
    if started is None or not os.access(started[1], os.X_OK):
        what = "nothing" if started is None else started[1]
        yield Diagnosis("bad", f"unit {path}", f"it starts {what}, which is no program here: correct ExecStart=")
    else:
        yield Diagnosis("ok", f"unit {path}", f"starts {started[1]}")


def service(options: argparse.Namespace) -> Iterator[Diagnosis]:
    """Ask the service: whether it answers, is of this version, is ready, and takes the key."""
    subject = f"service {url_of(options)}"
    named = hasattr(options, "url") or bool(options.environment.get("TOPICS_URL"))
    try:
        with connect(options, patience_s=ASK_S) as client:
            version = client.call(calls.health()).version
            if version != __version__:
                text = f"it is version {version} and this is {__version__}: upgrade one of them"
                yield Diagnosis("note", subject, text)
            state = client.call(calls.ready())
            if state.read_only_shards:
                text = f"shards {state.read_only_shards} refuse writes: the service's log says why, often a full disk"
                yield Diagnosis("bad", subject, text)
            rights = client.call(calls.key_rights())
            scopes = f"; the key may {', '.join(rights.scopes)}" if rights.keys else "; no keys are needed"
            yield Diagnosis("ok", subject, f"ready, {state.topics} topics, pressure {state.pressure:.2f}{scopes}")
    except UsageError as error:
        yield Diagnosis("bad", subject, str(error))
    except UnreachableError:
        text = "nothing answers: start one (topics-supervisor run), or name it with --url or TOPICS_URL"
        yield Diagnosis("bad" if named else "note", subject, text)
    except NotAllowedError as error:
        yield Diagnosis("bad", subject, f"{error.message}; name the file of a valid key with --key-file")
    except ServiceBusyError as error:
        text = f"{error.code}: {error.message}; wait, and look at topics-supervisor status"
        yield Diagnosis("bad", subject, text)
    except ApiError as error:
        yield Diagnosis("bad", subject, f"{error.message} ({error.status}): is that the address of a topics service?")
    except ClientError as error:
        yield Diagnosis("bad", subject, f"{error}: correct --url or TOPICS_URL")
