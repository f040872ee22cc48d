"""`topics doctor`: what is wrong with this installation or its service, in sentences with the way out.

Each check is a function of values. `examine` looks at this machine, asks the service, and changes neither.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

import topicsd
from topics import __version__
from topics.cli import shared
from topics.cli.shared import EXIT_FOUND, key_file_of, print_items, url_of
from topics.client import Client, ClientError, NotAllowedError, ServiceBusyError, UnreachableError, calls
from topics.terminal import Cell, Styled, plural

DISTRIBUTION: Final = "topicsd"
EXTRAS: Final = {
    "server": sorted(topicsd.SERVER_MODULES),
    "spark": ["pyspark", "pyarrow"],
    "delta": ["deltalake"],
    "bucket": [topicsd.BUCKET_MODULE],
}
FREE_SHARE_MIN, FREE_BYTES_MIN = 0.05, 1 << 30
AHEAD_MAX_S: Final = 60
UNITS: Final = ("/etc/systemd/system/topics.service", "/usr/lib/systemd/system/topics.service")
NTP_DIR: Final = "/run/systemd/timesync"
NOTHING_ANSWERS: Final = "nothing answers"
ASK_S: Final = 2.0
CHECK_S: Final = 30.0
_RELEASED_S: Final = 1_760_000_000
"""A time before this version, in seconds: a clock that shows less is wrong."""
_RUN: Final = "import sys, topicsd; sys.exit(topicsd.topics_supervisor())"
_STYLES: Final = {"ok": "good", "note": "faint", "bad": "bad"}
_EXAMPLES: Final = """  topics doctor
  topics doctor --data-dir /var/lib/topics --json"""


class Diagnosis(msgspec.Struct, frozen=True):
    """The result of one check. `text` says what is wrong, or worth knowing, and the way out."""

    level: Literal["ok", "note", "bad"]
    subject: str
    text: str


def fill(parser: argparse.ArgumentParser) -> None:
    about = (
        "Say what is wrong with this installation, the settings in this environment, or the service that they name: "
        "packages, versions, data directory, shared memory, limits, disk, clock, modes of key files, units, and "
        "whether the service answers. Nothing is changed. The exit code is 6 if a line begins with `bad`."
    )
    shared.fill(parser, "doctor", _doctor, about=about, examples=_EXAMPLES)
    parser.set_defaults(patience_s=ASK_S)
    parser.add_argument("--data-dir", metavar="DIR", help="the service's data directory (TOPICS_DATA_DIR)")
    parser.add_argument("--json", action="store_true", help="as NDJSON, a line for each check")


def _doctor(client: Client, options: argparse.Namespace) -> int:
    answer, asked = service(client, options), urlsplit(url_of(options).partition(",")[0])
    is_here = NOTHING_ANSWERS not in answer.text and asked.hostname in ("127.0.0.1", "localhost", "::1")
    found = [*examine(options, asked.port if is_here else None), answer]
    print_items(found, options, "LEVEL SUBJECT FINDING", _row, 3)
    return EXIT_FOUND if any(one.level == "bad" for one in found) else 0


def _row(one: Diagnosis) -> Sequence[Cell]:
    return (Styled(one.level, _STYLES[one.level]), one.subject, one.text)


def examine(options: argparse.Namespace, port: int | None) -> Iterator[Diagnosis]:
    """Yield a diagnosis of each thing here. A service answers at `port`, if that is not None."""
    environment = options.environment
    yield from packages({one.name.lower(): one.version for one in metadata.distributions() if one.name})
    missing = {extra: [name for name in names if find_spec(name) is None] for extra, names in EXTRAS.items()}
    yield from extras(missing)
    if not missing["server"]:
        yield from service_checks(environment, options.data_dir, port)
    newest_s = None
    data_dir = options.data_dir or environment.get("TOPICS_DATA_DIR")
    if data_dir is not None and os.path.isdir(data_dir):
        with suppress(PermissionError):
            newest_s = max(os.fstat(fd).st_mtime for _, _, _, fd in os.fwalk(os.path.realpath(data_dir)))
        yield disk_room(data_dir, *shutil.disk_usage(data_dir)[::2])
    yield clock(time.time(), newest_s, not os.path.isdir(NTP_DIR) or os.path.exists(f"{NTP_DIR}/synchronized"))
    for path in filter(None, (key_file_of(options), environment.get("TOPICS_API_KEYS_FILE"))):
        yield key_file(path)
    for path in filter(os.path.exists, UNITS):
        with open(path, encoding="utf-8") as file:
            yield unit(path, file.read())


def packages(versions: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Judge the distributions that are installed: ours, and a stranger's that is called like our package."""
    ours = versions.get(DISTRIBUTION)
    if ours is None:
        yield Diagnosis("note", "package", f"topics {__version__} runs from a folder and is not installed")
    elif ours != __version__:
        text = f"{ours} is installed and {__version__} runs: pip install --force-reinstall {DISTRIBUTION}"
        yield Diagnosis("bad", "package", text)
    else:
        yield Diagnosis("ok", "package", f"{DISTRIBUTION} {ours}, Python {platform.python_version()}")
    if "topics" in versions:
        text = f"topics {versions['topics']} is somebody else's and has our package's name: pip uninstall topics, then"
        yield Diagnosis("bad", "stranger", f"{text} pip install --force-reinstall --no-deps {DISTRIBUTION}")


def extras(missing: Mapping[str, Sequence[str]]) -> Iterator[Diagnosis]:
    for extra, names in missing.items():
        text = f"{', '.join(names)} missing; if it is needed here: pip install '{DISTRIBUTION}[{extra}]'"
        yield Diagnosis("note", f"extra {extra}", text) if names else Diagnosis("ok", f"extra {extra}", "installed")


