"""Webhooks from a queue, their workers killed at random: every job is done, none is lost, none stays behind.

TOPICS_WEBHOOK_SEED=<seed> repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.lease_watch import LeaseWatch
from tests.harness import Service, clean_environment, poll
from topics.client import Client

REPOSITORY = Path(__file__).parents[2]
QUEUE = "hooks"
JOBS = 200
POISON = 7
"""Every so many, the receiver refuses for ever."""
ATTEMPTS = 10
WORKERS = 3
KILLS = 12
LEASE_MS = 3_000
WORK_S = 0.03
"""Time that a receiver takes for a webhook, so that a worker that is killed has some under way."""
DEADLINE_S = 120.0
ADMIN, WRITER, WORKER = (name * 8 for name in ("ad", "wr", "wo"))
KEYS = f"{ADMIN},{WRITER}:write,{WORKER}:read+write"


class Receiver(ThreadingHTTPServer):
    """Takes webhooks; of those that are no poison it refuses some at first."""

    daemon_threads = True

    def __init__(self, rng: random.Random) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.refusals = {number: rng.choice((0, 0, 1)) for number in range(JOBS)}
        self.taken: Counter[int] = Counter()
        self.keys: dict[int, set[str]] = {}
        self.guard = threading.Lock()

    def has_more_than(self, done: int) -> bool:
        with self.guard:
            return len(self.taken) > done

    def take(self, number: int, key: str) -> bool:
        with self.guard:
            self.keys.setdefault(number, set()).add(key)
            if number % POISON == 0:
                return False
            if self.refusals[number]:
                self.refusals[number] -= 1
                return False
            self.taken[number] += 1
            return True


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(WORK_S)
        taken = self.server.take(body["number"], self.headers["Idempotency-Key"])
        self.send_response(204 if taken else 500)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the log out of the test's output."""


@contextmanager
def receiving(rng: random.Random) -> Iterator[Receiver]:
    receiver = Receiver(rng)
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join()


def start_worker(service: Service, said: Path) -> subprocess.Popen[bytes]:
    options = {"queue": QUEUE, "attempts": ATTEMPTS, "threads": 4, "lease-ms": LEASE_MS}
    options |= {"backoff-ms": 20, "backoff-max-ms": 200}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with said.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.webhooks", "--url", service.url, "work", *flags],
            cwd=REPOSITORY,
            env=clean_environment({}),
            stdout=output,
            stderr=output,
        )


def run_example(service: Service, token: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.webhooks", "--url", service.url, "--token", token, *arguments],
        cwd=REPOSITORY,
        env=clean_environment({}),
        stderr=subprocess.PIPE,
        text=True,
    )


def pid_of(node: str) -> int:
    """Return the pid of a worker from its name, which is made of host, pid and something random."""
    return int(node.split("-")[-2] or 0)


