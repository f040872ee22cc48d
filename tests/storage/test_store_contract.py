"""The contract of the segment store, on a folder, on `file://` and on an S3 server; and what only a bucket does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.buckets import MORE, Fault, ObjectServer, Proxy
from topics.setting_values import RefusedValueError
from topics.setting_values import bucket_url as bucket_url_setting
from topics.storage.bucket_store import BucketStore, probe
from topics.storage.filesystem import OsFileSystem
from topics.storage.segment_store import SegmentStore, open_store
from topics.storage.verify import verify

TOPIC = f"{7:016x}"
NAME = f"{TOPIC}/seg-{1:020d}.data"
OTHER = f"{TOPIC}/seg-{11:020d}.data"
EMPTY = f"{16:016x}/seg-{1:020d}.tags"
CONTENT = bytes(range(256)) * 8192
TIMEOUT_MS = 3000


SERVED = ["s3", pytest.param("s3s", marks=pytest.mark.long), *MORE]


@pytest.fixture(params=["folder", "file", *SERVED])
def place(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    object_servers: Callable[[str], ObjectServer],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    if request.param == "folder":
        return str(tmp_path / "cold")
    if request.param == "file":
        return f"file://{tmp_path}/cold"
    server = object_servers(request.param)
    for name, value in server.env(server.port).items():
        monkeypatch.setenv(name, value)
    return f"{server.scheme}://{server.new_bucket()}/some/prefix"


@pytest.fixture
def s3_place(s3: Proxy, bucket_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    return bucket_url


@pytest.fixture
def store(place: str) -> SegmentStore:
    if "://" not in place:
        Path(place).mkdir()
    return open_store(OsFileSystem(), place, TIMEOUT_MS)


def test_what_was_put_is_read_listed_and_deleted(store: SegmentStore, place: str) -> None:
    assert store.list("") == []
    assert not store.exists(NAME)
    store.delete(NAME)
    store.put(OTHER, [b"other"])
    store.put(NAME, iter((b"some", b"thing")))
    store.put(EMPTY, [])
    assert store.exists(NAME)
    assert (store.len(NAME), store.len(EMPTY)) == (9, 0)
    assert [store.read_range(NAME, *part) for part in ((0, 9), (3, 4), (9, 0))] == [b"something", b"ethi", b""]
    for part in ((5, 5), (9, 1), (100, 1)):
        with pytest.raises(EOFError):
            store.read_range(NAME, *part)
    assert store.list("") == [NAME, OTHER, EMPTY]
    assert store.list(f"{TOPIC}/") == [NAME, OTHER]
    assert store.list(NAME[:-1]) == [NAME]
    assert store.list(f"{16:016x}") == [EMPTY]
    assert store.place(NAME) == f"{place}/topics/{NAME}"
    store.delete(NAME)
    missing: list[Callable[[], object]] = [lambda: store.len(NAME), lambda: store.read_range(NAME, 0, 1)]
    for use in missing:
        with pytest.raises(FileNotFoundError):
            use()


def test_what_a_killed_put_left_under_a_name_goes(store: SegmentStore) -> None:
    for content in (b"left behind", CONTENT, CONTENT, b"new"):
        store.put(NAME, [content])
        assert store.read_range(NAME, 0, len(content)) == content
        assert store.list("") == [NAME]


def test_another_store_on_the_same_place_sees_it(store: SegmentStore, place: str) -> None:
    store.put(NAME, [CONTENT])
    again = open_store(OsFileSystem(), place, TIMEOUT_MS)
    assert again.read_range(NAME, 1000, 70_000) == CONTENT[1000:71_000]


def test_a_folder_by_a_url_syncs_the_names_of_all_folders_that_it_may_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = [], os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path))

    monkeypatch.setattr(os, "fsync", noted)
    open_store(OsFileSystem(), f"file://{tmp_path}/cold", TIMEOUT_MS).put(NAME, [b"something"])
    topic = os.path.dirname(NAME)
    assert synced == [f"cold/topics/{NAME}", f"cold/topics/{topic}", "cold/topics", "cold"]


def test_nothing_is_made_by_opening_a_store_of_a_bucket(tmp_path: Path) -> None:
    """A process opens it before it forks: no thread, no connection, no folder."""
    open_store(OsFileSystem(), f"file://{tmp_path}/cold")
    open_store(OsFileSystem(), "s3://nowhere/at/all")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["deny", "throttle", "cut", "drop", "hang"])
def test_a_bucket_that_fails_is_an_os_error_that_says_where_and_why(fault: Fault, s3: Proxy, s3_place: str) -> None:
    store = BucketStore(f"{s3_place}/topics", 400)
    store.put(NAME, [CONTENT])
    calls: list[Callable[[], object]] = [
        lambda: store.read_range(NAME, 0, len(CONTENT)),
        lambda: store.list(""),
        lambda: store.put(OTHER, [b"other"]),
    ]
    if fault != "cut":  # what has no body cannot be cut
        calls += [lambda: store.len(NAME), lambda: store.delete(NAME)]
    with s3.failing(fault):
        for call in calls:
            with pytest.raises(OSError, match="some/prefix") as failed:
                call()
            assert not isinstance(failed.value, FileNotFoundError)
            assert "test-secret-key" not in str(failed.value)
            assert "Debug source" not in str(failed.value)
            assert (fault == "deny") is isinstance(failed.value, PermissionError)
            assert fault != "throttle" or re.search("SlowDown|503", str(failed.value))
    assert store.read_range(NAME, 0, len(CONTENT)) == CONTENT
    store.put(OTHER, [b"other"])
    assert store.list("") == [NAME, OTHER]


def test_a_put_that_was_done_but_not_answered_finds_its_own_object(s3: Proxy, s3_place: str) -> None:
    store = BucketStore(f"{s3_place}/topics", TIMEOUT_MS)
    with s3.failing("lost_answer", "PUT"), pytest.raises(OSError, match="500"):
        store.put(NAME, [CONTENT])
    assert store.read_range(NAME, 0, len(CONTENT)) == CONTENT, "it is there"
    s3.reset()
    store.put(NAME, [CONTENT])
    assert s3.requests["POST"] == s3.requests["DELETE"] == 0, "and was not removed to be put again"


def test_only_one_of_two_creates_an_object(s3_place: str) -> None:
    stores = [BucketStore(f"{s3_place}/topics", TIMEOUT_MS) for _ in range(2)]
    assert stores[0].create(NAME, b"first")
    assert not stores[1].create(NAME, b"second")
    assert stores[1].read_range(NAME, 0, 5) == b"first"


def test_a_bucket_that_refuses_before_it_took_the_object(s3: Proxy, s3_place: str) -> None:
    store = BucketStore(f"{s3_place}/topics", TIMEOUT_MS)
    store.put(NAME, [CONTENT])
    with s3.failing("refuse_early"):
        assert not store.create(NAME, CONTENT * 4), "it hangs up on who still sends"
    assert store.len(NAME) == len(CONTENT)


def test_of_many_racing_creators_one_makes_the_object(s3_place: str) -> None:
    def create(number: int) -> bool:
        return BucketStore(f"{s3_place}/topics", TIMEOUT_MS).create(NAME, f"{number:08d}".encode())

    with ThreadPoolExecutor(8) as creators:
        won = [number for number, made in enumerate(creators.map(create, range(8))) if made]
    assert [f"{number:08d}".encode() for number in won] == [
        BucketStore(f"{s3_place}/topics", 400).read_range(NAME, 0, 8)
    ]


def test_a_listing_that_lags_costs_no_object(s3: Proxy, s3_place: str) -> None:
    store = BucketStore(f"{s3_place}/topics", TIMEOUT_MS)
    store.put(NAME, [b"one"])
    assert store.list("") == [NAME]
    with s3.failing("lag"):
        store.put(OTHER, [b"other"])
        store.delete(NAME)
        assert store.list("") == [NAME], "as it was"
        assert (store.exists(NAME), store.exists(OTHER)) == (False, True)
        store.delete(NAME)  # as the sweep does for what is listed and gone
        store.put(NAME, [b"again"])
    assert store.list("") == [NAME, OTHER]


@pytest.mark.parametrize("place", ["file", *SERVED], indirect=True)
def test_a_prefix_belongs_to_the_service_that_used_it_first(place: str) -> None:
    def made(owner: str | None) -> BucketStore:
        return BucketStore(f"{place}/topics", TIMEOUT_MS, None if owner is None else lambda: owner)

    assert made("one").owner_problem("one") is None
    made("one (here)").put(NAME, [b"of one"])
    calls: list[Callable[[BucketStore], object]] = [
        lambda store: store.put(OTHER, [b"other"]),
        lambda store: store.delete(NAME),
    ]
    for call in calls:
        with pytest.raises(
            PermissionError, match=r"belongs to service one \(here\), and this is service two \(there\): "
        ):
            call(made("two (there)"))
    assert made(None).owner_problem(None) is not None
    assert made("two").list("") == [NAME], "the owner is no object of a topic"
    made("one (elsewhere)").delete(NAME)
    assert made(None).list("") == []


@pytest.mark.parametrize("place", ["file", *SERVED], indirect=True)
def test_a_bucket_is_probed_and_nothing_stays(place: str) -> None:
    assert list(probe(place, TIMEOUT_MS)) == []
    assert BucketStore(f"{place}/topics", TIMEOUT_MS).list("") == []


@pytest.mark.parametrize(
    ("method", "what", "way_out"),
    [
        ("PUT", "cannot write: ", "s3:PutObject"),
        ("GET", "cannot list: ", "s3:ListBucket"),
        ("HEAD", "cannot read: ", "s3:GetObject"),
        ("POST", "cannot delete: ", "s3:DeleteObject"),
    ],
)
def test_the_probe_says_which_call_is_denied(method: str, what: str, way_out: str, s3: Proxy, s3_place: str) -> None:
    with s3.failing("deny", method):
        found = [line for line in probe(s3_place, TIMEOUT_MS) if line.startswith(what)]
    assert len(found) == 1
    assert "403" in found[0]
    assert way_out in found[0]


def test_the_probe_of_a_directory_advises_no_right_of_a_bucket(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (line,) = probe(f"file://{tmp_path}/file/below", TIMEOUT_MS)
    assert line.startswith("cannot write: ")
    assert line.endswith("; let this user do so")


def test_the_probe_says_that_a_bucket_cannot_be_reached(s3: Proxy, s3_place: str) -> None:
    with s3.failing("drop"):
        (line,) = probe(s3_place, TIMEOUT_MS)
    assert line.startswith("cannot write: [Errno 5] ")
    assert line.endswith("; check the URL, and the variables of its provider (docs/bucket.md)")
    assert "PutObject" not in line


@pytest.mark.parametrize("call", ["create", "list", "probe"])
def test_a_bucket_that_does_not_exist_is_named_with_the_way_out(call: str, s3_place: str) -> None:
    """A put said that the object `is not in the bucket` and advised a right, a listing gave the server's XML."""
    url = s3_place.replace("s3://", "s3://no-")
    if call == "probe":
        (told,) = probe(url, TIMEOUT_MS)
    else:
        with pytest.raises(OSError, match=r".") as caught:
            getattr(BucketStore(url, TIMEOUT_MS), call)("generations/", *([b"1"] if call == "create" else []))
        told = str(caught.value)
    assert "there is no such bucket: make it, or mend the URL" in told
    assert "<" not in told
    assert "PutObject" not in told


