"""Producers of both clients against the real service: each record once, in order, whatever is killed."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.harness import Service, poll
from topics.client import (
    AsyncClient,
    Client,
    ClientError,
    ConflictError,
    InvalidRequestError,
    NewRecord,
    ProducerLimits,
    TopicFullError,
    UnreachableError,
)
from topics.client.accumulator import Accumulator
from topics.client.producers import new_epoch

HELD = ProducerLimits(linger_ms=3_600_000)
"""A batch goes when it is full or flushed."""
LIFE = """
import itertools, sys
from topics.client import Client, ProducerLimits
url, topic, end = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Client(url) as client, client.producer(topic, "importer", limits=ProducerLimits(batch_records=20)) as producer:
    last = producer.last()
    for number in range(0 if last is None else last.data + 1, end):
        producer.send(number)
        if number % 100 == 0:
            producer.flush()
            print(number, flush=True)
"""


@pytest.fixture
def topics(service: Service) -> Iterator[Client]:
    with Client(service.url) as client:
        yield client


def stored(client: Client, topic: str) -> list[Any]:
    return [record.data for record in client.read(topic)]


def test_each_record_gets_its_seq(topics: Client, topic: str) -> None:
    with topics.producer(topic, limits=ProducerLimits(batch_records=7)) as producer:
        sent = [producer.send(number) for number in range(50)]
        sent.append(producer.send(NewRecord(50, tag="last")))
        assert [one.result(20) for one in sent] == list(range(1, 52))
        assert sent[0].done()
    assert stored(topics, topic) == list(range(51))


def test_a_lone_record_goes_after_the_linger(topics: Client, topic: str) -> None:
    with topics.producer(topic) as producer:
        assert producer.send("x").result(20) == 1


def test_a_record_sent_just_before_the_end_is_written(topics: Client, topic: str) -> None:
    """The sender, woken by the record, may look between the end and the flush of it: it must not stop there."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(200):
            with topics.producer(topic, close_max_s=30) as producer:
                sent = producer.send(number)
            assert sent.result(0) == number + 1
    finally:
        sys.setswitchinterval(interval_s)


def test_flush_and_the_end_of_the_block_wait_for_the_answers(topics: Client, topic: str) -> None:
    with topics.producer(topic, limits=HELD) as producer:
        first = producer.send(1)
        assert not first.done()
        with pytest.raises(TimeoutError):
            first.result(0)
        producer.flush()
        assert first.done()
        second = producer.send(2)
    assert second.done()
    with pytest.raises(RuntimeError, match="was closed"):
        producer.send(3)
    producer.close()
    assert stored(topics, topic) == [1, 2]


def test_an_error_in_the_block_is_kept_and_what_was_sent_is_written(topics: Client, topic: str) -> None:
    with pytest.raises(KeyError), topics.producer(topic, limits=HELD) as producer:  # noqa: PT012
        producer.send(1)
        raise KeyError
    assert stored(topics, topic) == [1]


def test_a_record_that_json_cannot_hold_is_refused_at_once(topics: Client, topic: str) -> None:
    with topics.producer(topic) as producer:
        with pytest.raises(ValueError, match="record"):
            producer.send(float("nan"))
        producer.send(1)
    assert stored(topics, topic) == [1]


@pytest.mark.parametrize(
    "bad", ["x" * 2_000_000, NewRecord(0, tag="t" * 300), msgspec.Raw(b"{]"), NewRecord(0, delay_ms=1, deliver_at=1)]
)
def test_a_bad_record_fails_alone(topics: Client, topic: str, bad: Any) -> None:
    with topics.producer(topic, limits=HELD) as producer:
        sent = [producer.send(bad if number in (3, 11) else number) for number in range(20)]
        producer.flush()
        for number in (3, 11):
            with pytest.raises(InvalidRequestError):
                sent[number].result()
        good = [number for number in range(20) if number not in (3, 11)]
        assert [sent[number].result() for number in good] == list(range(1, 19))
    assert stored(topics, topic) == good


