"""Settings of the service, and its answers to wrong ones."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from topics.core.governor import FROM_SHARE
from topics.setting_values import GIB, KIB, MIB, overlap
from topics.settings import COMMAND_LINE_ONLY, VARIABLES, Settings, SettingsError, default_ring_bytes, load


def read(environ: Mapping[str, str] | None = None, **flags: object) -> Settings:
    return load(environ or {}, flags, cpus=2, on_terminal=False)


def problems(environ: Mapping[str, str], **flags: object) -> list[str]:
    with pytest.raises(SettingsError) as refusal:
        read(environ, **flags)
    return refusal.value.problems


def test_every_field_has_one_way_in() -> None:
    assert set(Settings.__struct_fields__) == set(VARIABLES) | set(COMMAND_LINE_ONLY)


def test_defaults_are_those_of_the_contract() -> None:
    settings = read()
    assert (settings.host, settings.port, settings.wal_shards, settings.frontends) == ("127.0.0.1", 4000, 2, 2)
    assert settings.data_dir == str(Path.cwd() / "topics-data")
    assert (settings.max_body_bytes, settings.max_batch_records) == (64 * MIB, 10_000)
    assert (settings.max_record_bytes, settings.max_meta_bytes) == (1 * MIB, 16 * KIB)
    assert (settings.max_tag_bytes, settings.max_node_bytes) == (256, 128)
    assert (settings.max_limit, settings.max_watch_topics) == (1000, 256)
    assert (settings.log_level, settings.log_format, settings.shutdown_grace_ms) == ("info", "json", 10_000)
    assert (settings.max_topics, settings.max_watch_sessions) == (100_000, 10_000)
    assert (settings.max_sse_connections, settings.max_total_bytes) == (10_000, 0)
    assert settings.cors_origins is None
    assert (settings.checkpoint_wal_bytes, settings.checkpoint_interval_ms) == (64 * MIB, 60_000)
    assert (settings.segment_max_events, settings.segment_max_bytes) == (10_000, 64 * MIB)
    assert (settings.segment_max_age_ms, settings.segment_rewrite_dead_ratio) == (3_600_000, 0.5)
    assert (settings.cold_dir, settings.hot_retain_segments, settings.hot_retain_bytes) == (None, 4, 0)
    assert settings.cold_read_timeout_ms == 5000
    assert not settings.accept_data_loss


def test_shards_stop_at_eight_and_logs_are_for_people_on_a_terminal() -> None:
    settings = load({}, cpus=32, on_terminal=True)
    assert (settings.wal_shards, settings.frontends, settings.log_format) == (8, 32, "console")


@pytest.mark.parametrize(
    ("shards", "frontends", "expected"), [(1, 1, 4 * MIB), (2, 2, 4 * MIB), (4, 8, 2 * MIB), (8, 64, 1 * MIB)]
)
def test_rings_share_a_budget(shards: int, frontends: int, expected: int) -> None:
    assert default_ring_bytes(shards, frontends) == expected
    assert read({"TOPICS_WAL_SHARDS": str(shards), "TOPICS_FRONTENDS": str(frontends)}).ring_bytes == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("2097152", 2 * MIB), ("2048KiB", 2 * MIB), ("2 MiB", 2 * MIB), ("1GiB", GIB)]
)
def test_sizes_in_bytes_or_with_a_suffix(text: str, expected: int) -> None:
    assert read({"TOPICS_WAL_FILE_BYTES": text}).wal_file_bytes == expected


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("TOPICS_PORT", "65536", "an integer from 0 to 65535"),
        ("TOPICS_SEGMENT_REWRITE_DEAD_RATIO", "1.5", "a number from 0 to 1"),
        ("TOPICS_SEGMENT_REWRITE_DEAD_RATIO", "nan", "a number from 0 to 1"),
        ("TOPICS_TEST_KILL_AT", "marked", "process: or service: and the name of a kill point"),
        ("TOPICS_PORT", "-1", "an integer from 0 to 65535"),
        ("TOPICS_PORT", "http", "an integer from 0 to 65535"),
        ("TOPICS_PORT", "", "an integer from 0 to 65535"),
        ("TOPICS_WAL_SHARDS", "0", "an integer from 1 to 64"),
        ("TOPICS_FRONTENDS", "1.5", "an integer from 1 to 64"),
        ("TOPICS_FRONTENDS", "٢", "an integer from 1 to 64"),
        ("TOPICS_WAL_FILE_BYTES", "1000000", "a number of bytes from 1 MiB to 1 GiB"),
        ("TOPICS_WAL_FILE_BYTES", "64MB", "a number of bytes from 1 MiB to 1 GiB"),
        ("TOPICS_LOG_LEVEL", "loud", "debug, info, warning or error"),
        ("TOPICS_LOG_FORMAT", "xml", "json or console"),
        ("TOPICS_ALLOW_INSECURE_NO_AUTH", "maybe", "1 or 0"),
        ("TOPICS_HOST", "http://127.0.0.1", "a host name or address, with or without :port"),
        ("TOPICS_HOST", "127.0.0.1:99999", "a host name or address, with or without :port"),
        ("TOPICS_HOST", "[::1", "a host name or address, with or without :port"),
        ("TOPICS_HOST", ":4000", "a host name or address, with or without :port"),
        ("TOPICS_DATA_DIR", "", "a path"),
        ("TOPICS_MAX_TOPICS", "-1", "an integer from 0 to 1000000000"),
        ("TOPICS_MAX_TOTAL_BYTES", "10GB", "a number of bytes from 0 bytes to 1048576 GiB"),
        ("TOPICS_CORS_ORIGINS", "", "origins such as https://app.example"),
        ("TOPICS_CORS_ORIGINS", "app.example", "origins such as https://app.example"),
        ("TOPICS_CORS_ORIGINS", "https://app.example/", "origins such as https://app.example"),
        ("TOPICS_CORS_ORIGINS", "https://app.example,", "origins such as https://app.example"),
        ("TOPICS_CORS_ORIGINS", "https://app.example,*", "origins such as https://app.example"),
        ("TOPICS_CORS_ORIGINS", "https://*.example", "origins such as https://app.example"),
        ("TOPICS_TEST_MIN_HEARTBEAT_MS", "0", "an integer from 1 to 60000"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_allowed(name: str, value: str, allowed: str) -> None:
    (problem,) = problems({name: value})
    assert problem.startswith(f"{name}={value}: must be {allowed}")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", ("127.0.0.1", 4000)),
        ("127.0.0.1:8080", ("127.0.0.1", 8080)),
        ("localhost:0", ("localhost", 0)),
        ("::1", ("::1", 4000)),
        ("[::1]", ("::1", 4000)),
        ("[::1]:81", ("::1", 81)),
    ],
)
def test_host_may_bring_its_port(host: str, expected: tuple[str, int]) -> None:
    settings = read({"TOPICS_HOST": host})
    assert (settings.host, settings.port) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", ("*",)),
        ("https://app.example", ("https://app.example",)),
        ("https://App.example:8443 , http://[::1]:80", ("https://app.example:8443", "http://[::1]:80")),
    ],
)
def test_origins_are_kept_as_browsers_spell_them(text: str, expected: tuple[str, ...]) -> None:
    assert read({"TOPICS_CORS_ORIGINS": text}).cors_origins == expected


def test_two_different_ports_at_one_place_contradict() -> None:
    (problem,) = problems({"TOPICS_HOST": "127.0.0.1:80", "TOPICS_PORT": "81"})
    assert "TOPICS_HOST=127.0.0.1:80" in problem
    assert "TOPICS_PORT=81" in problem
    assert read({"TOPICS_HOST": "127.0.0.1:80", "TOPICS_PORT": "80"}).port == 80


def test_the_stronger_place_decides_about_the_port() -> None:
    assert read({"TOPICS_HOST": "127.0.0.1:80"}, port="82").port == 82
    assert read({"TOPICS_PORT": "81"}, host="127.0.0.1:80").port == 80


@pytest.mark.parametrize(
    ("name", "near"),
    [("TOPICS_WAL_SHARD", "TOPICS_WAL_SHARDS"), ("TOPICS_Port", "TOPICS_PORT"), ("TOPICS_DATADIR", "TOPICS_DATA_DIR")],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    (problem,) = problems({name: "1"})
    assert problem == f"{name}: there is no such setting; did you mean {near}?"


def test_an_unknown_test_variable_is_refused_as_well() -> None:
    (problem,) = problems({"TOPICS_TEST_XYZZY_QUX": "1"})
    assert problem.startswith("TOPICS_TEST_XYZZY_QUX: there is no such setting")


def test_variables_of_others_are_none_of_our_business() -> None:
    assert read({"PATH": "/bin", "MYTOPICS_PORT": "x", "topics_port": "x"}) == read()


def test_variables_of_the_client_commands_do_not_keep_a_service_from_starting() -> None:
    assert read({"TOPICS_URL": "http://127.0.0.1:4001", "TOPICS_KEY_FILE": "/run/key"}) == read()


def test_every_problem_is_told_at_once() -> None:
    assert len(problems({"TOPICS_PORT": "x", "TOPICS_WAL_SHARDS": "x", "TOPICS_NONSENSE_NAME": "x"})) == 3


def test_a_path_is_no_url() -> None:
    """`check` found the cold directory `s3:/bucket/topics` in the working directory, and the service made it."""
    for variable in ("TOPICS_COLD_DIR", "TOPICS_DATA_DIR"):
        for url in ("s3://bucket/topics", "s3:/bucket/topics", "file:///mnt/cold"):
            assert problems({variable: url}) == [f"{variable}={url}: must be a path, not a URL"]
    assert read({"TOPICS_COLD_DIR": "/mnt/a:/b"}).cold_dir == "/mnt/a:/b"


def test_the_key_of_a_follower_is_never_shown_and_never_empty() -> None:
    for key in ("", "two words"):
        (problem,) = problems({"TOPICS_FOLLOW_KEY": key})
        assert problem == "TOPICS_FOLLOW_KEY: must be one key, in visible ASCII"


def test_the_help_says_when_writers_are_slowed() -> None:
    assert FROM_SHARE == 0.8
    assert "slowed from four fifths of it on" in VARIABLES["max_replay_bytes"].help


def test_keys_are_kept_as_digests_and_never_shown() -> None:
    settings = read({"TOPICS_API_KEYS": "s3cret:rw:in, other"})
    assert settings.api_keys is not None
    assert [key.digest for key in settings.api_keys] == [hashlib.sha256(key).digest() for key in (b"s3cret", b"other")]
    assert "s3cret" not in repr(settings)
    assert settings.masked()["api_keys"] == "2 masked"
    assert read().masked()["api_keys"] is None
    (problem,) = problems({"TOPICS_API_KEYS": "s3cret:x"})
    assert problem.startswith("TOPICS_API_KEYS: entry 1: its scopes must be")
    assert "s3cret" not in problem
    assert len(problems({"TOPICS_API_KEYS": "s3cret:x,,s3cret", "TOPICS_PORT": "x"})) == 3


def test_the_cold_directory_is_another_one() -> None:
    (problem,) = problems({"TOPICS_DATA_DIR": "/d", "TOPICS_COLD_DIR": "/d/"})
    assert problem.startswith("TOPICS_COLD_DIR=/d/: is the data directory itself")
    assert read({"TOPICS_DATA_DIR": "/d", "TOPICS_COLD_DIR": "/d/c"}).cold_dir == "/d/c", "as where a disk is mounted"


@pytest.mark.parametrize(
    ("place", "folder"),
    [
        ("data", "data/archive"),
        ("data/deep/er", "data/deep/er/archive"),
        ("elsewhere/../data/x", "data/x/archive"),
        ("link", "data/archive"),
        ("link/x", "data/x/archive"),
        ("elsewhere/folder-links", "data/archive"),
    ],
)
def test_no_archive_lies_in_the_data_directory(tmp_path: Path, place: str, folder: str) -> None:
    """It went down with the disk that it should outlive."""
    linked, data = tmp_path / "elsewhere/folder-links", tmp_path / "data"
    linked.mkdir(parents=True)
    (tmp_path / "link").symlink_to(data)
    (linked / "archive").symlink_to(data / "archive")
    for url in (f"{tmp_path}/{place}", f"file://{tmp_path}/{place}"):
        assert overlap(str(data), url) == (
            f"its files would be in {tmp_path}/{folder}, inside the data directory {data};"
            " name a place apart from it, best on another disk"
        )


def test_the_data_directory_lies_in_no_archive(tmp_path: Path) -> None:
    data = tmp_path / "a b/archive/of/it"
    problem = overlap(str(data), (tmp_path / "a b").as_uri())
    assert problem is not None
    assert f"in {tmp_path}/a b/archive, which has the data directory {data} inside; name a place apart" in problem


def test_archives_apart_from_the_data_directory(tmp_path: Path) -> None:
    """Beside it is enough, as is a name that only begins as the data directory's does."""
    data = str(tmp_path / "data")
    assert overlap(data, f"{tmp_path}/data-archive") is None
    assert overlap(data, tmp_path.as_uri()) is None
    assert overlap(data, "s3://bucket/data") is None


