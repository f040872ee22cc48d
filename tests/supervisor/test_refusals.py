"""Obstacles to a start, and the messages about them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import COMMAND, Service, clean_environment, poll
from tests.supervisor.conftest import Start
from topics.settings import Settings, load
from topics.shm import shm_names
from topics.shm.control import ProcessCell, ProcessState, Role
from topics.shm.instance import SharedMemory
from topics.storage.borrowed import NAME as BORROWED_NAME
from topics.storage.filesystem import OsFileSystem
from topics.storage.follow_note import NAME as FOLLOWING_NAME
from topics.storage.follow_note import FollowNote, write_note
from topics.storage.lock import DataDirLock
from topics.storage.service_id import RESTORED_NAME
from topics.supervisor.check import (
    CheckFinding,
    check,
    file_size_shortage,
    open_files_shortage,
    shared_memory_shortage,
    strangers_memory,
)
from topics.supervisor.command import main, reload, stop
from topics.supervisor.listeners import AddressError, listen, listen_for, port_of
from topics.supervisor.promote import NotFollowingError, cancel, promote

OTHER_USER = 65534


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free(count: int) -> Callable[[str], os.statvfs_result]:
    """A file system with that many bytes free."""
    return lambda _: os.statvfs_result((4096, 1, 1 << 40, 1 << 40, count, 0, 0, 0, 0, 255))


def settings(tmp_path: Path, **flags: object) -> Settings:
    return load({}, {"data_dir": str(tmp_path / "data"), "port": "0"} | flags, cpus=2)


def test_a_secret_is_no_flag_and_the_way_out_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, way_out in (
        ("--api-keys", "set TOPICS_API_KEYS or TOPICS_API_KEYS_FILE,"),
        ("--follow-key", "set TOPICS_FOLLOW_KEY or follow_key in the file that TOPICS_CONFIG names,"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["check", flag, "hush"])
        said = capsys.readouterr().err
        assert (ended.value.code, way_out in said, "hush" in said) == (2, True, False)


def test_a_taken_port(start: Start, taken: int) -> None:
    service = start({"TOPICS_PORT": str(taken)})
    assert service.wait_exit() == 1
    assert f"cannot listen on 127.0.0.1:{taken}: Address already in use; stop what listens there" in service.log_text()
    assert service.shared_memory() == []
    assert not service.port_file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a directory for another user")
def test_the_memory_of_a_killed_service_of_another_user(start: Start) -> None:
    with tempfile.TemporaryDirectory() as root:  # which pytest's own does not let other users into
        os.chmod(root, 0o777)
        data = Path(root, "data")
        data.mkdir()
        os.chown(data, OTHER_USER, OTHER_USER)
        identity = shm_names.identity(str(data))
        left = SharedMemory.create(identity, 1, 1, 1 << 16)
        names = shm_names.objects(identity)
        service = start({"TOPICS_PORT_FILE": f"{root}/port"}, data_dir=data, user=OTHER_USER)
        assert service.wait_exit() == 1
        assert f"as root: chown -R {OTHER_USER} /dev/shm/topics-{identity}-*" in service.log_text()
        assert "Traceback" not in service.log_text()
        assert service.shared_memory() == names, "all of it is there, as it says how far the logs went"
        for name in names:
            os.chown(f"/dev/shm/{name}", OTHER_USER, OTHER_USER)
        service = start({"TOPICS_PORT_FILE": f"{root}/port"}, data_dir=data, user=OTHER_USER)
        poll("the start", lambda: bool(service.log("removed shared memory of a service that was killed")))
        service.stop()
        left.destroy()


def test_the_check_finds_memory_of_another_user(tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert strangers_memory(str(data)) is None
    data.mkdir()
    assert strangers_memory(str(data), 5) is None
    left = SharedMemory.create(shm_names.identity(str(data)), 1, 1, 1 << 16)
    try:
        assert strangers_memory(str(data)) is None
        problem = strangers_memory(str(data), OTHER_USER)
        assert problem
        assert f"user {os.geteuid()} ran this service, was killed and has left /dev/shm/topics-" in problem
        assert strangers_memory(str(data), 0) is None
    finally:
        left.destroy()


def test_the_memory_of_a_service_that_runs_is_not_said_to_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of another user advised to give it away, which would have broken the service at its next restart."""
    mine = settings(tmp_path)
    os.mkdir(mine.data_dir)
    left = SharedMemory.create(shm_names.identity(mine.data_dir), 1, 1, 1 << 16)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)

    def of_memory() -> str | None:
        (problem,) = (problem for subject, problem in check(mine) if subject.startswith("shared memory"))
        return problem

    try:
        assert "was killed and has left" in (of_memory() or "")
        lock = DataDirLock.acquire(mine.data_dir)
        try:
            assert of_memory() is None
        finally:
            lock.release()
    finally:
        left.destroy()