def test_a_bad_record_that_nobody_asks_for_is_told_at_the_end(topics: Client, topic: str) -> None:
    with pytest.raises(InvalidRequestError) as caught, topics.producer(topic) as producer:  # noqa: PT012
        producer.send(1)
        producer.send(NewRecord(2, tag="t" * 300))
        producer.send(3)
    assert "1 records" in caught.value.__notes__[0]
    assert stored(topics, topic) == [1, 3]


def test_a_topic_name_that_is_not_valid_ends_the_producer(topics: Client) -> None:
    with pytest.raises(InvalidRequestError, match="topic name"), topics.producer("no/topic", limits=HELD) as producer:
        sent = producer.send(1)
    with pytest.raises(InvalidRequestError):
        sent.result()


def test_a_full_topic_ends_the_producer_and_leaves_no_hole(topics: Client, topic: str) -> None:
    topics.put_topic(topic, cap_records=10, discard="reject")
    limits = ProducerLimits(batch_records=5)
    with pytest.raises(TopicFullError), topics.producer(topic, limits=limits) as producer:  # noqa: PT012
        sent = [producer.send(number) for number in range(5)]
        producer.flush()
        for number in range(5, 20):
            producer.send(number)
        producer.flush()
    assert [one.result() for one in sent] == [1, 2, 3, 4, 5]
    assert stored(topics, topic) == list(range(10))


def test_a_producer_that_has_failed_keeps_nothing_of_who_goes_on_to_send(topics: Client, topic: str) -> None:
    producer = topics.producer("/" + topic)
    sent = producer.send(1)
    depths = set()
    for _ in range(5):
        for ask in (producer.flush, partial(producer.send, 2), sent.result):
            with pytest.raises(InvalidRequestError) as failed:
                ask()
            depths.add(len(list(traceback.walk_tb(failed.value.__traceback__))))
    assert max(depths) < 12, "its traceback grows with each"
    with pytest.raises(InvalidRequestError):
        producer.close()


def test_the_next_life_shuts_out_the_one_before_and_goes_on_behind_it(topics: Client, topic: str) -> None:
    first = topics.producer(topic, "importer", limits=HELD)
    assert first.last() is None
    first.send("a")
    first.send("b")
    first.flush()
    second = topics.producer(topic, "importer", limits=HELD)
    last = second.last()
    assert last is not None
    assert last.data == "b"
    second.send("c")
    second.flush()
    late = first.send("late")
    with pytest.raises(ConflictError, match="goes on in epoch") as caught:
        first.flush()
    assert caught.value.code == "fenced"
    with pytest.raises(ConflictError):
        late.result()
    with pytest.raises(ConflictError):
        first.send("later")
    with pytest.raises(ConflictError):
        first.close()
    second.close()
    assert stored(topics, topic) == ["a", "b", "c"]


def test_a_write_of_the_former_life_behind_the_look_ends_the_new_one(topics: Client, topic: str) -> None:
    with topics.producer(topic, "importer") as first:
        first.send("a")
        first.flush()
        second = topics.producer(topic, "importer")
        topics.append(topic, ["of another writer"])
        third = topics.producer(topic, "importer")
        topics.append(topic, ["of another writer"])
        first.send("b")
        first.flush()
        for late in (second, third):
            late.send("twice")
            with pytest.raises(ConflictError, match="begin again"):
                late.close()
    with topics.producer(topic, "importer") as fourth:
        last = fourth.last()
        assert last is not None
        assert last.data == "b"
        topics.append(topic, ["of another writer"])
        fourth.send("c")
    assert [data for data in stored(topics, topic) if data != "of another writer"] == ["a", "b", "c"]


