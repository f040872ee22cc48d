"""Every setting of the service: one frozen object, read once at start (flags over environment over TOML over defaults).

A value that cannot be used is refused with the variable, the value and what is allowed. So is a variable that this
version does not know: a setting that is silently ignored is worse than a missing one.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import stat
import sys
import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

import msgspec

from topics.core.keys import ApiKey, KeyRing, KeysError, parse_lines
from topics.setting_values import (
    GIB,
    KIB,
    MIB,
    PIB,
    RefusedValueError,
    Variable,
    address,
    bucket_url,
    byte_size,
    choice,
    count,
    flag,
    hosts,
    http_url,
    integer,
    keys,
    kill_point,
    origins,
    path_name,
    ratio,
    secret,
)

PREFIX: Final = "TOPICS_"
CLIENT_VARIABLES: Final = frozenset({"TOPICS_URL", "TOPICS_KEY_FILE"})
"""Variables of `topics write` and the other client commands; a shell that starts a service may have them set."""
RING_BUDGET_BYTES: Final = 64 * MIB
"""The size of all request rings together, as far as RING_DEFAULT_BYTES (least, most of one) allows it."""
RING_DEFAULT_BYTES: Final = (1 * MIB, 4 * MIB)
SHARDS_DEFAULT_MAX: Final = 8
DAY_MS: Final = 86_400_000
TAKEOVER_MS_MIN: Final = 5_000
KEYS_FILE_BYTES_MAX: Final = 1 << 20
COMMAND_BYTES_MAX: Final = 2 * MIB
WATCHED_TOPIC_BYTES: Final = 512
"""Most bytes of a watch's body that one topic takes, including where it begins."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole effective configuration. `TOPICS_X` is field `x`; bytes and milliseconds say so in their names.

    Each field has its type, how its value may be written, its help text and its default.
    """

    config: Annotated[
        str | None, path_name("a TOML file with settings by lower-case names, without TOPICS_; the environment wins")
    ] = None
    data_dir: Annotated[str, path_name("directory of all data (default ./topics-data)")]
    host: Annotated[str, address("address to listen on")] = "127.0.0.1"
    port: Annotated[int, integer(0, 65535, "port to listen on; 0 = any free one")] = 4000
    port_file: Annotated[str | None, path_name("file that gets host:port once the socket listens")] = None
    wal_shards: Annotated[int, integer(1, 64, "WAL shard processes (default: CPUs, at most 8)")]
    frontends: Annotated[int, integer(1, 64, "HTTP processes (default: CPUs)")]
    api_keys: Annotated[tuple[ApiKey, ...] | None, keys("API keys; never a flag, others can read those")] = None
    api_keys_file: Annotated[
        str | None, path_name("file with keys, one a line; read again at `topics-supervisor reload`")
    ] = None
    probe_auth: Annotated[bool, flag("health and readiness need a key, too")] = False
    allow_insecure_no_auth: Annotated[bool, flag("listen on a non-loopback address without authentication")] = False
    max_body_bytes: Annotated[int, byte_size(1 * KIB, 1 * GIB, "largest request body, decompressed")] = 64 * MIB
    max_batch_records: Annotated[int, integer(1, 1_000_000, "most records in one write")] = 10_000
    max_record_bytes: Annotated[int, byte_size(16, 512 * MIB, "largest data + meta of one record")] = 1 * MIB
    max_meta_bytes: Annotated[int, byte_size(0, 16 * MIB, "largest meta of one record")] = 16 * KIB
    max_tag_bytes: Annotated[int, integer(1, 65535, "longest tag")] = 256
    max_node_bytes: Annotated[int, integer(1, 65535, "longest node")] = 128
    max_limit: Annotated[int, integer(1, 100_000, "most records in one answer")] = 1000
    max_watch_topics: Annotated[int, integer(1, 100_000, "most topics in one watch")] = 256
    max_topics: Annotated[int, count("most topics of the service; 0 = no limit")] = 100_000
    max_watch_sessions: Annotated[int, count("most watch sessions of the service; 0 = no limit")] = 10_000
    max_sse_connections: Annotated[
        int, count("most open event streams and WebSockets of the service; 0 = no limit")
    ] = 10_000
    max_sse_connections_per_key: Annotated[int, count("most of these with one API key; 0 = no limit")] = 1_000
    max_inflight_per_key: Annotated[int, count("most requests at once with one API key; 0 = no limit")] = 1_000
    max_connections: Annotated[int, count("most open connections of the service; 0 = no limit")] = 0
    max_claim: Annotated[int, integer(1, 10_000, "most jobs in one claim, and of one worker's stream")] = 1_000
    max_routers: Annotated[int, count("most routers of the service; 0 = no limit")] = 10_000
    max_total_bytes: Annotated[int, byte_size(0, PIB, "most live bytes of all topics together; 0 = no limit")] = 0
    max_metric_topics: Annotated[int, count("most topics with metrics of their own; 0 = none")] = 10_000
    allowed_hosts: Annotated[
        tuple[str, ...] | None, hosts("host names under which it is served without API keys, beside those of loopback")
    ] = None
    cors_origins: Annotated[tuple[str, ...] | None, origins("origins whose web pages may call the API")] = None
    wal_file_bytes: Annotated[int, byte_size(1 * MIB, 1 * GIB, "size of one WAL file")] = 64 * MIB
    checkpoint_interval_ms: Annotated[int, integer(10, DAY_MS, "longest time from a write to its checkpoint")] = 60_000
    checkpoint_wal_bytes: Annotated[int, byte_size(64 * KIB, 16 * GIB, "log size that makes it due")] = 64 * MIB
    max_replay_bytes: Annotated[
        int,
        byte_size(
            0, 16 * GIB, "log behind a shard's last snapshot; writers are slowed from four fifths of it on; 0 = any"
        ),
    ] = 256 * MIB
    segment_max_events: Annotated[int, integer(1, 10_000_000, "most records in one segment")] = 10_000
    segment_max_bytes: Annotated[int, byte_size(4 * KIB, 2 * GIB, "bytes at which a segment is sealed")] = 64 * MIB
    segment_max_age_ms: Annotated[
        int, integer(0, 366 * DAY_MS, "age of a segment's first record that seals it; 0 = none")
    ] = 3_600_000
    segment_rewrite_dead_ratio: Annotated[
        float, ratio("deleted share of a sealed segment above which it is rewritten; 0 = never")
    ] = 0.5
    cold_dir: Annotated[
        str | None, path_name("where older sealed segments go; without it all stay in the data directory")
    ] = None
    cold_url: Annotated[
        str | None,
        bucket_url("where older sealed segments go instead: a bucket; credentials by the provider's usual variables"),
    ] = None
    hot_retain_segments: Annotated[int, count("sealed segments of a topic that stay in the data directory")] = 4
    hot_retain_bytes: Annotated[int, byte_size(0, PIB, "bytes of them that stay, if that is less; 0 = any")] = 0
    cold_read_timeout_ms: Annotated[
        int, integer(1, 600_000, "how long a read waits for the cold tier before it is refused")
    ] = 5000
    archive_url: Annotated[
        str | None, bucket_url("where a process ships all logs and segments; without it there is no such process")
    ] = None
    archive_interval_ms: Annotated[
        int, integer(50, 3_600_000, "longest time from a write to the archive while that can be reached")
    ] = 1000
    archive_keep_ms: Annotated[
        int, integer(0, 3660 * DAY_MS, "history in the archive to which it can be restored; 0 = all, for ever")
    ] = 7 * DAY_MS
    archive_backlog_bytes: Annotated[
        int, byte_size(0, PIB, "logs that are kept until they are in the archive, of all shards together")
    ] = 4 * GIB
    archive_wait_ms: Annotated[
        int, integer(1, 600_000, "how long a write of class archived waits for the archive before it is refused")
    ] = 10_000
    follow: Annotated[
        str | None, bucket_url("the archive of another service, of which this one is to be a copy that reads")
    ] = None
    follow_key: Annotated[
        str | None,
        secret("key of the leader that reads everything, to hear from it what the archive does not have yet"),
    ] = None
    takeover_after_ms: Annotated[
        int, integer(0, DAY_MS, "a copy takes over after this time without a sign of its leader; 0 = only when told")
    ] = 0
    advertise_url: Annotated[
        str | None, http_url("where clients reach this service: it tells its copies that, and every 2 s that it lives")
    ] = None
    ring_bytes: Annotated[
        int, byte_size(64 * KIB, 1 * GIB, "request ring between a frontend and a shard; the reply ring has a quarter")
    ]
    shard_wait_ms: Annotated[int, integer(1, 600_000, "how long a request waits for a shard that restarts")] = 5000
    stage_ttl_ms: Annotated[
        int, integer(1000, 7 * DAY_MS, "how long staged records wait for the commit of their transaction")
    ] = 3_600_000
    shutdown_grace_ms: Annotated[int, integer(100, 3_600_000, "how long a stop may take before SIGKILL")] = 10_000
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        choice("debug", "info", "warning", "error", help="least important log line to show"),
    ] = "info"
    log_format: Annotated[
        Literal["json", "console"],
        choice("json", "console", help="log lines (default: console on a terminal, else json)"),
    ]
    test_min_heartbeat_ms: Annotated[int, integer(1, 60_000, "floor of heartbeat_ms, for tests only")] = 1000
    test_kill_at: Annotated[str | None, kill_point("die there, for tests only")] = None
    accept_data_loss: Annotated[
        bool, flag("start although a log is damaged in the middle, without what the log line says is lost")
    ] = False

    @property
    def frontend_grace_ms(self) -> int:
        """The part of the grace that a frontend gives its requests in flight; the rest is for the other processes."""
        return self.shutdown_grace_ms // 2

    @property
    def compactor_grace_ms(self) -> int:
        """The part of the grace for the compactor's last cut; without it the next start reads more of the logs."""
        return self.shutdown_grace_ms // 4

    @property
    def max_command_bytes(self) -> int:
        """The longest body without records. The longest watch fits. Decoded, a body takes up to 25 times its length."""
        return min(self.max_body_bytes, max(COMMAND_BYTES_MAX, WATCHED_TOPIC_BYTES * self.max_watch_topics))

    @property
    def has_archive(self) -> bool:
        """True if records are in an archive: this service's, or that of the one that it follows."""
        return self.archive_url is not None or self.follow is not None

    @property
    def cold_place(self) -> str | None:
        """The directory or the URL that older sealed segments go to (`storage.segment_store.open_store`)."""
        return self.cold_dir or self.cold_url

    def masked(self) -> dict[str, Any]:
        """Return the settings by name, fit for a log line: API keys are only counted, others masked. A console log gets
        only settings that differ from their defaults.
        """
        shown = msgspec.structs.asdict(self)
        if self.log_format == "console":
            usual = {field.name: field.default for field in msgspec.structs.fields(self)}
            shown = {name: value for name, value in shown.items() if value != usual[name]}
        if self.api_keys is not None:
            shown["api_keys"] = f"{len(self.api_keys)} masked"
        if self.follow_key is not None:
            shown["follow_key"] = "masked"
        return shown


