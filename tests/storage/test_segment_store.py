"""The folder behind the segment store's seam: an object is there whole or not at all, whatever call fails."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cases import case
from tests.storage.faults import Crash, Fault, FaultyFileSystem
from topics.storage.archive_objects import open_archive
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import Bytes
from topics.storage.segment_store import LocalStore

NAME = f"{7:016x}/seg-{1:020d}.data"
OTHER = f"{7:016x}/seg-{11:020d}.data"
OTHER_USER = 65534
CALLS_OF_A_PUT = ["mkdir", "fsync_dir"] * 2 + ["open", "pwritev", "pwritev", "fdatasync", "rename"] + ["fsync_dir"] * 3


def content() -> Iterator[bytes]:
    yield b"some"
    yield b"thing"


def store_at(root: Path, fs: FaultyFileSystem | None = None) -> LocalStore:
    return LocalStore(fs or OsFileSystem(), str(root / "cold" / "topics"))


def test_what_was_put_is_read_listed_and_deleted(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    store = store_at(tmp_path)
    assert store.list("") == []
    assert not store.exists(NAME)
    store.delete(NAME)
    store.put(OTHER, [b"other"])
    store.put(NAME, content())
    store.put(f"{16:016x}/a", [b""])
    assert store.exists(NAME)
    assert (store.len(NAME), store.len(f"{16:016x}/a")) == (9, 0)
    assert [store.read_range(NAME, *part) for part in ((0, 9), (3, 4), (9, 0))] == [b"something", b"ethi", b""]
    with pytest.raises(EOFError):
        store.read_range(NAME, 5, 5)
    (tmp_path / "cold/topics" / f"{NAME}.tmp").touch()
    assert store.list("") == [NAME, OTHER, f"{16:016x}/a"]
    assert store.list(f"{7:016x}/") == [NAME, OTHER]
    assert store.list(NAME[:-1]) == [NAME]
    assert store.list(f"{16:016x}") == [f"{16:016x}/a"]
    store.put(NAME, [b"new"])
    assert store.read_range(NAME, 0, 3) == b"new"
    store.delete(NAME)
    for use in (lambda: store.len(NAME), lambda: store.read_range(NAME, 0, 1)):
        with pytest.raises(FileNotFoundError):
            use()


def test_nothing_is_put_where_it_comes_from(tmp_path: Path) -> None:
    """The data directory by another name: the copy would be the file that is removed because there is a copy."""
    (tmp_path / "data/topics").mkdir(parents=True)
    (tmp_path / "cold").symlink_to(tmp_path / "data")
    here = str(tmp_path / "data/topics")
    with pytest.raises(OSError, match=r"is .* by another name"):
        LocalStore(OsFileSystem(), str(tmp_path / "cold/topics"), apart_from=here).put(NAME, content())
    assert not list((tmp_path / "data/topics").rglob("*.data"))
    LocalStore(OsFileSystem(), str(tmp_path / "other/topics"), apart_from=here).put(NAME, content())


@pytest.mark.parametrize("has_put", [True, False])
def test_a_folder_that_has_gone_is_not_made_again(tmp_path: Path, has_put: bool) -> None:
    """Its disk may not be mounted: what were put in its place would be on another one. That was so for a process that
    had seen the folder, and put nothing yet: an archiver that had begun again, and records counted as archived.
    """
    cold = tmp_path / "cold"
    store = store_at(tmp_path)
    store.put(NAME, content())
    if not has_put:
        store = store_at(tmp_path)
        assert store.list("") == [NAME]
    cold.rename(tmp_path / "elsewhere")
    for again in (False, True):
        with pytest.raises(FileNotFoundError, match=r"mount its disk .*cold/topics"):
            store.put(OTHER, content())
        assert [path.name for path in tmp_path.glob("cold/*")] == []
        if not again:
            cold.mkdir()  # as a mount point is, whose disk is not mounted
    cold.rmdir()
    (tmp_path / "elsewhere").rename(cold)
    store.put(OTHER, content())
    assert store.list("") == [NAME, OTHER]


@pytest.mark.parametrize("new", [True, False])
def test_a_folder_that_has_gone_is_not_an_empty_one(tmp_path: Path, new: bool) -> None:
    """A follower took it for an archive without news, and its leader for silent."""
    store_at(tmp_path).put(NAME, content())
    store = LocalStore(OsFileSystem(), str(tmp_path / "cold/topics"), new=new)
    assert store.exists(NAME)
    (tmp_path / "cold").rename(tmp_path / "elsewhere")
    for use in (lambda: store.exists(NAME), lambda: store.list("")):
        with pytest.raises(FileNotFoundError, match=r"mount its disk .*cold/topics"):
            use()
    (tmp_path / "elsewhere").rename(tmp_path / "cold")
    assert store.list("") == [NAME]
    with pytest.raises(FileNotFoundError, match=r"were put there: mount its disk or restore it: .*nowhere/archive"):
        open_archive(OsFileSystem(), str(tmp_path / "nowhere"), new=False).list("")  # a new folder would be no way out


def test_where_something_should_be_no_folder_is_made(tmp_path: Path) -> None:
    store = LocalStore(OsFileSystem(), str(tmp_path / "cold/topics"), new=False)
    with pytest.raises(FileNotFoundError):
        store.put(NAME, content())
    assert not (tmp_path / "cold").exists()
    (tmp_path / "cold/topics").mkdir(parents=True)
    store.put(NAME, content())
    assert store.list("") == [NAME]


def test_what_a_killed_put_left_goes_with_the_object(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    path = tmp_path / "cold/topics" / NAME
    store.put(OTHER, content())
    for is_made in (False, True):
        path.with_name(path.name + ".tmp").touch()
        if is_made:
            path.touch()
        store.delete(NAME)
        assert [one.name for one in path.parent.iterdir()] == [os.path.basename(OTHER)]


def test_the_last_object_of_a_topic_takes_its_folder_along(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.put(NAME, content())
    store.put(OTHER, content())
    store.delete(NAME)
    assert os.listdir(tmp_path / "cold/topics") == [f"{7:016x}"]
    store.delete(OTHER)
    assert os.listdir(tmp_path / "cold/topics") == []


def test_a_read_is_whole_however_little_a_call_gives(tmp_path: Path) -> None:
    class Trickling(FaultyFileSystem):
        def pread(self, fd: int, length: int, offset: int) -> bytes:
            return super().pread(fd, min(length, 2), offset)

    store_at(tmp_path).put(NAME, content())
    assert store_at(tmp_path, Trickling()).read_range(NAME, 1, 7) == b"omethin"


def test_the_calls_of_a_put(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    fs = FaultyFileSystem()
    store_at(tmp_path, fs).put(NAME, content())
    assert fs.log == CALLS_OF_A_PUT


@pytest.mark.parametrize(
    "error", [errno.EIO, errno.ENOSPC, Fault.SHORT, Fault.CRASH, Fault.TORN_CRASH, Fault.LATE_CRASH]
)
def test_a_put_that_fails_anywhere_can_be_repeated(tmp_path: Path, error: int) -> None:
    for nth, before in itertools.product(range(1, len(CALLS_OF_A_PUT) + 1), (None, b"before")):
        with case(nth, before):
            check_failed_put(tmp_path / f"{nth} {before!r}", Fault(nth, error), before)


def check_failed_put(path: Path, fault: Fault, before: bytes | None) -> None:
    (path / "cold").mkdir(parents=True)
    store = store_at(path)
    if before is not None:
        store.put(NAME, [before])
    fs = FaultyFileSystem()
    fs.arm(fault)
    with suppress(OSError, Crash):
        store_at(path, fs).put(NAME, content())
    fs.bury()
    found = store.read_range(NAME, 0, store.len(NAME)) if store.exists(NAME) else None
    assert found in (before, b"something")
    assert store.list("") == ([] if found is None else [NAME])
    store.put(NAME, content())
    assert store.read_range(NAME, 0, 9) == b"something"
    assert os.listdir(path / "cold/topics" / f"{7:016x}") == [NAME.partition("/")[2]]


def test_who_stands_still_while_it_creates_holds_up_nobody(tmp_path: Path) -> None:
    outcome: list[bool] = []

    class StandingStill(OsFileSystem):
        def fdatasync(self, fd: int) -> None:
            super().fdatasync(fd)
            outcome.append(LocalStore(OsFileSystem(), str(tmp_path / "a")).create("g/1", b"second"))

    first = LocalStore(StandingStill(), str(tmp_path / "a"))
    assert (first.create("g/1", b"first"), outcome) == (False, [True])
    assert first.read_range("g/1", 0, 6) == b"second"
    assert first.list("g/") == ["g/1"]
    assert len(list((tmp_path / "a" / "g").iterdir())) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
def test_what_root_creates_is_of_the_user_of_the_folder(tmp_path: Path) -> None:
    """A `restore --take-over` by root: the former service could not read that it was taken over from. By the loan of
    any restore its archiver could prune nothing.
    """
    os.chown(tmp_path, OTHER_USER, OTHER_USER)
    store = LocalStore(OsFileSystem(), str(tmp_path / "archive"))
    assert store.create("g/1", b"first")
    made = [tmp_path / "archive", *(tmp_path / "archive").rglob("*")]
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(OTHER_USER, OTHER_USER)}
    assert len(made) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory of another user")
@pytest.mark.parametrize("call", ["mkdir", "link"])
def test_root_gives_away_no_file_that_a_link_leads_to(tmp_path: Path, call: str) -> None:
    """The owner of the folder put a link in the place of what root had just made there, to any file of the machine."""
    (victim := tmp_path / "victim").mkdir()
    owners: list[int] = []

    class Swapping(OsFileSystem):
        def mkdir(self, path: str) -> None:
            super().mkdir(path)
            if call == "mkdir" and path.endswith("/g"):
                os.rmdir(path)
                os.symlink(victim, path)

        def link(self, source: str, target: str) -> None:
            owners.append(os.stat(source).st_uid)
            super().link(source, target)
            if call == "link":
                os.unlink(target)
                os.symlink(victim, target)

    (folder := tmp_path / "folder").mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)
    LocalStore(Swapping(), str(folder / "archive")).create("g/1", b"first")
    assert os.stat(victim).st_uid == 0
    assert owners == [OTHER_USER] * (call == "link") or call == "mkdir", "a kill behind the link leaves it with nobody"


def test_what_cannot_be_looked_for_is_not_missing(tmp_path: Path) -> None:
    """So a follower in trouble took its leader's generation for pruned, and gave up its copy."""
    store = LocalStore(OsFileSystem(), str(tmp_path / "a"))
    store.create("g/1", b"first")
    assert [store.exists(name) for name in ("g/1", "g/2", "h/1", "g/1/2")] == [True, False, False, False]
    (tmp_path / "a/g").rename(tmp_path / "a/away")
    (tmp_path / "a/g").symlink_to("g")
    with pytest.raises(OSError, match=r"symbolic links: .*/a/g/1"):
        store.exists("g/1")


