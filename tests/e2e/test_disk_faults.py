"""The disk refuses: an error to the writer, nothing of it visible, the service alive, and on it goes by itself."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.contract.asking import ok, refused, state
from tests.contract.stream import Stream, watch
from tests.e2e.test_crash import everything
from tests.harness import COMMAND, Service, poll, size_bytes

RECORD = "x" * 2000
LIMIT_BYTES = 300_001
"""A limit inside a frame: the write that meets it is cut in its middle. It is far above the service's log file."""
NO_LIMIT = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
TOPICS = {"t-disk": "disk", "t-fsync": "fsync"}


def write(client: httpx.Client, topic: str, value: str, count: int = 20) -> httpx.Response:
    """One write of `count` records, told apart by their numbers."""
    records = [{"data": f"{value}.{n} {RECORD}"} for n in range(count)]
    return client.post(f"/v0/topics/{topic}", json={"records": records})


def took(client: httpx.Client, topic: str, value: str) -> bool:
    return write(client, topic, value).is_success


def fill_until_refused(client: httpx.Client, topic: str, acked: list[str]) -> httpx.Response:
    """Writes until the first refusal, which it returns; what was acked before goes onto `acked`."""

    def refusal() -> httpx.Response | None:
        value = f"{topic}.{len(acked)}"
        answer = write(client, topic, value)
        if answer.is_success:
            acked.append(value)
            return None
        return answer

    return poll("the disk to refuse", refusal, 60, every_s=0)


def check_refusal(client: httpx.Client, topic: str, refusal: httpx.Response, acked: list[str]) -> None:
    """503 with a cause; the head is what was acked; reads and probes answer."""
    error = refused(refusal, 503, "storage_unavailable")
    assert error["detail"]["cause"]
    assert refusal.headers["retry-after"].isdigit()
    assert state(client, topic)["head_seq"] == 20 * len(acked)
    assert client.get("/v0/health").status_code == 200
    page = ok(client.post(f"/v0/topics/{topic}/diff", json={"from_seq": 20 * len(acked)}))
    assert page["records"] == []


def check_log(service: Service, topic: str, acked: list[str]) -> None:
    """Exactly the acked writes, whole and in order."""
    stored = [json.loads(data).partition(" ")[0] for _, data, _ in everything(service.client, topic)]
    assert stored == [f"{value}.{n}" for value in acked for n in range(20)]


def refuse_and_recover(service: Service, topic: str, make_room: Callable[[], object]) -> None:
    """Runs into the full disk twice, is given room, and goes on without a restart; then also after one."""
    client = service.client
    acked: list[str] = []
    for _ in range(2):
        check_refusal(client, topic, fill_until_refused(client, topic, acked), acked)
    make_room()

    def taken() -> bool:
        value = f"{topic}.{len(acked)}"
        answer = write(client, topic, value)
        if answer.is_success:
            acked.append(value)
        return answer.is_success

    for _ in range(5):
        poll("writes to be taken again", taken, 20)
    check_log(service, topic, acked)
    service.kill_group()
    service.start()
    check_log(service, topic, acked)


@pytest.mark.parametrize(("topic", "durability"), TOPICS.items(), ids=TOPICS.values())
def test_a_file_size_limit(topic: str, durability: str) -> None:
    """RLIMIT_FSIZE put on the running shard: writes beyond it are short, then EFBIG, as on a disk that is full."""
    with Service(shards=1, frontends=1) as service:
        service.client.put(f"/v0/topics/{topic}", json={"durability": durability}).raise_for_status()
        shard = psutil.Process(service.pid_of("walshard"))
        shard.rlimit(psutil.RLIMIT_FSIZE, (LIMIT_BYTES, psutil.RLIM_INFINITY))
        refuse_and_recover(service, topic, lambda: shard.rlimit(psutil.RLIMIT_FSIZE, NO_LIMIT))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system of its own")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize(("topic", "durability"), TOPICS.items(), ids=TOPICS.values())
def test_a_full_disk(small_disk: Path, topic: str, durability: str) -> None:
    with Service(shards=1, frontends=1, data_dir=small_disk / "data") as service:
        service.client.put(f"/v0/topics/{topic}", json={"durability": durability}).raise_for_status()

        def make_room() -> None:
            subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)

        refuse_and_recover(service, topic, make_room)


def test_on_a_full_disk_a_deleted_topic_gives_its_room_back(small_disk: Path) -> None:
    """Without a restart: writes are taken again, and nothing that was acked is missing."""
    subprocess.run(["mount", "-o", "remount,size=12m", str(small_disk)], check=True)
    env = {"TOPICS_CHECKPOINT_WAL_BYTES": "1MiB", "TOPICS_CHECKPOINT_INTERVAL_MS": "500"}
    with Service(shards=1, frontends=1, data_dir=small_disk / "data", env=env) as service:
        client = service.client
        filled = [f"old.{n}" for n in range(125)]
        for value in filled:
            # A checkpoint has to make room for the next ones now and then.
            poll("a write to be taken", partial(took, client, "old", value), 20)

        def in_segments() -> bool:
            return size_bytes(small_disk.rglob("seg-*.data")) > len(filled) * 20 * len(RECORD)

        poll("all of it to be in segments", in_segments, 30)
        acked: list[str] = []
        refused(fill_until_refused(client, "new", acked), 503, "storage_unavailable")
        ok(client.delete("/v0/topics/old"))
        taken: list[str] = []

        def is_taken() -> bool:
            value = f"more.{len(taken)}"
            if write(client, "more", value).is_success:
                taken.append(value)
            return len(taken) == 20

        poll("writes to be taken again", is_taken, 30)
        check_log(service, "new", acked)
        service.kill_group()
        service.start()
        check_log(service, "new", acked)
        check_log(service, "more", taken)