class SettingsError(Exception):
    """These settings cannot be used; `problems` has one sentence for each reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


VARIABLES: Final[dict[str, Variable]] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Settings, include_extras=True).items()
}
"""The readers of all settings, by field."""
COMMAND_LINE_ONLY: Final = {"accept_data_loss": VARIABLES.pop("accept_data_loss")}
"""Flags that every start must say itself, so that they never stay behind in an environment or a file."""

SECRET: Final = frozenset({"api_keys", "follow_key"})
"""Settings that no message repeats and that are no flags: every user of the machine sees command lines."""


class _GivenSetting(NamedTuple):
    """A value as it was given, the place where it was given, and the rank of that place (0 is the strongest)."""

    raw: object
    place: str
    rank: int


def load(
    environ: Mapping[str, str],
    overrides: Mapping[str, object] | None = None,
    *,
    cpus: int | None = None,
    on_terminal: bool | None = None,
) -> Settings:
    """Return the settings of `environ` and of the TOML file it names; `overrides` (the flags, by field) win.

    Raise SettingsError with every problem found. `cpus` and `on_terminal` default to those of this process.
    """
    overrides = overrides or {}
    problems: list[str] = []
    flags = {name: _GivenSetting(raw, "--" + name.replace("_", "-"), 0) for name, raw in overrides.items()}
    variables = _known(
        {
            _field(name): _GivenSetting(raw, name, 1)
            for name, raw in environ.items()
            if name.startswith(PREFIX) and name not in CLIENT_VARIABLES
        },
        PREFIX,
        problems,
    )
    config = flags.get("config") or variables.get("config")
    entries = _known(_read_toml(config, problems), "", problems) if config else {}
    usual = {"data_dir": _GivenSetting("topics-data", f"{PREFIX}DATA_DIR", 3)}
    given = {**usual, **entries, **variables, **flags}

    values: dict[str, Any] = {}
    for name, (raw, place, _) in given.items():
        variable = VARIABLES.get(name) or COMMAND_LINE_ONLY[name]
        try:
            values[name] = variable.parse(raw)
        except KeysError as error:
            problems += [f"{place}: {problem}" for problem in error.problems]
        except RefusedValueError as error:
            problems.append(f"{place}: {error}")
        except FileNotFoundError:
            problems.append(f"{place}={raw!s}: this shell's working directory is gone; give an absolute path, or cd")
        except ValueError:
            shown = place if name in SECRET else f"{place}={raw!s}"
            problems.append(f"{shown}: must be {variable.allowed}")
    if "host" in values:
        values["host"], port = values["host"]
        if port is not None:
            _take_port_of_host(given, values, port, problems)

    cpus = cpus or len(os.sched_getaffinity(0))
    values.setdefault("data_dir", "")  # a directory was given, and refused
    values.setdefault("wal_shards", min(cpus, SHARDS_DEFAULT_MAX))
    values.setdefault("frontends", min(cpus, 64))
    values.setdefault("ring_bytes", default_ring_bytes(values["wal_shards"], values["frontends"]))
    on_terminal = sys.stderr.isatty() if on_terminal is None else on_terminal
    values.setdefault("log_format", "console" if on_terminal else "json")
    settings = Settings(**values)
    # A wrong list of keys is a problem already; it does not count as none.
    authenticated = not {"api_keys", "api_keys_file"}.isdisjoint(given)
    if not (authenticated or settings.allow_insecure_no_auth or is_loopback(settings.host)):
        problems.append(
            f"{given['host'].place}={given['host'].raw}: other machines reach this address and nobody has to"
            f" authenticate; set {PREFIX}API_KEYS_FILE or {PREFIX}API_KEYS, use 127.0.0.1 behind a proxy, or set"
            f" {PREFIX}ALLOW_INSECURE_NO_AUTH=1 if that is wanted"
        )
    if settings.probe_auth and not authenticated:
        problems.append(
            f"{given['probe_auth'].place}={given['probe_auth'].raw}: there are no keys to ask for; set"
            f" {PREFIX}API_KEYS_FILE or {PREFIX}API_KEYS"
        )
    if settings.cold_dir is not None and settings.cold_dir == settings.data_dir:
        problems.append(
            f"{given['cold_dir'].place}={given['cold_dir'].raw}: is the data directory itself; name one on the slower"
            f" disk, or leave it unset"
        )
    if settings.cold_dir is not None and settings.cold_url is not None:
        problems.append(f"{given['cold_url'].place}: {given['cold_dir'].place} is set as well; set one of them")
    if 0 < settings.takeover_after_ms < TAKEOVER_MS_MIN:
        problems.append(
            f"{given['takeover_after_ms'].place}={given['takeover_after_ms'].raw}: a leader that lives gives a sign"
            f" every 2 s, and a slow bucket delays it; set {TAKEOVER_MS_MIN} or more, or 0"
        )
    needs_library = [("cold_url", settings.cold_url)]
    if settings.archive_url is not None and not settings.archive_url.startswith("file:"):
        needs_library.append(("archive_url", settings.archive_url))
    if settings.follow is not None and not settings.follow.startswith("file:"):
        needs_library.append(("follow", settings.follow))
    for name, url in needs_library:
        if url is not None and find_spec("obstore") is None:
            way_out = "install it with pip install 'topicsd[bucket]'"
            problems.append(f"{given[name].place}: needs the package obstore; {way_out}")
    if problems:
        raise SettingsError(problems)
    return settings


def default_ring_bytes(shards: int, frontends: int) -> int:
    """Return the size of one request ring: an equal share of RING_BUDGET_BYTES, within RING_DEFAULT_BYTES."""
    least, most = RING_DEFAULT_BYTES
    return max(least, min(most, RING_BUDGET_BYTES // (shards * frontends)))


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _field(variable: str) -> str:
    """Return `port` for `TOPICS_PORT`; `TOPICS_Port` stays unknown."""
    name = variable.removeprefix(PREFIX)
    return name.lower() if name.isupper() else name


def _known(given: dict[str, _GivenSetting], prefix: str, problems: list[str]) -> dict[str, _GivenSetting]:
    """Return the settings that this version knows. Add a problem for each other one, with the nearest known name."""
    known = {}
    for name, value in given.items():
        if name in VARIABLES:
            known[name] = value
        elif name in COMMAND_LINE_ONLY:
            problems.append(f"{value.place}: may be given only as the flag --{name.replace('_', '-')}, for one start")
        else:
            near = difflib.get_close_matches(name.lower(), VARIABLES, n=1)
            spelled = prefix + (near[0].upper() if prefix else near[0]) if near else ""
            hint = f"did you mean {spelled}?" if near else "docs/operations.md lists them"
            problems.append(f"{value.place}: there is no such setting; {hint}")
    return known


def _read_toml(config: _GivenSetting, problems: list[str]) -> dict[str, _GivenSetting]:
    path = str(config.raw)
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        problems.append(f"{config.place}={path}: cannot be read: {error.strerror}")
        return {}
    except ValueError as error:  # no TOML, no UTF-8, or a number of 5,000 digits
        problems.append(f"{config.place}={path}: is not TOML: {error}")
        return {}
    if "config" in table:
        problems.append(f"{path}: config: a settings file cannot name another one")
        del table["config"]
    return {name: _GivenSetting(raw, f"{path}: {name}", 2) for name, raw in table.items()}


def _take_port_of_host(given: dict[str, _GivenSetting], values: dict[str, Any], port: int, problems: list[str]) -> None:
    """Set the port of `host:port`, unless a stronger place sets another one. Two at the same place are a problem."""
    host, other = given["host"], given.get("port")
    if other is None or host.rank < other.rank:
        values["port"] = port
    elif host.rank == other.rank and values.get("port") not in (None, port):
        problems.append(f"{host.place}={host.raw}: has another port than {other.place}={other.raw}; set only one")


def read_keys(settings: Settings, serial: int = 0) -> KeyRing:
    """Return all valid keys: those of the settings, and those that the keys file has now. Without keys nobody has to
    authenticate.

    `serial` becomes the ring's. Raise SettingsError when the file cannot be used, or repeats a key of TOPICS_API_KEYS.
    """
    listed = settings.api_keys or ()
    path = settings.api_keys_file
    if path is None:
        return KeyRing(listed, serial)
    place = f"{PREFIX}API_KEYS_FILE={path}"
    try:
        filed = parse_lines(_read_keys_file(path))
    except OSError as error:
        raise SettingsError([f"{place}: cannot be read: {error.strerror}"]) from None
    except KeysError as error:
        raise SettingsError([f"{place}: {problem}" for problem in error.problems]) from None
    except ValueError as error:
        raise SettingsError([f"{place}: {error}"]) from None
    if {key.digest for key in listed} & {key.digest for key in filed}:
        raise SettingsError([f"{place}: has a key that is in {PREFIX}API_KEYS, too; keep it in one of them"])
    return KeyRing((*listed, *filed), serial)


def _read_keys_file(path: str) -> str:
    # Non-blocking: opening a FIFO of that name would wait for a writer.
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("is not a regular file")
        content = file.read(KEYS_FILE_BYTES_MAX + 1)
    if len(content) > KEYS_FILE_BYTES_MAX:
        raise ValueError(f"has more than {KEYS_FILE_BYTES_MAX} bytes")
    try:
        return content.decode("ascii")
    except UnicodeDecodeError as error:
        # The decoder's own message would show bytes of the keys.
        raise ValueError(f"has a byte that is not ASCII at offset {error.start}") from None
