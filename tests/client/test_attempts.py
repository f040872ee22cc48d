"""Requests that are sent again, their times, and those that never are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import pytest

from topics.client.attempts import Attempts, Retry
from topics.client.errors import (
    ApiError,
    NotAllowedError,
    NotFoundError,
    ServiceBusyError,
    ServiceFaultError,
    UnreachableError,
)
from topics.client.http import Event, NotSentError, TransportError
from topics.client.walks import Following

RETRY = Retry(total_s=10.0, pause_first_s=0.1, pause_max_s=1.0)


def refusal(code: str, **detail: object) -> bytes:
    return json.dumps({"error": {"code": code, "message": "no", "detail": detail}}).encode()


def attempts(repeatable: bool, clock: Iterator[float] | None = None, draw: float = 0.0) -> Attempts:
    times = clock or repeat(100.0)
    return Attempts(RETRY, repeatable, "POST /v0/topics/t", lambda: next(times), lambda: draw)


def test_pauses_double_up_to_the_longest() -> None:
    tries = attempts(repeatable=True, draw=0.999_999)
    pauses = [tries.pause_after_refusal(503, {}, refusal("not_ready")) for _ in range(6)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0], rel=1e-3)


def test_a_pause_is_no_shorter_than_the_service_asks() -> None:
    assert attempts(True).pause_after_refusal(503, {"retry-after": "3"}, refusal("not_ready")) == 3.0
    assert (
        attempts(True).pause_after_refusal(429, {"retry-after": "3"}, refusal("throttled", retry_after_ms=250)) == 0.25
    )


def test_it_ends_with_the_last_answer_when_the_time_is_over() -> None:
    tries = attempts(True, iter((100.0, 109.0, 109.99)))
    assert tries.pause_after_refusal(503, {}, refusal("not_ready")) > 0
    with pytest.raises(ServiceBusyError) as busy:
        tries.pause_after_refusal(503, {}, refusal("not_ready"))
    assert (busy.value.status, busy.value.code) == (503, "not_ready")


def test_what_may_have_been_carried_out_is_not_repeated_without_a_key() -> None:
    with pytest.raises(ServiceBusyError):
        attempts(repeatable=False).pause_after_refusal(503, {}, refusal("shard_unavailable"))
    with pytest.raises(UnreachableError, match="may have been carried out"):
        attempts(repeatable=False).pause_after_failure(TransportError("reset"))
    assert attempts(repeatable=False).pause_after_failure(NotSentError("refused")) > 0
    assert attempts(repeatable=True).pause_after_refusal(503, {}, refusal("shard_unavailable")) > 0
    assert attempts(repeatable=False).pause_after_refusal(503, {}, refusal("storage_unavailable")) > 0


def test_a_service_that_only_reads_does_not_come_to_lead_by_waiting() -> None:
    with pytest.raises(ServiceBusyError, match="not_leader"):
        Attempts(RETRY.for_ever(), True, "POST").pause_after_refusal(503, {"retry-after": "60"}, refusal("not_leader"))


@pytest.mark.parametrize("code", ["shard_unavailable", "throttled"])
def test_the_last_error_says_whether_an_attempt_before_it_may_have_been_carried_out(code: str) -> None:
    tries = attempts(repeatable=True)
    tries.pause_after_failure(NotSentError("refused"))
    tries.pause_after_refusal(503, {}, refusal("not_ready"))
    with pytest.raises(NotAllowedError) as refused:
        tries.pause_after_refusal(401, {}, refusal("unauthorized"))
    assert not refused.value.may_be_done
    tries.pause_after_refusal(503 if code == "shard_unavailable" else 429, {}, refusal(code))
    with pytest.raises(NotAllowedError) as refused:
        tries.pause_after_refusal(401, {}, refusal("unauthorized"))
    assert refused.value.may_be_done is (code == "shard_unavailable")
    tries.pause_after_failure(TransportError("reset"))
    with pytest.raises(NotAllowedError) as refused:
        tries.pause_after_refusal(401, {}, refusal("unauthorized"))
    assert refused.value.may_be_done


def test_a_resource_cap_does_not_pass_by_waiting() -> None:
    with pytest.raises(ServiceBusyError, match="throttled"):
        attempts(True).pause_after_refusal(429, {}, refusal("throttled", limit="max_topics", max=3))
    passing = (
        "max_inflight_per_key",
        "max_connections",
        "body_bytes",
        "node_bytes",
        "scrapes",
        "long_polls",
        "cursor_reads",
    )
    for limit in passing:
        assert attempts(False).pause_after_refusal(429, {}, refusal("throttled", limit=limit, max=3)) > 0


@pytest.mark.parametrize(("status", "kind"), [(404, NotFoundError), (500, ServiceFaultError), (418, ServiceFaultError)])
def test_other_refusals_are_final(status: int, kind: type[ApiError]) -> None:
    with pytest.raises(kind):
        attempts(True).pause_after_refusal(status, {}, refusal("whatever"))


def test_an_answer_of_something_else_says_so() -> None:
    with pytest.raises(ServiceFaultError, match=r"did not come from a topics service.*<html>"):
        attempts(True).pause_after_refusal(501, {}, b"<html>not implemented")


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_proxy_that_does_not_reach_its_service_is_a_lost_answer(status: int) -> None:
    assert attempts(True).pause_after_refusal(status, {}, b"<html>bad gateway") > 0
    with pytest.raises(ServiceBusyError, match=r"did not come from a topics service.*<html>"):
        attempts(False).pause_after_refusal(status, {}, b"<html>bad gateway")


def test_a_request_that_came_too_slowly_was_not_carried_out() -> None:
    assert attempts(False).pause_after_refusal(408, {}, refusal("request_timeout")) > 0


@pytest.mark.parametrize(("heartbeat_ms", "silence_s"), [(1_000, 15.0), (20_000, 60.0), (10**9, 180.0)])
def test_a_follower_that_asked_for_rare_heartbeats_waits_for_them(heartbeat_ms: int, silence_s: float) -> None:
    following = Following("t", "raise", {"heartbeat_ms": heartbeat_ms}, lambda path: Attempts(RETRY, True, path))
    assert following.silence_max_s == silence_s


def test_a_list_of_topics_to_follow_is_not_taken_for_pairs_of_letters() -> None:
    """Each name of two letters would have been a topic of one, from the seq of the other."""
    names: Any = ["o1"]
    with pytest.raises(TypeError, match=r"not \['o1'\]: give them as"):
        Following(names, "raise", {}, lambda path: Attempts(RETRY, True, path))


def test_a_stop_that_a_stream_announced_is_no_failure_and_the_next_end_is_one() -> None:
    """With no time for repeats a failure ends the follower at once."""
    following = Following("t", "raise", {}, lambda path: Attempts(Retry(total_s=0.0), True, path))
    data = b'{"code":"server_shutting_down","error":"the service is stopping"}'
    assert not list(following.take(Event("error", data, "")))
    assert 0 < following.pause_s(None) <= 0.05
    with pytest.raises(UnreachableError, match="the stream ended"):
        following.pause_s(None)
    assert not list(following.take(Event("error", data, "")))
    assert following.pause_s(TransportError("reset")) > 0, "the end may come with a broken connection"
    assert not list(following.take(Event("error", b'{"code":429}', "")))
    with pytest.raises(UnreachableError):
        following.pause_s(None)