def service_checks(environment: Mapping[str, str], data_dir: str | None, port: int | None) -> list[Diagnosis]:
    """Ask `topics-supervisor check`, which judges settings, data directory, shared memory, address and limits."""
    command = [sys.executable, "-c", _RUN, "check", "--json", *([] if data_dir is None else ["--data-dir", data_dir])]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except subprocess.TimeoutExpired:
        text = f"`topics-supervisor check` has not ended within {CHECK_S:g} s: is a disk hanging?"
        return [Diagnosis("bad", "settings", text)]
    return judge_checks(done.stdout, done.stderr, port)


def judge_checks(printed: str, said: str, port: int | None = None) -> list[Diagnosis]:
    """Return the output of `check --json` as diagnoses. A service that runs holds lock and address, as it should; one
    of another data directory, which answers at `port`, the address alone.
    """
    if not printed.strip():
        return [Diagnosis("bad", "settings", line.removeprefix("topics-supervisor: ")) for line in said.splitlines()]
    checks = msgspec.json.decode(printed, type=list[tuple[str, str | None]])
    runs = any(subject == "lock" and "a service holds it" in (problem or "") for subject, problem in checks)
    found = []
    for subject, problem in checks:
        is_held = subject.startswith(("lock", "address ", "shared memory")) if runs else subject.endswith(f":{port}")
        if is_held and problem:
            found.append(Diagnosis("ok", subject, "in use by the service that runs"))
        else:
            found.append(Diagnosis("bad" if problem else "ok", subject, problem or "as a start needs it"))
    return found


def disk_room(data_dir: str, total: int, free: int) -> Diagnosis:
    shown = f"{free / (1 << 30):.1f} GiB of {total / (1 << 30):.1f} GiB are free at {data_dir}"
    if free < FREE_BYTES_MIN or free < total * FREE_SHARE_MIN:
        return Diagnosis("bad", "disk", f"{shown}: delete records, set cap_bytes or ttl_ms, or give it a larger disk")
    return Diagnosis("ok", "disk", shown)


def clock(now_s: float, newest_s: float | None, synchronized: bool) -> Diagnosis:
    """Judge the wall clock by this release's age, the newest folder of the data, and the time service."""
    if now_s < _RELEASED_S:
        return Diagnosis("bad", "clock", f"it shows {time.strftime('%Y', time.gmtime(now_s))}: set it, by NTP best")
    if newest_s is not None and newest_s > now_s + AHEAD_MAX_S:
        text = f"data were written {newest_s - now_s:.0f} s in the future: the clock went back; set it before a start"
        return Diagnosis("bad", "clock", text)
    if not synchronized:
        return Diagnosis("note", "clock", "no time server has been reached since boot; see timedatectl timesync-status")
    return Diagnosis("ok", "clock", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s)))


def key_file(path: str) -> Diagnosis:
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        return Diagnosis("bad", f"key file {path}", f"{error.strerror}: make it, or correct the variable that names it")
    if mode & 0o077:
        return Diagnosis("bad", f"key file {path}", f"others may use it (mode {mode:03o}): chmod 600 {path}")
    return Diagnosis("ok", f"key file {path}", f"mode {mode:03o}")


def unit(path: str, text: str) -> Diagnosis:
    """Judge an installed unit of systemd: the program that it starts has to be there."""
    started = re.search(r"(?m)^ExecStart=[-@:+!|]*(\S+)", text)
    if started is None or not os.access(started[1], os.X_OK):
        what = "nothing" if started is None else started[1]
        return Diagnosis("bad", f"unit {path}", f"it starts {what}, which is no program here: correct ExecStart=")
    return Diagnosis("ok", f"unit {path}", f"starts {started[1]}")


def service(client: Client, options: argparse.Namespace) -> Diagnosis:
    """Ask the service: whether it answers, is of this version, is ready, and takes the key."""
    subject = f"service {url_of(options)}"
    try:
        version = client.call(calls.health()).version
        state, rights = client.call(calls.ready()), client.call(calls.key_rights())
    except UnreachableError:
        named = hasattr(options, "url") or options.environment.get("TOPICS_URL")
        text = f"{NOTHING_ANSWERS}: start one (topics-supervisor run), or name it with --url or TOPICS_URL"
        return Diagnosis("bad" if named else "note", subject, text)
    except NotAllowedError as error:
        return Diagnosis("bad", subject, f"{error.message}; name the file of a valid key with --key-file")
    except ServiceBusyError as error:
        return Diagnosis("bad", subject, f"{error.message} ({error.code}): wait, and look at topics-supervisor status")
    except ClientError as error:
        return Diagnosis("bad", subject, f"{error}: is that the address of a topics service?")
    if state.read_only_shards:
        text = f"shards {state.read_only_shards} refuse writes: the service's log says why, often a full disk"
        return Diagnosis("bad", subject, text)
    if state.hanging_shards:
        text = f"shards {state.hanging_shards} have no heartbeat: what is written to them waits; is a disk hanging?"
        return Diagnosis("bad", subject, text)
    if version != __version__:
        return Diagnosis("note", subject, f"it is version {version} and this is {__version__}: upgrade one of them")
    scopes = f"the key may {', '.join(rights.scopes)}" if rights.keys else "no keys are needed"
    return Diagnosis("ok", subject, f"ready, {plural(state.topics, 'topic')}, pressure {state.pressure:.2f}; {scopes}")