def is_at_work(worker: subprocess.Popen[bytes]) -> bool:
    """It has installed its signal handlers, which comes last before it takes jobs, and lives."""
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):  # or is just being taken away
        return worker.poll() is None and catches(worker.pid, signal.SIGTERM)
    return False


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for this signal."""
    (mask,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_killed_workers_lose_no_job(tmp_path: Path) -> None:
    seed = int(os.environ.get("TOPICS_WEBHOOK_SEED") or random.randrange(1 << 32))
    print(f"TOPICS_WEBHOOK_SEED={seed}")
    rng = random.Random(seed)
    said = tmp_path / "said"
    workers: list[subprocess.Popen[bytes]] = []
    killed: set[int] = set()
    with (
        receiving(rng) as receiver,
        Service(shards=1) as service,
        Client(service.url) as topics,
        LeaseWatch(
            service.url,
            QUEUE,
            LEASE_MS / 1000,
            gone=lambda node: pid_of(node) in killed,
            staffed=lambda: any(is_at_work(worker) for worker in workers),
        ) as watch,
    ):
        url = f"http://127.0.0.1:{receiver.server_port}/"
        workers += [start_worker(service, said) for _ in range(WORKERS)]
        try:
            poll("a worker to have made the queue", lambda: any(t.topic == QUEUE for t in topics.list_topics()), 30.0)
            # Else one that starts late may find that the others have done everything, and nobody was killed at work.
            poll("all workers to be at work", lambda: all(map(is_at_work, workers)), 30.0)
            topics.append(QUEUE, [{"url": url, "body": {"number": number}} for number in range(JOBS)], create=False)

            def finished() -> bool:
                queue = topics.get_topic(QUEUE).queue
                assert queue is not None
                return queue.dead_lettered == len(range(0, JOBS, POISON)) and topics.get_topic(QUEUE).count == 0

            def holds_jobs(pid: int) -> bool:
                jobs = topics.queue(QUEUE).peek("leased", max_jobs=1000).jobs
                return finished() or any(pid_of(job.leased_to or "--") == pid for job in jobs)

            kills = 0
            while not finished() and kills < KILLS:
                done = min(len(receiver.taken), JOBS - len(range(0, JOBS, POISON)) - 1)
                victim = rng.randrange(WORKERS)
                # Killed while it works: not before somebody has done something since the last one.
                poll("a job to be done", partial(receiver.has_more_than, done), DEADLINE_S)
                if kills % 2 == 0:  # and the others whatever they are at, their start for instance
                    poll("the victim to be at work", partial(is_at_work, workers[victim]), 30.0)
                    poll("it to have jobs", partial(holds_jobs, workers[victim].pid))
                # What it holds is looked at before it is given back.
                workers[victim].send_signal(signal.SIGSTOP)
                killed.add(workers[victim].pid)
                watch.wait_seen()
                workers[victim].kill()
                workers[victim].wait()
                workers[victim] = start_worker(service, said)
                kills += 1
            poll("the queue to be empty", finished, DEADLINE_S, every_s=0.05)
            watch.wait_seen()
            for worker in workers:
                # One that was started last may still be importing, and would be ended by the signal itself.
                poll("a worker to catch SIGTERM", partial(catches, worker.pid, signal.SIGTERM), 30.0)
                worker.send_signal(signal.SIGTERM)
            assert [worker.wait(120) for worker in workers] == [0] * WORKERS, said.read_text()[-4000:]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

        good = {number for number in range(JOBS) if number % POISON}
        assert set(receiver.taken) == good
        # At least once, and each time under the same key.
        assert all(len(keys) == 1 for keys in receiver.keys.values())
        assert len({key for keys in receiver.keys.values() for key in keys}) == JOBS
        dead = [record for record in topics.read(f"{QUEUE}.dead") if hasattr(record, "data")]
        assert sorted(record.data["body"]["number"] for record in dead) == list(range(0, JOBS, POISON))
        print(f"{kills} kills, {sum(receiver.taken.values()) - len(good)} done twice")
        print(f"{watch.seen} jobs were in dead hands, {watch.longest_s:.2f} s at most until they were delivered again")
        assert not watch.stuck
        assert watch.seen


def test_a_configuration_is_left_as_it_is_and_only_the_maker_of_a_queue_needs_to_be_an_admin() -> None:
    with (
        receiving(random.Random(0)) as receiver,
        Service(shards=1, env={"TOPICS_API_KEYS": KEYS}) as service,
        Client(service.url, token=ADMIN) as topics,
    ):
        receiver.refusals = dict.fromkeys(range(JOBS), 0)
        url = f"http://127.0.0.1:{receiver.server_port}/"
        send = ("send", "--queue", QUEUE, url, json.dumps({"number": 1}))
        work = ("work", "--queue", QUEUE)
        for token, arguments, why in ((WRITER, send, "topic_not_found"), (WORKER, work, "forbidden")):
            refused = run_example(service, token, *arguments)
            said = refused.communicate(timeout=120)[1]
            assert (refused.returncode, why in said) == (1, True), said
        assert [topic.topic for topic in topics.list_topics()] == []

        topics.put_topic(QUEUE, type="queue", max_deliveries=10, cap_records=1000, discard="reject")
        before = topics.get_topic(QUEUE).config
        worker = run_example(service, WORKER, *work)
        try:
            sender = run_example(service, WRITER, *send)
            assert sender.communicate(timeout=120)[1] == ""
            poll("the webhook to be delivered", lambda: receiver.taken[1] == 1)
            worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=120)
            assert worker.returncode == 0
        finally:
            worker.kill()
            worker.wait()
        assert topics.get_topic(QUEUE).config == before
        assert before["max_deliveries"] == 10