def test_probe_auth_without_keys_contradicts_itself() -> None:
    (problem,) = problems({"TOPICS_PROBE_AUTH": "1"})
    assert problem.startswith("TOPICS_PROBE_AUTH=1: there are no keys to ask for")
    assert read({"TOPICS_PROBE_AUTH": "0"}).probe_auth is False
    assert read({"TOPICS_PROBE_AUTH": "1", "TOPICS_API_KEYS": "k"}).probe_auth
    assert read({"TOPICS_PROBE_AUTH": "1", "TOPICS_API_KEYS_FILE": "k"}).probe_auth


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "topics.example:80"])
def test_an_address_others_reach_needs_a_word(host: str) -> None:
    (problem,) = problems({"TOPICS_HOST": host})
    assert problem.startswith(f"TOPICS_HOST={host}: ")
    assert "TOPICS_ALLOW_INSECURE_NO_AUTH=1" in problem
    assert read({"TOPICS_HOST": host, "TOPICS_ALLOW_INSECURE_NO_AUTH": "1"}).allow_insecure_no_auth
    assert read({"TOPICS_HOST": host, "TOPICS_API_KEYS": "k"}).host == host.removesuffix(":80")
    assert read({"TOPICS_HOST": host, "TOPICS_API_KEYS_FILE": "/keys"}).api_keys_file == "/keys"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_a_loopback_address_needs_none(host: str) -> None:
    assert read({"TOPICS_HOST": host}).host == host


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "topics.toml"
    file.write_text('port = 1\nfrontends = 5\nlog_level = "error"\nwal_file_bytes = "2 MiB"\n')
    settings = read({"TOPICS_CONFIG": str(file), "TOPICS_PORT": "2", "TOPICS_LOG_LEVEL": "debug"}, port="3")
    assert (settings.port, settings.log_level, settings.frontends) == (3, "debug", 5)
    assert (settings.wal_file_bytes, settings.config) == (2 * MIB, str(file))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = 70000", "{file}: port=70000: must be an integer from 0 to 65535"),
        ("port = true", "{file}: port=True: must be an integer from 0 to 65535"),
        ("data_dir = 5", "{file}: data_dir=5: must be a path, not a URL"),
        ("prot = 1", "{file}: prot: there is no such setting; did you mean port?"),
        ("[server]\nport = 1", "{file}: server: there is no such setting"),
        ('api_keys = "k:x"', "{file}: api_keys: entry 1: its scopes must be"),
        ('api_keys = ["k"]', "{file}: api_keys: must be text: key[:scopes[:prefixes]],…"),
        ("accept_data_loss = true", "{file}: accept_data_loss: may be given only as the flag --accept-data-loss"),
        ("port = ", "TOPICS_CONFIG={file}: is not TOML: "),
        ("port = " + "9" * 5000, "TOPICS_CONFIG={file}: is not TOML: "),
        ('config = "other.toml"', "{file}: config: a settings file cannot name another one"),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "topics.toml"
    file.write_text(text)
    (problem,) = problems({"TOPICS_CONFIG": str(file)})
    assert problem.startswith(expected.format(file=file))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    (problem,) = problems({"TOPICS_CONFIG": str(tmp_path / "none.toml")})
    assert problem == f"TOPICS_CONFIG={tmp_path}/none.toml: cannot be read: No such file or directory"