def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """`topics restore: No space left on device` did not say on which of two disks. Each try says the same: an archiver
    logs it once.
    """

    class Full(OsFileSystem):
        def pwritev(self, fd: int, buffers: Sequence[Bytes], offset: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for _ in range(2):
        with pytest.raises(OSError, match=r"No space left on device: '.*/a/g/1'$"):
            LocalStore(Full(), str(tmp_path / "a")).create("g/1", b"first")


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_an_object_is_created_where_the_drafts_are_of_another_user(tmp_path: Path, call: str) -> None:
    """Root made the folder of the drafts with a restore, say, and the archiver could create nothing any more."""

    class Denying(OsFileSystem):
        def mkdir(self, path: str) -> None:
            self._look(path, "mkdir")
            super().mkdir(path)

        def open(self, path: str, flags: int, mode: int = 0o600) -> int:
            self._look(path, "open")
            return super().open(path, flags, mode)

        def _look(self, path: str, called: str) -> None:
            if called == call and "/drafts" in path:
                raise PermissionError(errno.EACCES, "no", path)

    store = LocalStore(Denying(), str(tmp_path / "a"))
    assert [store.create("g/1", content) for content in (b"first", b"second")] == [True, False]
    assert store.read_range("g/1", 0, 5) == b"first"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["1"]


def test_an_object_is_created_though_the_last_one_beside_it_is_deleted_meanwhile(tmp_path: Path) -> None:
    class Emptied(OsFileSystem):
        def link(self, source: str, target: str) -> None:
            LocalStore(OsFileSystem(), str(tmp_path / "a")).delete("g/1")
            super().link(source, target)

    store = LocalStore(Emptied(), str(tmp_path / "a"))
    assert LocalStore(OsFileSystem(), str(tmp_path / "a")).create("g/1", b"first")
    assert store.create("g/2", b"second")
    assert store.list("g/") == ["g/2"]


def test_a_draft_that_a_killed_create_left_goes(tmp_path: Path) -> None:
    """It stayed for ever. One that is young may be of somebody who is about to make an object of it."""
    root = tmp_path / "archive"

    def drafts() -> list[Path]:
        return [path for path in root.rglob("*.tmp") if path.is_file()]

    for _ in range(2):
        fs = FaultyFileSystem()
        fs.arm(Fault(1, Fault.CRASH, calls=frozenset({"link"})))
        with pytest.raises(Crash):
            LocalStore(fs, str(root)).create("g/1", b"first")
        fs.bury()
    old, young = drafts()
    os.utime(old, (0, 0))
    assert LocalStore(OsFileSystem(), str(root)).create("g/1", b"second")
    assert drafts() == [young]
    assert LocalStore(OsFileSystem(), str(root)).list("") == ["g/1"]