@pytest.fixture
def small_memory(tmp_path: Path) -> Path:
    return in_small_memory(tmp_path, 32)


def in_small_memory(tmp_path: Path, mebibytes: int) -> Path:
    """Return the command of a service with a /dev/shm of this size."""
    command = tmp_path / "in-small-memory"
    mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$0" "$@"'
    command.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{mount}' {COMMAND} \"$@\"\n")
    command.chmod(0o700)
    if subprocess.run([str(command), "--help"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system of its own")
    return command


def walshards(count: int) -> list[psutil.Process]:
    """Return the shards of the one service that runs, once there are `count`. `topics-supervisor status` cannot tell:
    the service has a /dev/shm of its own.
    """

    def living() -> list[psutil.Process]:
        found = list[psutil.Process]()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # other children of the tests end meanwhile
                if process.name().startswith("walshard-") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    return poll(f"{count} shards", lambda: found if len(found := living()) == count else None)


@pytest.mark.parametrize("whole", [True, False], ids=["the topic", "its records"])
def test_on_a_full_dev_shm_what_is_deleted_gives_its_room_back(small_memory: Path, whole: bool) -> None:
    with Service(shards=1, frontends=1, command=small_memory) as service:
        client = service.client
        kept: list[str] = []
        for name in ("old", "kept"):
            client.put(f"/v0/topics/{name}", json={"durability": "ephemeral"}).raise_for_status()
        while (answer := write(client, "old", "old")).is_success:
            if not (answer := write(client, "kept", f"kept.{len(kept)}")).is_success:
                break
            kept.append(f"kept.{len(kept)}")
        assert refused(answer, 503, "storage_unavailable")["detail"]["cause"] == "ENOSPC"
        filled = len(kept)
        assert filled > 100
        if whole:
            ok(client.delete("/v0/topics/old"))
        else:
            ok(client.post("/v0/topics/old/delete", json={"before_seq": 1 << 40}))

        def is_taken() -> bool:
            if write(client, "kept", f"kept.{len(kept)}").is_success:
                kept.append(f"kept.{len(kept)}")
            return len(kept) >= filled + filled // 2

        poll("half of what was deleted to be written", is_taken, 30)
        check_log(service, "kept", kept)


def test_a_shard_that_dies_on_a_full_dev_shm_comes_back_each_time(small_memory: Path) -> None:
    with Service(shards=1, frontends=1, command=small_memory) as service:
        client = service.client
        client.put("/v0/topics/old", json={"durability": "ephemeral"}).raise_for_status()
        filling: list[str] = []
        for life in range(4):
            refused(fill_until_refused(client, "old", filling), 503, "storage_unavailable")
            (shard,) = walshards(1)
            shard.kill()
            poll("its successor to take a durable write", partial(took, client, "durable", f"life.{life}"), 60)
        check_log(service, "old", filling)


def test_a_shard_that_dies_on_a_full_dev_shm_comes_back_while_others_fill_it(tmp_path: Path) -> None:
    """The RAM logs of other shards took the room that was kept for it."""
    with Service(shards=2, frontends=1, command=in_small_memory(tmp_path, 64)) as service:
        client = service.client
        names = [f"t{number}" for number in range(8)]  # some of each shard
        for name in names:
            client.put(f"/v0/topics/{name}", json={"durability": "ephemeral"}).raise_for_status()
        for name in names:
            fill_until_refused(client, name, [])
        stop = threading.Event()

        def keep_writing(name: str) -> None:
            while not stop.is_set():
                with suppress(httpx.TransportError):
                    write(client, name, "x")

        with ThreadPoolExecutor(len(names)) as pool:
            try:
                writing = [pool.submit(keep_writing, name) for name in names]
                for life in range(3):
                    for shard in walshards(2):
                        shard.kill()
                        for name in names:
                            took_durable = partial(took, client, f"durable.{name}", f"{life}.{shard.name}")
                            poll("both shards to take durable writes", took_durable, 60)
            finally:
                stop.set()
            for written in writing:
                written.result()


def test_other_topics_and_streams_do_not_suffer_from_a_refusal() -> None:
    """Two shards, the files of one limited: the other's topics are written and streamed all the while."""
    with Service(shards=2, frontends=1) as service:
        client = service.client
        names = [f"t{n}" for n in range(8)]
        for name in names:
            client.put(f"/v0/topics/{name}").raise_for_status()
        # Made beforehand: the limit is on every file of the shard, those in memory that keep sessions too.
        wid = watch(client, {name: {} for name in names})["wid"]
        shard = psutil.Process(service.pid_of("walshard", 0))
        shard.rlimit(psutil.RLIMIT_FSIZE, (LIMIT_BYTES, psutil.RLIM_INFINITY))

        def written() -> dict[str, int]:
            return {name: write(client, name, "v").status_code for name in names}

        poll("one shard to refuse", lambda: 503 in written().values(), 60)
        well = {name for name, status in written().items() if status == 200}
        assert 0 < len(well) < len(names)
        heads = {name: state(client, name)["head_seq"] for name in names}
        with Stream(service.url, wid) as stream:
            positions = dict.fromkeys(names, 0)
            while positions != heads:
                positions = stream.event().positions
            for name in well:
                assert write(client, name, "w", 1).status_code == 200
            while well:
                frame = stream.event()
                if frame.event == "record":
                    well.remove(frame.json["topic"])
