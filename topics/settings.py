"""Every setting of the service: one frozen object, read once at start (flags over environment over TOML over defaults).

A value that cannot be used is a refusal that names the variable, the value and what is allowed; so is a variable
that this version does not know, because a setting that is ignored in silence is worse than one that is missing.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import sys
import tomllib
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from topics.core.keys import ApiKey, KeysError
from topics.setting_values import (
    GIB,
    KIB,
    MIB,
    Variable,
    address,
    byte_size,
    choice,
    flag,
    integer,
    keys,
    kill_point,
    origins,
    path_name,
    ratio,
)

PREFIX: Final = "TOPICS_"
OF_CLIENTS: Final = frozenset({"TOPICS_URL", "TOPICS_KEY_FILE"})
"""What `topics write` and its like go by: a shell may have them set when it starts a service."""
RING_BUDGET_BYTES: Final = 64 * MIB
"""What all request rings take together, as long as each stays within RING_DEFAULT_BYTES."""
RING_DEFAULT_BYTES: Final = (1 * MIB, 4 * MIB)
SHARDS_DEFAULT_MAX: Final = 8
COUNT_MAX: Final = 1_000_000_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The whole effective configuration. Bytes and milliseconds say so in their names; `TOPICS_X` is field `x`."""

    data_dir: str
    wal_shards: int
    frontends: int
    ring_bytes: int
    log_format: Literal["json", "console"]
    config: str | None = None
    host: str = "127.0.0.1"
    port: int = 4000
    port_file: str | None = None
    api_keys: tuple[ApiKey, ...] | None = None
    api_keys_file: str | None = None
    probe_auth: bool = False
    allow_insecure_no_auth: bool = False
    max_body_bytes: int = 64 * MIB
    max_batch_records: int = 10_000
    max_record_bytes: int = 1 * MIB
    max_meta_bytes: int = 16 * KIB
    max_tag_bytes: int = 256
    max_node_bytes: int = 128
    max_limit: int = 1000
    max_watch_topics: int = 256
    max_topics: int = 100_000
    max_watch_sessions: int = 10_000
    max_sse_connections: int = 10_000
    max_sse_connections_per_key: int = 1_000
    max_inflight_per_key: int = 1_000
    max_connections: int = 0
    max_claim: int = 1_000
    max_routers: int = 10_000
    max_total_bytes: int = 0
    max_metric_topics: int = 10_000
    cors_origins: tuple[str, ...] | None = None
    wal_file_bytes: int = 64 * MIB
    checkpoint_wal_bytes: int = 64 * MIB
    checkpoint_interval_ms: int = 60_000
    segment_max_events: int = 10_000
    segment_max_bytes: int = 64 * MIB
    segment_max_age_ms: int = 3_600_000
    segment_rewrite_dead_ratio: float = 0.5
    cold_dir: str | None = None
    hot_retain_segments: int = 4
    hot_retain_bytes: int = 0
    cold_read_timeout_ms: int = 5000
    shard_wait_ms: int = 5000
    stage_ttl_ms: int = 3_600_000
    shutdown_grace_ms: int = 10_000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    test_min_heartbeat_ms: int = 1000
    test_kill_at: str | None = None
    accept_data_loss: bool = False

    @property
    def frontend_grace_ms(self) -> int:
        """How much of the grace a frontend gives what is in flight; the rest is for those behind it."""
        return self.shutdown_grace_ms // 2

    @property
    def compactor_grace_ms(self) -> int:
        """How much of it the compactor gives its last cut, without which the next start reads more of the logs."""
        return self.shutdown_grace_ms // 4

    def masked(self) -> dict[str, Any]:
        """Every setting by name, fit for a log line: of keys no more than how many there are."""
        shown = msgspec.structs.asdict(self)
        if self.api_keys is not None:
            shown["api_keys"] = f"{len(self.api_keys)} masked"
        return shown