def test_data_loss_is_accepted_on_the_command_line_only() -> None:
    assert read(accept_data_loss=True).accept_data_loss
    (problem,) = problems({"TOPICS_ACCEPT_DATA_LOSS": "1"})
    assert "--accept-data-loss" in problem


def test_masked_names_every_setting() -> None:
    assert set(read().masked()) == set(Settings.__struct_fields__)


def test_people_at_a_terminal_are_shown_what_is_not_as_usual() -> None:
    shown = read({"TOPICS_LOG_FORMAT": "console", "TOPICS_PORT": "4001", "TOPICS_MAX_TOPICS": "100000"}).masked()
    assert set(shown) == {"data_dir", "port", "wal_shards", "frontends", "ring_bytes", "log_format"}


def test_the_handbook_lists_every_variable_with_its_default() -> None:
    handbook = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| `TOPICS_(\w+)` \| (.*?) \|", handbook, re.MULTILINE))
    assert {name.lower() for name in rows} == set(VARIABLES)
    defaults = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    for name, shown in rows.items():
        default = defaults[name.lower()]
        if default is None:
            assert shown == "none"
        elif default is not msgspec.NODEFAULT:
            parsed = VARIABLES[name.lower()].parse(shown.strip("`"))
            assert (parsed[0] if name == "HOST" else parsed) == default, name