def test_an_endpoint_without_tls_says_what_allows_it(s3_place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(OSError, match=r"an endpoint without TLS needs AWS_ALLOW_HTTP=true"):
        BucketStore(s3_place, TIMEOUT_MS).list("")


def test_a_failure_reads_the_same_each_time(s3: Proxy, s3_place: str) -> None:
    """Each message had the time that its request took: a log could not leave out what it had said before."""
    told = set()
    with s3.failing("deny"):
        for _ in range(3):
            with pytest.raises(OSError, match="403") as caught:
                BucketStore(s3_place, TIMEOUT_MS).list("generations/")
            told.add(str(caught.value))
    assert len(told) == 1
    assert " in " not in told.pop()


@pytest.mark.parametrize(
    ("url", "env", "is_without"),
    [
        ("s3://b/x", {"AWS_METADATA_ENDPOINT": "http://127.1:1", "AWS_ALLOW_HTTP": "true"}, True),
        ("s3://b/x", {"AWS_ACCESS_KEY_ID": "id"}, True),
        ("az://b/x", {}, True),
        (
            "az://b/x",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_MSI_ENDPOINT": "http://127.1:1/", "AZURE_ALLOW_HTTP": "true"},
            True,
        ),
        (
            "s3://b/latest/api",
            {
                "AWS_ACCESS_KEY_ID": "id",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_ENDPOINT_URL": "http://127.1:1",
                "AWS_ALLOW_HTTP": "true",
            },
            False,
        ),
    ],
)
def test_a_bucket_without_credentials_says_where_its_variables_are_listed(
    url: str, env: dict[str, str], is_without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message was that of the library: it told of an address that nobody had written anywhere. A prefix that looks
    like that address was taken for it.
    """
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=r"os error 2|Error performing|Missing|Account") as caught:
        BucketStore(url, TIMEOUT_MS).create("generations/1", b"")
    assert ("no credentials were found: set the variables of its provider" in str(caught.value)) == is_without
    assert ("no credentials" in str(caught.value)) == is_without


def test_a_folder_needs_no_credentials(tmp_path: Path) -> None:
    """An object whose name looks like the address of credentials ended in a KeyError."""
    (tmp_path / "latest").touch()
    with pytest.raises(OSError, match=f"{tmp_path}/latest/api") as caught:
        BucketStore(f"file://{tmp_path}", TIMEOUT_MS).create("latest/api", b"")
    assert "no credentials" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/x", "gs://b/x?token=secret", "az://b/x#secret", "https://k:secret@h"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(RefusedValueError, match="has credentials or options in the URL") as refused:
        bucket_url_setting("").parse(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["bucket/x", "http://h/x", "s3://", "file://relative", "s3://b/a b", 5])
def test_what_is_no_url_of_a_bucket_is_refused(url: object) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        bucket_url_setting("").parse(url)


@pytest.mark.parametrize("url", ["s3://b", "s3://b/a/b/", "gs://b/x", "az://container/x", "file:///a/b"])
def test_urls_of_buckets(url: str) -> None:
    assert bucket_url_setting("").parse(url) == url.rstrip("/")
    assert os.environ.get("AWS_SECRET_ACCESS_KEY") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_folder_that_may_not_be_looked_into_is_not_empty(tmp_path: Path) -> None:
    """`topics archive list` said that there is no archive."""
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            open_store(OsFileSystem(), str(place)).list("generations/")
        with pytest.raises(PermissionError):
            verify(str(place), lambda _done, _total: None)
    finally:
        os.seteuid(0)