def test_the_check_says_that_a_port_file_cannot_be_written(tmp_path: Path) -> None:
    def of_port_file(path: Path) -> str | None:
        found = dict(check(settings(tmp_path, port_file=str(path))))
        problem: str | None = found[f"port file {path}"]
        return problem

    (tmp_path / "file").touch()
    assert of_port_file(tmp_path / "file") is None
    assert of_port_file(tmp_path / "new") is None
    assert of_port_file(tmp_path) == f"{tmp_path} is a directory; choose another TOPICS_PORT_FILE"
    below = tmp_path / "none" / "port"
    assert of_port_file(below) == f"there is no directory {tmp_path}/none; choose another TOPICS_PORT_FILE"
    assert sorted(os.listdir(tmp_path)) == ["file"]


@pytest.mark.parametrize("word", ["run", "check", "status", "stop"])
def test_an_empty_flag_is_not_the_default(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--data-dir "$UNSET"` started a service on ./topics-data."""
    monkeypatch.chdir(tmp_path)
    assert main([word, "--data-dir", ""]) == 2
    assert capsys.readouterr().err == "topics-supervisor: --data-dir=: must be a path, not a URL\n"
    assert os.listdir(tmp_path) == []


def test_a_service_that_proc_hides_is_told() -> None:
    """systemd's ProtectProc= hides it from the `reload` of its own unit."""
    namespace = ["--mount"] if os.geteuid() == 0 else ["--mount", "--user", "--map-root-user"]
    hidden = ["unshare", *namespace, "/bin/sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"', str(COMMAND)]
    with Service() as service:
        for word in ("status", "reload", "stop"):
            command = [*hidden, word, "--data-dir", service.data_dir]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")


def test_a_stranger_with_the_pid_of_a_service_elsewhere_gets_no_signal(tmp_path: Path) -> None:
    """A service in a container writes the pid that it has there."""
    lock = DataDirLock.acquire(str(tmp_path))
    with subprocess.Popen(["sleep", "600"]) as stranger:
        Path(lock.path).write_text(f"{stranger.pid}\n")
        for ask in (stop, reload):
            with pytest.raises(OSError, match=f"process {stranger.pid} here is not the service"):
                ask(str(tmp_path), 60_000)
        assert stranger.poll() is None
        done = subprocess.run([COMMAND, "stop", "--data-dir", tmp_path], check=False, capture_output=True, text=True)
        assert (done.returncode, stranger.poll()) == (1, None)
        assert done.stderr.startswith("topics-supervisor: not stopped: process"), done.stderr
        stranger.kill()
        stranger.wait()
        for ask in (stop, reload):  # nobody has its pid here now, but the service still runs there
            with pytest.raises(OSError, match=f"process {stranger.pid} here is not the service"):
                ask(str(tmp_path), 60_000)
    lock.release()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_stranger_with_the_pid_of_a_follower_gets_no_signal(tmp_path: Path, elsewhere: bool) -> None:
    """The pid of one that runs in a container, or of one that has just died here."""
    lock = DataDirLock.acquire(str(tmp_path))
    shared = SharedMemory.create(shm_names.identity(str(tmp_path)), 1, 1, 1 << 16, 1)
    with subprocess.Popen(["sleep", "600"]) as stranger:
        shared.control.header.set("follows", 1)
        shared.control.cell(Role.ARCHIVER, 0).set("state", ProcessState.READY)
        shared.control.cell(Role.ARCHIVER, 0).set("pid", stranger.pid)
        if elsewhere:
            Path(lock.path).write_text(f"{stranger.pid}\n")
        with pytest.raises(OSError, match="is not the service" if elsewhere else "does not lead after 1 ms"):
            promote(str(tmp_path), 1)
        stranger.terminate()
        assert stranger.wait() == -signal.SIGTERM, "the first signal that it got"
    shared.destroy()
    lock.release()


def test_a_promotion_that_has_begun_cannot_be_withdrawn(tmp_path: Path) -> None:
    """Its note says it before its process has taken a step; then the process says it."""
    assert cancel(str(tmp_path), 1) is None, "nothing runs"
    lock = DataDirLock.acquire(str(tmp_path))
    shared = SharedMemory.create(shm_names.identity(str(tmp_path)), 1, 1, 1 << 16, 1)
    cell = shared.control.cell(Role.ARCHIVER, 0)
    for taken_over, error, said in ((0, NotFollowingError, None), (1, OSError, "another service took over from it")):
        cell.set("taken_over", taken_over)
        for command in (promote, cancel):
            with pytest.raises(error, match=said):
                command(str(tmp_path), 1)
    cell.set("taken_over", 0)
    shared.control.header.set("follows", 1)
    with pytest.raises(TimeoutError, match="has not answered after 1 ms"):
        cancel(str(tmp_path), 1)
    with pytest.raises(TimeoutError, match="was not told to, as its process that follows was not ready"):
        promote(str(tmp_path), 1)
    cell.set("promotion_begun", 1)
    too_late = "^it has begun to take over, and goes on by itself, also after a restart$"
    with pytest.raises(OSError, match=too_late):
        cancel(str(tmp_path), 1)
    cell.set("promotion_begun", 0)
    write_note(OsFileSystem(), str(tmp_path), FollowNote("file:///nowhere", fence_id="f"))
    with pytest.raises(OSError, match=too_late):
        cancel(str(tmp_path), 1)
    with pytest.raises(TimeoutError, match=f"; {too_late[1:]}"):
        promote(str(tmp_path), 1)
    shared.destroy()
    with pytest.raises(TimeoutError, match=f"; {too_late[1:]}"):
        promote(str(tmp_path), 1)
    write_note(OsFileSystem(), str(tmp_path), FollowNote("file:///nowhere"))
    with pytest.raises(TimeoutError, match="was not told to"):
        promote(str(tmp_path), 1)
    lock.release()


@contextlib.contextmanager
def beating(cell: ProcessCell) -> Iterator[None]:
    """Have a process show that it lives, inside the block."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.01):
            cell.add("heartbeat_ms")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_a_promotion_that_waits_is_told_from_one_that_somebody_withdrew(tmp_path: Path) -> None:
    """This process stands for the follower's."""
    lock, place = DataDirLock.acquire(str(tmp_path)), str(tmp_path)
    shared = SharedMemory.create(shm_names.identity(place), 1, 1, 1 << 16, 1)
    cell = shared.control.cell(Role.ARCHIVER, 0)
    shared.control.header.set_all({"follows": 1, "started_ms": 1})
    cell.set_all({"pid": os.getpid(), "state": ProcessState.READY})

    @contextlib.contextmanager
    def answering(number: signal.Signals, **words: int) -> Iterator[None]:
        former = signal.signal(number, lambda _number, _frame: cell.set_all(words))
        try:
            yield
        finally:
            signal.signal(number, former)

    with answering(signal.SIGUSR2), pytest.raises(OSError, match="no promotion waits"):
        cancel(place, 60_000)
    with answering(signal.SIGUSR1), pytest.raises(TimeoutError, match="; somebody has withdrawn it"):
        promote(place, 1)
    with answering(signal.SIGUSR1), beating(cell), pytest.raises(OSError, match=r"^somebody has withdrawn it"):
        promote(place, 60_000)  # it heard of that after its time
    with answering(signal.SIGUSR1, promotion_ms=5), pytest.raises(TimeoutError, match="it goes on to try"):
        promote(place, 1)
    with answering(signal.SIGUSR2, promotion_begun=1), pytest.raises(OSError, match="it has begun to take over"):
        cancel(place, 60_000)
    cell.set("promotion_begun", 0)
    with answering(signal.SIGUSR2, promotion_ms=0):
        done = cancel(place, 60_000)
    assert done is not None
    assert done.words == f"the promotion is withdrawn: process {os.getpid()} goes on to follow"
    shared.destroy()
    lock.release()


def test_an_address_of_another_machine() -> None:
    with pytest.raises(AddressError, match=r"cannot listen on 192\.0\.2\.1:0: .*correct TOPICS_HOST"):
        listen("192.0.2.1", 0)


def test_a_name_that_means_nothing() -> None:
    with pytest.raises(AddressError, match=r"cannot listen on no-such-host\.invalid:80: .*; correct TOPICS_HOST"):
        listen("no-such-host.invalid", 80)


def test_every_address_of_a_name_gets_the_same_port() -> None:
    listeners = listen("localhost", 0)
    assert {listener.getsockname()[1] for listener in listeners} == {port_of(listeners)}
    for listener in listeners:
        listener.close()


def test_every_process_has_a_socket_of_its_own_and_a_second_service_none(taken: int) -> None:
    rows = listen_for("127.0.0.1", 0, 3)
    port = port_of(rows[0])
    try:
        assert [[listener.getsockname() for listener in row] for row in rows] == [[("127.0.0.1", port)]] * 3
        for one in (port, taken):
            with pytest.raises(AddressError, match="Address already in use"):
                listen_for("127.0.0.1", one, 3)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
        shares = [0, 0, 0]
        for (listener,) in rows:
            listener.setblocking(False)

        def all_accepted() -> bool:
            """The last word of a connection may still be on its way."""
            for index, (listener,) in enumerate(rows):
                with contextlib.suppress(BlockingIOError):
                    while True:
                        listener.accept()[0].close()
                        shares[index] += 1
            return sum(shares) == 200

        poll("all of them", all_accepted)
        assert min(shares) > 20, shares
        for client in clients:
            client.close()
    finally:
        for (listener,) in rows:
            listener.close()


def test_a_data_dir_that_cannot_be_made(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    service = start(data_dir=tmp_path / "file" / "data")
    assert service.wait_exit() == 1
    assert f"data directory {tmp_path}/file/data is not writable: Not a directory" in service.log_text()
    assert "choose another TOPICS_DATA_DIR" in service.log_text()


def test_a_data_dir_that_cannot_be_written(start: Start) -> None:
    service = start(data_dir=Path("/sys/topics-data"))  # there not even root makes a directory
    assert service.wait_exit() == 1
    assert "data directory /sys/topics-data is not writable: " in service.log_text()


def test_too_little_shared_memory(start: Start) -> None:
    needed = SharedMemory.needed_bytes(2, 2, 64 * 1024)
    service = start(shm_free_bytes=needed - 1)
    assert service.wait_exit() == 1
    assert f"/dev/shm has {needed / 2**20:.1f} MiB free and {needed / 2**20:.1f} MiB are needed" in service.log_text()
    assert service.shared_memory() == []


def test_just_enough_shared_memory(start: Start) -> None:
    service = start(shm_free_bytes=SharedMemory.needed_bytes(2, 2, 64 * 1024))
    service.wait_state("running")
    assert service.stop() == 0


def test_a_port_file_that_cannot_be_written(start: Start, tmp_path: Path) -> None:
    service = start({"TOPICS_PORT_FILE": str(tmp_path / "nowhere" / "port")})
    assert service.wait_exit() == 1
    assert f"TOPICS_PORT_FILE={tmp_path}/nowhere/port: cannot be written: No such file" in service.log_text()
    assert service.shared_memory() == []


def test_shortage_names_what_to_turn(tmp_path: Path) -> None:
    shortage = shared_memory_shortage(settings(tmp_path, wal_shards="3", frontends="5"), free(1 << 20))
    assert shortage is not None
    for word in ("/dev/shm has 1.0 MiB free", "TOPICS_WAL_SHARDS=3", "TOPICS_FRONTENDS=5", "TOPICS_RING_BYTES=4194304"):
        assert word in shortage
    assert shared_memory_shortage(settings(tmp_path), free(1 << 40)) is None


def test_too_few_open_files() -> None:
    shortage = open_files_shortage(1023)
    assert shortage is not None
    assert "may open 1023 files and 1024 are needed" in shortage
    assert open_files_shortage(1024) is None
    assert open_files_shortage(-1) is None  # RLIM_INFINITY


def test_too_small_files(tmp_path: Path) -> None:
    assert file_size_shortage(settings(tmp_path), -1) is None  # RLIM_INFINITY
    assert file_size_shortage(settings(tmp_path), 1 << 40) is None
    for most in (0, 1000, 1_000_000):
        shortage = file_size_shortage(settings(tmp_path), most)
        assert shortage is not None
        assert f"may write files of {most} bytes and " in shortage
        assert "LimitFSIZE" in shortage


@pytest.mark.parametrize("most", [1000, 1_000_000])
def test_a_start_under_a_small_limit_of_file_size_is_refused_in_a_sentence(tmp_path: Path, most: int) -> None:
    limited = ["prlimit", f"--fsize={most}", str(COMMAND), "run"]
    answer = subprocess.run(
        limited,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"TOPICS_DATA_DIR": str(tmp_path)},
    )
    assert answer.returncode == 1
    assert f"may write files of {most} bytes" in answer.stdout + answer.stderr
    assert "Traceback" not in answer.stdout + answer.stderr


@pytest.mark.parametrize("name", [RESTORED_NAME, BORROWED_NAME, FOLLOWING_NAME])
def test_a_start_with_a_damaged_note_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "meta").mkdir()
    note = tmp_path / "meta" / name
    note.write_bytes(b'{"version": 1, ')
    environment = clean_environment({"TOPICS_DATA_DIR": str(tmp_path), "TOPICS_PORT": "0"})
    start = [str(COMMAND), "run"]
    answer = subprocess.run(start, check=False, env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1
    where = f"cannot start: data directory {tmp_path} cannot be used: {note} is damaged (Input data was truncated): "
    assert where in answer.stderr
    assert "Traceback" not in answer.stderr
    found = check(settings(tmp_path, data_dir=str(tmp_path)))
    assert [finding for finding in found if finding.problem and str(note) in finding.problem]


def test_check_finds_nothing_where_a_start_would_work_and_makes_nothing(tmp_path: Path) -> None:
    assert [finding.problem for finding in check(settings(tmp_path))] == [None] * 7
    assert list(tmp_path.iterdir()) == []


def test_check_finds_everything_at_once(tmp_path: Path, taken: int) -> None:
    busy = settings(tmp_path, port=str(taken))
    lock = DataDirLock.acquire(busy.data_dir)
    problems = {finding.subject: finding.problem for finding in check(busy, free(4096))}
    lock.release()
    assert problems[f"data directory {busy.data_dir}"] is None
    assert f"(process {os.getpid()})" in (problems["lock"] or "")
    assert "are needed" in (problems["shared memory in /dev/shm"] or "")
    assert "Address already in use" in (problems[f"address 127.0.0.1:{taken}"] or "")


def test_check_of_a_data_dir_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding, *_) = check(settings(tmp_path, data_dir=str(tmp_path / "file" / "data")))
    assert finding.problem == f"{tmp_path}/file is not a directory; choose another TOPICS_DATA_DIR"


def of_cold(settings: Settings) -> CheckFinding:
    (finding,) = (finding for finding in check(settings) if finding.subject.startswith("cold directory"))
    return finding


def test_check_looks_at_the_cold_directory(tmp_path: Path) -> None:
    """The check makes nothing. `run` would start in any case, but no segment could go there."""
    cold = tmp_path / "cold"
    both = settings(tmp_path, cold_dir=str(cold))
    assert of_cold(both) == CheckFinding(f"cold directory {cold}, on the device of the data directory", None)
    assert list(tmp_path.iterdir()) == []
    assert of_cold(settings(tmp_path, cold_dir="/dev/shm/none")).subject.endswith(", on another device")
    cold.write_text("")
    assert of_cold(both).problem == f"{cold} is not a directory; choose another TOPICS_COLD_DIR"


def test_a_cold_directory_that_nobody_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere: the system's answer is made up."""
    cold = tmp_path / "cold"
    cold.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cold)
    problem = of_cold(settings(tmp_path, cold_dir=str(cold))).problem
    assert problem is not None
    assert f"may not write {cold}; give it the right or choose another TOPICS_COLD_DIR" in problem


def test_a_cold_directory_that_is_the_data_directory_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "cold").symlink_to(tmp_path / "data")
    problem = of_cold(settings(tmp_path, cold_dir=str(tmp_path / "cold"))).problem
    assert problem == "is the data directory under another name; choose another TOPICS_COLD_DIR"


def test_a_cold_directory_whose_disk_is_not_mounted(tmp_path: Path) -> None:
    topic, cold = tmp_path / "data/topics" / f"{7:016x}", tmp_path / "cold"
    topic.mkdir(parents=True)
    both = settings(tmp_path, cold_dir=str(cold))
    for name in ("seg-1.data", "seg-1.idx", "seg-2.1.idx"):
        assert of_cold(both).problem is None
        (topic / name).touch()
    for made in (None, cold, cold / "topics"):
        if made is not None:
            made.mkdir()
        problem = of_cold(both).problem
        assert problem == "it is empty, but segments were moved there; mount its disk, or restore it"
    (cold / "topics" / topic.name).mkdir()
    assert of_cold(both).problem is None


def test_a_cold_directory_that_hangs_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    is_dir = os.path.isdir

    def hangs(path: str) -> bool:
        assert not path.endswith("cold") or gate.wait(20)
        return is_dir(path)

    (tmp_path / "cold").mkdir()
    monkeypatch.setattr(os.path, "isdir", hangs)
    monkeypatch.setattr("topics.supervisor.check.COLD_TIMEOUT_S", 0.05)
    problem = of_cold(settings(tmp_path, cold_dir=str(tmp_path / "cold"))).problem
    gate.set()
    assert problem is not None
    assert "it has not answered within 0.05 s" in problem
