"""Programs that end, fork or lose their main thread while the client is at work: nothing hangs, and nothing is lost."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.harness import Service, poll
from topics.client import Client, LeaseLostError

JOBS = [1, 2]
ENDS_IN_A_LOOP = """
import sys
from topics.client import Client

def work():
    jobs = Client(sys.argv[1]).queue(sys.argv[2]).work()
    print(next(jobs).data, flush=True)
    raise ValueError("it ends")

work()
"""
ENDS_WITH_ITS_MAIN_THREAD = """
import sys, threading
from topics.client import Client

def tell():
    threading.main_thread().join()
    print("ended", flush=True)

threading.Thread(target=lambda: Client(sys.argv[1]).queue(sys.argv[2]).run(print)).start()
threading.Thread(target=tell).start()
"""
LEAVES_A_PRODUCER = """
import atexit, sys
from topics.client import Client, ProducerLimits

atexit.register(lambda: producer.send("the end"))
producer = Client(sys.argv[1]).producer(sys.argv[2], limits=ProducerLimits(linger_ms=3_600_000))
for number in range(5):
    producer.send(number)
"""


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


@pytest.fixture
def queue(topics: Client, topic: str) -> str:
    topics.put_topic(topic, type="queue")
    return topic


def begin(program: str, service: Service, topic: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, service.url, topic]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for its end; return what it wrote to stdout and stderr."""
    try:
        return program.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        program.kill()
        pytest.fail("the program hangs")


def states(topics: Client, queue: str) -> list[tuple[Any, str]]:
    return [(job.data, job.state) for job in topics.queue(queue).peek().jobs]


def test_a_program_that_ends_within_its_loop_ends(service: Service, topics: Client, queue: str) -> None:
    topics.append(queue, JOBS, create=False)
    _, errors = end(begin(ENDS_IN_A_LOOP, service, queue))
    assert "it ends" in errors
    assert "Exception ignored" not in errors
    poll("its jobs to be given back", lambda: states(topics, queue) == [(1, "waiting"), (2, "waiting")])


def test_a_run_whose_main_thread_has_ended_says_so_and_fails_no_job(
    service: Service, topics: Client, queue: str
) -> None:
    program = begin(ENDS_WITH_ITS_MAIN_THREAD, service, queue)
    assert program.stdout is not None
    assert program.stdout.readline() == "ended\n"
    topics.append(queue, JOBS, create=False)
    output, errors = end(program)
    assert not output
    assert "main thread has ended" in errors
    assert "to be repeated" not in errors
    poll("its jobs to be given back", lambda: states(topics, queue) == [(1, "waiting"), (2, "waiting")])


def test_what_waits_in_a_producer_is_written_at_the_end_of_a_program(
    service: Service, topics: Client, topic: str
) -> None:
    _, errors = end(begin(LEAVES_A_PRODUCER, service, topic))
    assert not errors
    assert [record.data for record in topics.diff(topic).records] == [*range(5), "the end"]


def test_a_forked_child_that_settles_a_job_of_its_parent_is_refused(topics: Client, queue: str) -> None:
    topics.append(queue, JOBS, create=False)
    with closing(topics.queue(queue).work()) as jobs:
        job = next(jobs)
        child = os.fork()
        if not child:
            signal.alarm(30)  # ends it if it hangs
            try:
                job.ack()
            except LeaseLostError:
                with job:
                    pass
                jobs.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        job.ack()
    poll("the other one to be given back", lambda: states(topics, queue) == [(2, "waiting")])


@pytest.mark.parametrize("former", ["the default", "the program's"])
def test_a_signal_to_a_forked_child_is_not_one_to_its_parent(topics: Client, queue: str, former: str) -> None:
    """A pool of processes ends its children so, and waits for their ends."""
    topics.append(queue, JOBS, create=False)
    handler = signal.SIG_DFL if former == "the default" else lambda *_: os._exit(7)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with closing(topics.queue(queue).work(stop_on=(signal.SIGUSR1,))) as jobs:
            assert next(jobs).data == 1
            child = os.fork()
            if not child:
                os.kill(os.getpid(), signal.SIGUSR1)
                os._exit(1)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == (-signal.SIGUSR1 if former == "the default" else 7)
            assert next(jobs).data == 2, "the parent goes on"
            os.kill(os.getpid(), signal.SIGUSR1)
            assert next(jobs, None) is None, "until it gets the signal itself"
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_job_is_lost_once_its_loop_has_ended(topics: Client, queue: str) -> None:
    topics.append(queue, JOBS, create=False)
    jobs = topics.queue(queue).work()
    job = next(jobs)
    jobs.close()
    with pytest.raises(LeaseLostError):
        job.ack()


class Collect(logging.Handler):
    """Has the collector run in the thread that extends leases, where it may run at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread().name == "topics-queue":
            gc.collect()


def test_a_loop_that_is_collected_in_its_own_thread_ends(topics: Client, queue: str) -> None:
    def leave() -> None:
        jobs = topics.queue(queue).work(lease_ms=300)
        next(jobs)
        cycle: list[object] = [jobs]
        cycle.append(cycle)

    topics.append(queue, JOBS, create=False)
    log, collect = logging.getLogger("topics.client"), Collect()
    level = log.level
    log.setLevel(logging.DEBUG)
    gc.disable()
    try:
        leave()
        log.addHandler(collect)
        poll("its thread to end", lambda: all(one.name != "topics-queue" for one in threading.enumerate()))
    finally:
        gc.enable()
        log.removeHandler(collect)
        log.setLevel(level)
    poll("its jobs to be given back", lambda: states(topics, queue) == [(1, "waiting"), (2, "waiting")])