def test_a_last_record_that_is_gone_is_an_error(topics: Client, topic: str) -> None:
    with topics.producer(topic, "importer") as first:
        first.send("a")
    topics.delete_records(topic, before_seq=2)
    with topics.producer(topic, "importer") as second, pytest.raises(ClientError, match="is gone"):
        second.last()


def test_epochs_rise_and_differ() -> None:
    assert new_epoch(1 << 60, 5) >> 20 == 1 << 40
    assert new_epoch(0, 1 << 62) > 1 << 62
    assert new_epoch(1, 1) != new_epoch(1, 1)


def test_memory_is_bounded_and_a_wait_for_it_may_end(topic: str) -> None:
    with Service(shards=1, frontends=1) as service, Client(service.url) as client:
        producer = client.producer(topic, limits=ProducerLimits(memory_bytes=2000))
        service.kill_group()
        taken = 0
        with pytest.raises(TimeoutError, match="memory"):  # noqa: PT012
            for number in range(1000):
                producer.send(number, timeout_s=0.05)
                taken += 1
        assert taken < 30
        service.start()
        producer.send(taken, timeout_s=30)
        producer.close()
        assert stored(client, topic) == list(range(taken + 1))


def test_the_end_has_a_deadline(topic: str) -> None:
    with Service(shards=1, frontends=1) as service, Client(service.url) as client:
        producer = client.producer(topic)
        service.kill_group()
        sent = producer.send(1)
        with pytest.raises(UnreachableError, match="may have been written") as late:
            producer.close(timeout_s=0.05)
        assert late.value.may_be_done
        with pytest.raises(UnreachableError):
            sent.result(0)
        service.start()


def test_the_error_of_a_failed_producer_names_the_line_that_met_it(topics: Client, topic: str) -> None:
    def use() -> None:
        with topics.producer("/" + topic) as producer:
            producer.send(1)
            producer.flush()

    with pytest.raises(InvalidRequestError) as failed:
        use()
    lines = [frame.line for frame in traceback.extract_tb(failed.value.__traceback__) if frame.filename == __file__]
    assert lines[-1] == "producer.flush()"


def test_a_failed_producer_that_nobody_closed_is_collected(topics: Client, topic: str) -> None:
    producer = topics.producer("/" + topic)
    with pytest.raises(InvalidRequestError):
        producer.send(1).result()
    left = weakref.ref(producer)
    del producer

    def is_gone() -> bool:
        gc.collect()
        return left() is None

    poll("its end", is_gone)


def test_a_producer_that_waits_without_an_end_says_why(topic: str, caplog: pytest.LogCaptureFixture) -> None:
    with Client("http://127.0.0.1:1") as client:
        producer = client.producer(topic)
        producer.send(1)
        poll("the reason", lambda: "refused" in caplog.text)
        with pytest.raises(UnreachableError):
            producer.close(timeout_s=0.05)
    assert len(caplog.messages) == 1, "it is said once"


