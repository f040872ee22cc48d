"""What is sent again, when, and what never is."""

from __future__ import annotations

import json

import httpx
import pytest

from topics.client.attempts import Attempts, Retry
from topics.client.connection import may_have_left
from topics.client.errors import ApiError, NotFoundError, ServiceBusyError, ServiceFaultError, UnreachableError

RETRY = Retry(total_s=10.0, pause_first_s=0.1, pause_max_s=1.0)


def refusal(code: str, **detail: object) -> bytes:
    return json.dumps({"error": {"code": code, "message": "no", "detail": detail}}).encode()


def attempts(repeatable: bool) -> Attempts:
    return Attempts(RETRY, repeatable, "POST /v0/topics/t", 100.0)


def test_pauses_double_up_to_the_longest() -> None:
    tries = attempts(repeatable=True)
    pauses = [tries.refused(503, {}, refusal("not_ready"), 100.0, 0.999_999) for _ in range(6)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 1.0], rel=1e-3)


def test_a_pause_is_no_shorter_than_the_service_asks() -> None:
    assert attempts(True).refused(503, {"retry-after": "3"}, refusal("not_ready"), 100.0, 0.0) == 3.0
    assert (
        attempts(True).refused(429, {"retry-after": "3"}, refusal("throttled", retry_after_ms=250), 100.0, 0.0) == 0.25
    )


def test_it_ends_with_the_last_answer_when_the_time_is_over() -> None:
    tries = attempts(True)
    assert tries.refused(503, {}, refusal("not_ready"), 109.0, 0.0) > 0
    with pytest.raises(ServiceBusyError) as busy:
        tries.refused(503, {}, refusal("not_ready"), 109.99, 0.0)
    assert (busy.value.status, busy.value.code) == (503, "not_ready")


def test_what_may_have_been_carried_out_is_not_repeated_without_a_key() -> None:
    with pytest.raises(ServiceBusyError):
        attempts(repeatable=False).refused(503, {}, refusal("shard_unavailable"), 100.0, 0.0)
    with pytest.raises(UnreachableError, match="may have been carried out"):
        attempts(repeatable=False).no_answer(OSError("reset"), True, 100.0, 0.0)
    assert attempts(repeatable=False).no_answer(OSError("refused"), False, 100.0, 0.0) > 0
    assert attempts(repeatable=True).refused(503, {}, refusal("shard_unavailable"), 100.0, 0.0) > 0
    assert attempts(repeatable=False).refused(503, {}, refusal("storage_unavailable"), 100.0, 0.0) > 0


def test_a_request_that_found_no_connection_has_not_left() -> None:
    assert [may_have_left(error("x")) for error in (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)] == [
        False,
        False,
        False,
    ]
    assert [may_have_left(error("x")) for error in (httpx.ReadTimeout, httpx.RemoteProtocolError)] == [True, True]


def test_a_resource_cap_does_not_pass_by_waiting() -> None:
    with pytest.raises(ServiceBusyError, match="throttled"):
        attempts(True).refused(429, {}, refusal("throttled", limit="topics", max=3), 100.0, 0.0)
    passing = ("inflight_per_key", "connections", "body_bytes", "node_bytes", "scrapes", "long_polls", "cursor_reads")
    for limit in passing:
        assert attempts(False).refused(429, {}, refusal("throttled", limit=limit, max=3), 100.0, 0.0) > 0


@pytest.mark.parametrize(("status", "kind"), [(404, NotFoundError), (500, ServiceFaultError), (418, ServiceFaultError)])
def test_other_refusals_are_final(status: int, kind: type[ApiError]) -> None:
    with pytest.raises(kind):
        attempts(True).refused(status, {}, refusal("whatever"), 100.0, 0.0)


def test_an_answer_of_something_else_says_so() -> None:
    with pytest.raises(ServiceFaultError, match=r"not of this service.*<html>"):
        attempts(True).refused(502, {}, b"<html>bad gateway", 100.0, 0.0)
