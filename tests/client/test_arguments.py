"""Arguments of the Python client: a wrong one is refused where it comes in, and the error says what is allowed."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable
from typing import Any, cast

import pytest

from topics.client import AsyncClient, Backoff, Client, ClientError, ProducerLimits, Retry
from topics.client.queue import AsyncQueue

WRONG = cast("Any", "wrong")
UNKNOWN = cast("Any", {"limit": 1})
"""A value that no argument below may have."""


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reads": "bad"}, "reads='bad': give 'leader' or 'any'"),
        ({"reads": ["any"]}, "reads=['any']: give 'leader' or 'any'"),
        ({"retry": 5}, "retry=5: give a Retry, like"),
        ({"tls": "ca.pem"}, "tls='ca.pem': give an ssl.SSLContext"),
    ],
)
def test_a_client_refuses_what_it_does_not_know(kind: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        kind(**given)
    kind(reads="any", retry=Retry(total_s=1), tls=ssl.create_default_context())


@pytest.mark.parametrize("url", [5, None, b"http://127.0.0.1:4000", ["http://a", 5], {"http://a"}])
def test_an_address_that_is_no_text_is_told(url: Any) -> None:
    with pytest.raises(ClientError, match="does not name a service: give one like"):
        Client(url)


def test_a_key_that_is_no_text_is_told_and_not_shown() -> None:
    with pytest.raises(ClientError, match="the token is no text") as told:
        Client(token=cast("Any", b"secret"))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Retry(total_s=WRONG), "Retry.total_s='wrong': give a number from 0"),
        (lambda: Retry(pause_first_s=-1), "Retry.pause_first_s=-1: give a number from 0"),
        (lambda: Retry(pause_max_s=float("nan")), "Retry.pause_max_s=nan: give a number from 0"),
        (lambda: Backoff(first_ms=cast("Any", 0.5)), "Backoff.first_ms=0.5: give a whole number from 0"),
        (lambda: ProducerLimits(linger_ms=WRONG), "ProducerLimits.linger_ms='wrong': give a number from 0"),
        (lambda: ProducerLimits(batch_records=-1), "ProducerLimits.batch_records=-1: give a whole number from 0"),
    ],
)
def test_limits_and_pauses_are_numbers(make: Callable[[], object], told: str) -> None:
    """They were found wrong long after: at the first repeat, or in the thread of a producer."""
    with pytest.raises(ValueError, match=re.escape(told)):
        make()


CALLS: list[tuple[Callable[[Client], Any], str]] = [
    (lambda client: client.put_topic("t", ttl=1), "a topic's configuration has no 'ttl': it has auto_create,"),
    (lambda client: client.append("t", [1], config={"ttl": 1}), "a topic's configuration has no 'ttl'"),
    (lambda client: client.append("t", [1], config=WRONG), "a topic's configuration has no 'w'"),
    (lambda client: client.put_router("r", "a", "b", filtre="x"), "a router has no 'filtre': it has allow_cycle,"),
    (lambda client: client.read("t", tombstones=WRONG), "tombstones='wrong': give 'raise' or 'yield'"),
    (lambda client: next(client.follow("t", tombstones=WRONG)), "tombstones='wrong': give 'raise' or 'yield'"),
    (lambda client: next(client.follow("t", limt=1)), "a watch session has no 'limt': it has consistency,"),
    (lambda client: next(client.follow("t", topics={})), "a watch session has no 'topics'"),
    (lambda client: next(client.follow({})), "positions={}: give at least one topic"),
    (lambda client: client.producer("t", **UNKNOWN), "a producer has no 'limit': it has close_max_s,"),
    (lambda client: client.producer("t", limits=WRONG), "limits='wrong': give some like ProducerLimits"),
    (lambda client: client.producer("t", config={"ttl": 1}), "a topic's configuration has no 'ttl'"),
    (lambda client: client.producer("t", close_max_s=WRONG), "close_max_s='wrong': give a number"),
    (lambda client: client.queue("t").run(WRONG), "handler='wrong': give a function"),
    (lambda client: client.queue("t").run(print, threads=0), "threads=0: give a whole number from 1"),
    (lambda client: next(client.queue("t").work(max_jobs=0)), "max_jobs=0: give a whole number from 1"),
    (lambda client: next(client.queue("t").work(lease_ms=WRONG)), "lease_ms='wrong': give a whole number from 1"),
    (lambda client: next(client.queue("t").work(backoff=WRONG)), "backoff='wrong': give a Backoff"),
    (lambda client: next(client.queue("t").work(stop_on=cast("Any", 15))), "stop_on=15: give a list like"),
    (lambda client: client.get_topic(cast("Any", ["t"])), "a name in this path is empty or no text"),
]


@pytest.mark.parametrize(("call", "told"), CALLS)
def test_a_wrong_argument_is_refused_before_anything_is_sent(call: Callable[[Client], Any], told: str) -> None:
    """No service is there: what would be sent would end in another error."""
    with (
        Client("http://127.0.0.1:1", retry=Retry(total_s=0)) as client,
        pytest.raises((ValueError, TypeError, ClientError), match=re.escape(told)),
    ):
        call(client)


def test_a_worker_that_would_do_nothing_is_refused() -> None:
    """`run` with no place for a job ended at once, as after a `stop`."""

    async def run() -> None:
        async with AsyncClient("http://127.0.0.1:1", retry=Retry(total_s=0)) as client:
            queue = client.queue("t")
            assert isinstance(queue, AsyncQueue)
            with pytest.raises(ValueError, match="concurrency=0: give a whole number from 1"):
                await queue.run(lambda job: asyncio.sleep(0), concurrency=0)

    asyncio.run(run())