def test_threads_share_a_producer(topics: Client, topic: str) -> None:
    with topics.producer(topic, limits=ProducerLimits(batch_records=10, memory_bytes=3000)) as producer:

        def send(writer: int) -> None:
            for number in range(300):
                producer.send([writer, number])

        threads = [threading.Thread(target=send, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = stored(topics, topic)
    for writer in range(4):
        assert [number for one, number in found if one == writer] == list(range(300))


@pytest.mark.parametrize("act", ["close", "flush", "send"])
def test_a_signal_handler_that_interrupts_a_send_waits_for_nothing(
    topics: Client, topic: str, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    def use(*_: object) -> None:
        getattr(producer, act)(*(["of the handler"] if act == "send" else []))

    def give_up(*_: object) -> None:
        raise TimeoutError("the handler waits for what it interrupts")

    before = signal.signal(signal.SIGUSR1, use), signal.signal(signal.SIGALRM, give_up)
    signal.alarm(20)
    try:
        with topics.producer(topic) as producer:
            with monkeypatch.context() as patch:
                add = Accumulator.add

                def interrupted(records: Accumulator, record: Any) -> Any:
                    signal.raise_signal(signal.SIGUSR1)
                    return add(records, record)

                patch.setattr(Accumulator, "add", interrupted)
                with pytest.raises(RuntimeError, match=rf"a handler cannot use the producer of '{topic}'.* set a flag"):
                    producer.send("interrupted")
            assert producer.send("after").result(20) == 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGALRM, before[1])
    assert stored(topics, topic) == ["after"]


@pytest.mark.parametrize("act", ["close", "flush", "send"])
def test_a_handler_in_the_thread_that_sends_waits_for_nothing(topics: Client, topic: str, act: str) -> None:
    """The log's, or the callback of a future."""
    told: list[Exception] = []

    def use(_: object) -> None:
        try:
            getattr(producer, act)(*([2] if act == "send" else []))
        except RuntimeError as error:
            told.append(error)

    with topics.producer(topic) as producer:
        sent = producer.send(1)
        sent.batch.settled.add_done_callback(use)
        assert sent.result(20) == 1
        poll("the handler", lambda: bool(told))
        assert producer.send(3).result(20) == 2
    assert "wait for itself" in str(told[0])
    assert stored(topics, topic) == [1, 3]


def test_a_send_that_was_interrupted_holds_up_no_later_one(
    topics: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with topics.producer(topic) as producer:
        assert producer.send("before").result(20) == 1
        with monkeypatch.context() as patch:
            add = Accumulator.add

            def interrupted(records: Accumulator, record: Any) -> Any:
                add(records, record)
                raise KeyboardInterrupt

            patch.setattr(Accumulator, "add", interrupted)
            with pytest.raises(KeyboardInterrupt):
                producer.send("interrupted")
        assert producer.send("after").result(20) == 3


def test_a_forked_child_cannot_use_it_and_does_not_disturb(topics: Client, topic: str) -> None:
    with topics.producer(topic, limits=HELD) as producer:
        sent = producer.send(1)
        child = os.fork()
        if not child:
            try:
                producer.send(2)
            except ClientError:
                producer.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        producer.send(3)
    assert sent.result() == 1
    assert stored(topics, topic) == [1, 3]


@pytest.mark.long
def test_a_killed_service_loses_and_repeats_nothing(topic: str) -> None:
    with Service(shards=1, frontends=2) as service, Client(service.url) as client:
        with client.producer(topic, limits=ProducerLimits(batch_records=50, memory_bytes=50_000)) as producer:
            sent = []
            disturbances: dict[int, Callable[[], object]] = {
                4000: lambda: service.kill("walshard", 0),
                8000: lambda: service.kill("frontend", 0),
                12000: service.kill_group,
                12001: service.start,
            }
            for number in range(16000):
                if number in disturbances:
                    disturbances[number]()
                sent.append(producer.send(number))
        assert [one.result() for one in sent] == list(range(1, 16001))
        assert stored(client, topic) == list(range(16000))


@pytest.mark.long
def test_a_killed_program_goes_on_behind_its_last_record(service: Service, topics: Client, topic: str) -> None:
    for round in range(6):
        end = 100_000 if round < 5 else len(stored(topics, topic)) + 250
        program = subprocess.Popen(
            [sys.executable, "-c", LIFE, service.url, topic, str(end)], stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        if round < 5:
            for _ in range(round + 1):
                assert program.stdout.readline()
            program.send_signal(signal.SIGKILL)
            program.wait()
        else:
            program.communicate()
            assert program.returncode == 0
    assert stored(topics, topic) == list(range(end))


# -- asyncio


def in_async(service: Service, body: Callable[[AsyncClient], Any]) -> Any:
    async def run() -> Any:
        async with AsyncClient(service.url) as client:
            return await asyncio.wait_for(body(client), 60)

    return asyncio.run(run())


def test_an_asynchronous_producer_does_the_same(service: Service, topics: Client, topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.producer(topic, "importer", limits=ProducerLimits(batch_records=7)) as producer:
            assert await producer.last() is None
            sent = [await producer.send(number) for number in range(1000)]
            bad = await producer.send(NewRecord(0, tag="t" * 300))
            await producer.flush()
            assert [await one for one in sent] == list(range(1, 1001))
            with pytest.raises(InvalidRequestError):
                await bad
        with pytest.raises(RuntimeError, match="was closed"):
            await producer.send(1)
        async with client.producer(topic, "importer") as producer:
            last = await producer.last()
            assert last is not None
            assert last.data == 999
            assert await (await producer.send(1000)) == 1001
        with pytest.raises(RuntimeError, match="async with"):
            await client.producer(topic).send(1)
        with pytest.raises(RuntimeError, match="async with"):
            await client.producer(topic, "importer").last()  # not None, as if nothing had been written

    in_async(service, body)
    assert stored(topics, topic) == list(range(1001))


def test_an_event_loop_goes_on_while_a_producer_is_full(topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.producer(topic, limits=ProducerLimits(memory_bytes=2000)) as producer:
            service.kill_group()

            async def send_all() -> None:
                for number in range(200):
                    await producer.send(number)

            sending = asyncio.create_task(send_all())
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert not sending.done(), "it waits for memory"
            service.start()
            await sending

    with Service(shards=1, frontends=1) as service, Client(service.url) as client:
        in_async(service, body)
        assert stored(client, topic) == list(range(200))


def test_the_end_of_an_asynchronous_producer_has_a_deadline(topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        with pytest.raises(UnreachableError):  # noqa: PT012
            async with client.producer(topic, close_max_s=0.05) as producer:
                service.kill_group()
                sent = await producer.send(1)
        with pytest.raises(UnreachableError):
            await sent
        service.start()

    with Service(shards=1, frontends=1) as service:
        in_async(service, body)


def test_waiting_for_a_record_may_be_cancelled_and_done_again(service: Service, topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.producer(topic, limits=HELD) as producer:
            one = await producer.send(1)

            async def wait() -> int:
                return await one

            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await producer.flush()
            assert await one == 1

    in_async(service, body)


def test_a_producer_with_nothing_to_send_ends_without_an_error(service: Service, topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        async with client.producer(topic):
            pass
        async with client.producer(topic) as producer:
            await asyncio.sleep(0)
            assert await (await producer.send(1)) == 1
            await asyncio.sleep(0)

    in_async(service, body)


def test_a_program_that_cancels_all_tasks_does_not_wait_for_the_sender(service: Service, topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        kept: list[Any] = []

        async def produce() -> None:
            async with client.producer(topic, limits=HELD, close_max_s=3600) as producer:
                kept.append(await producer.send(1))
                await asyncio.sleep(3600)

        before = asyncio.all_tasks()
        running = asyncio.create_task(produce())
        while not kept:
            await asyncio.sleep(0.001)
        for task in asyncio.all_tasks() - before:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(UnreachableError, match="before all records were answered"):
            await kept[0]

    in_async(service, body)


@pytest.mark.long
def test_a_killed_service_loses_and_repeats_nothing_of_an_asynchronous_producer(topic: str) -> None:
    async def body(client: AsyncClient) -> None:
        limits = ProducerLimits(batch_records=50, memory_bytes=50_000)
        async with client.producer(topic, limits=limits) as producer:
            sent = []
            for number in range(6000):
                if number == 2000:
                    service.kill("walshard", 0)
                elif number == 4000:
                    service.kill_group()
                    service.start()
                sent.append(await producer.send(number))
        assert [await one for one in sent] == list(range(1, 6001))

    with Service(shards=1, frontends=2) as service, Client(service.url) as client:
        in_async(service, body)
        assert stored(client, topic) == list(range(6000))