class SettingsError(Exception):
    """The service refuses to start with these settings; `problems` has one sentence for each of them."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


VARIABLES: Final[dict[str, Variable]] = {
    "config": path_name(
        "a TOML file with settings by their names in lower case, without TOPICS_; the environment wins"
    ),
    "data_dir": path_name("where everything is kept (default ./topics-data)"),
    "host": address("address to listen on"),
    "port": integer(0, 65535, "port to listen on; 0 = any free one"),
    "port_file": path_name("file that gets host:port once the socket listens"),
    "wal_shards": integer(1, 64, "WAL shard processes (default: CPUs, at most 8)"),
    "frontends": integer(1, 64, "HTTP processes (default: CPUs)"),
    "api_keys": keys("who may do what; not as a flag, others see those"),
    "api_keys_file": path_name("file with keys, a line for each; read again at `topics-supervisor reload`"),
    "probe_auth": flag("health and readiness, too, are for holders of a key only"),
    "allow_insecure_no_auth": flag("listen on a non-loopback address although nobody has to authenticate"),
    "max_body_bytes": byte_size(1 * KIB, 1 * GIB, "largest request body, after decompression"),
    "max_batch_records": integer(1, 1_000_000, "most records in one write"),
    "max_record_bytes": byte_size(16, 512 * MIB, "largest data + meta of one record"),
    "max_meta_bytes": byte_size(0, 16 * MIB, "largest meta of one record"),
    "max_tag_bytes": integer(1, 65535, "longest tag"),
    "max_node_bytes": integer(1, 65535, "longest node"),
    "max_limit": integer(1, 100_000, "most records in one answer"),
    "max_watch_topics": integer(1, 100_000, "most topics in one watch"),
    "max_topics": integer(0, COUNT_MAX, "most topics of the service; 0 = no limit"),
    "max_watch_sessions": integer(0, COUNT_MAX, "most watch sessions of the service; 0 = no limit"),
    "max_sse_connections": integer(0, COUNT_MAX, "most open event streams and WebSockets of the service; 0 = no limit"),
    "max_sse_connections_per_key": integer(0, COUNT_MAX, "most of these with one API key; 0 = no limit"),
    "max_inflight_per_key": integer(0, COUNT_MAX, "most requests at once with one API key; 0 = no limit"),
    "max_connections": integer(0, COUNT_MAX, "most open connections of the service; 0 = no limit"),
    "max_claim": integer(1, 10_000, "most jobs in one claim, and of one worker's stream"),
    "max_routers": integer(0, COUNT_MAX, "most routers of the service; 0 = no limit"),
    "max_total_bytes": byte_size(0, 1024 * 1024 * GIB, "most live bytes of all topics together; 0 = no limit"),
    "max_metric_topics": integer(0, COUNT_MAX, "most topics with metrics of their own; 0 = none"),
    "cors_origins": origins("web pages of which origins may call the API from a browser"),
    "wal_file_bytes": byte_size(1 * MIB, 1 * GIB, "size of one WAL file"),
    "checkpoint_wal_bytes": byte_size(64 * KIB, 16 * GIB, "log of a shard that makes a checkpoint due"),
    "checkpoint_interval_ms": integer(10, 86_400_000, "longest time from a write to its checkpoint"),
    "segment_max_events": integer(1, 10_000_000, "most records in one segment"),
    "segment_max_bytes": byte_size(4 * KIB, 2 * GIB, "bytes at which a segment is sealed"),
    "segment_max_age_ms": integer(0, 366 * 86_400_000, "age of a segment's first record that seals it; 0 = none"),
    "segment_rewrite_dead_ratio": ratio("deleted share of a sealed segment beyond which it is rewritten; 0 = never"),
    "cold_dir": path_name("where older sealed segments go; without it all stay in the data directory"),
    "hot_retain_segments": integer(0, COUNT_MAX, "sealed segments of a topic that stay out of the cold directory"),
    "hot_retain_bytes": byte_size(0, 1024 * 1024 * GIB, "bytes of them that stay, if that is less; 0 = any"),
    "cold_read_timeout_ms": integer(1, 600_000, "how long a read waits for the cold directory before it is refused"),
    "ring_bytes": byte_size(
        64 * KIB, 1 * GIB, "each request ring between a frontend and a shard; the reply ring has a quarter"
    ),
    "shard_wait_ms": integer(1, 600_000, "how long a request waits for a shard that is being restarted"),
    "stage_ttl_ms": integer(1000, 7 * 86_400_000, "how long staged records wait for the commit of their transaction"),
    "shutdown_grace_ms": integer(100, 3_600_000, "how long a stop may take before SIGKILL"),
    "log_level": choice("debug", "info", "warning", "error", help="least important log line to show"),
    "log_format": choice("json", "console", help="log lines (default: console on a terminal, else json)"),
    "test_min_heartbeat_ms": integer(1, 60_000, "floor of heartbeat_ms, for tests only"),
    "test_kill_at": kill_point("die there, for tests only"),
}

COMMAND_LINE_ONLY: Final = {
    "accept_data_loss": flag("start although a log is corrupt in the middle, without what the log line says is lost"),
}
"""What must be said anew at each start, never left lying in an environment or a file."""

SECRET: Final = frozenset({"api_keys"})
"""Never repeated in a message, never a flag: every user of the machine sees command lines."""


class _GivenSetting(NamedTuple):
    """A value as somebody wrote it, and how to speak of the place."""

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
    """The settings of `environ` (and the TOML file it names), with `overrides` (the flags, by field) on top.

    Raises SettingsError with every problem found. `cpus` and `on_terminal` default to those of this process.
    """
    overrides = overrides or {}
    problems: list[str] = []
    flags = {name: _GivenSetting(raw, "--" + name.replace("_", "-"), 0) for name, raw in overrides.items()}
    variables = _known(
        {
            _field(name): _GivenSetting(raw, name, 1)
            for name, raw in environ.items()
            if name.startswith(PREFIX) and name not in OF_CLIENTS
        },
        PREFIX,
        problems,
    )
    config = flags.get("config") or variables.get("config")
    entries = _known(_read_toml(config, problems), "", problems) if config else {}
    given = {**entries, **variables, **flags}

    values: dict[str, Any] = {}
    for name, (raw, place, _) in given.items():
        variable = VARIABLES.get(name) or COMMAND_LINE_ONLY[name]
        try:
            values[name] = variable.parse(raw)
        except KeysError as error:
            problems += [f"{place}: {problem}" for problem in error.problems]
        except ValueError:
            shown = place if name in SECRET else f"{place}={raw!s}"
            problems.append(f"{shown}: must be {variable.allowed}")
    if "host" in values:
        values["host"], port = values["host"]
        if port is not None:
            _take_port_of_host(given, values, port, problems)

    cpus = cpus or len(os.sched_getaffinity(0))
    values.setdefault("data_dir", os.path.abspath("topics-data"))
    values.setdefault("wal_shards", min(cpus, SHARDS_DEFAULT_MAX))
    values.setdefault("frontends", min(cpus, 64))
    values.setdefault("ring_bytes", default_ring_bytes(values["wal_shards"], values["frontends"]))
    on_terminal = sys.stderr.isatty() if on_terminal is None else on_terminal
    values.setdefault("log_format", "console" if on_terminal else "json")
    settings = Settings(**values)
    # A list that is wrong is a problem already; it is not the same as none.
    authenticated = not {"api_keys", "api_keys_file"}.isdisjoint(given)
    if not (authenticated or settings.allow_insecure_no_auth or is_loopback(settings.host)):
        problems.append(
            f"{given['host'].place}={given['host'].raw}: this address can be reached by others and nobody has to"
            f" authenticate; set {PREFIX}API_KEYS_FILE or {PREFIX}API_KEYS, use 127.0.0.1 behind a proxy, or say"
            f" {PREFIX}ALLOW_INSECURE_NO_AUTH=1 if that is wanted"
        )
    if settings.probe_auth and not authenticated:
        problems.append(
            f"{given['probe_auth'].place}={given['probe_auth'].raw}: there are no keys to ask for; set"
            f" {PREFIX}API_KEYS_FILE or {PREFIX}API_KEYS"
        )
    if settings.cold_dir is not None and settings.cold_dir == settings.data_dir:
        problems.append(
            f"{given['cold_dir'].place}={given['cold_dir'].raw}: is the data directory itself; name another one, on the"
            f" slower disk, or leave it unset"
        )
    if problems:
        raise SettingsError(problems)
    return settings


def default_ring_bytes(shards: int, frontends: int) -> int:
    """Request rings of all pairs within RING_BUDGET_BYTES, each within RING_DEFAULT_BYTES."""
    least, most = RING_DEFAULT_BYTES
    return max(least, min(most, RING_BUDGET_BYTES // (shards * frontends)))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _field(variable: str) -> str:
    """`TOPICS_PORT` → `port`; `TOPICS_Port` stays unknown."""
    name = variable.removeprefix(PREFIX)
    return name.lower() if name.isupper() else name


def _known(given: dict[str, _GivenSetting], prefix: str, problems: list[str]) -> dict[str, _GivenSetting]:
    """What of `given` this version knows; a problem for each of the rest, with the nearest name that it does know."""
    known = {}
    for name, value in given.items():
        if name in VARIABLES:
            known[name] = value
        elif name in COMMAND_LINE_ONLY:
            problems.append(f"{value.place}: only as the flag --{name.replace('_', '-')}, said at that very start")
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{config.place}={path}: is not TOML: {error}")
        return {}
    if "config" in table:
        problems.append(f"config in {path}: a settings file cannot name another one")
        del table["config"]
    return {name: _GivenSetting(raw, f"{path}: {name}", 2) for name, raw in table.items()}


def _take_port_of_host(given: dict[str, _GivenSetting], values: dict[str, Any], port: int, problems: list[str]) -> None:
    """`host:port` sets the port unless a stronger place does; two ports at one place are a contradiction."""
    host, other = given["host"], given.get("port")
    if other is None or host.rank < other.rank:
        values["port"] = port
    elif host.rank == other.rank and values.get("port") not in (None, port):
        problems.append(f"{host.place}={host.raw}: names another port than {other.place}={other.raw}; say it once")
