"""Requests as bytes, and answers and events out of bytes, however the network cuts them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.client.errors import ClientError
from topics.client.http import AnswerReader, Event, EventReader, ServiceAddress, TransportError

CHUNKED = (
    b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 3\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
)
STREAM = b": hello\n\nid: a1\nevent: record\ndata: {}\n\nevent:ping\n\ndata: x\ndata: y\n\nid: cut"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % len(data) for cut in cuts}), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(places) if begin < end]


@given(st.lists(st.integers(0, 1000)))
def test_an_answer_is_the_same_in_any_pieces(cuts: list[int]) -> None:
    reader = AnswerReader()
    for piece in pieces(CHUNKED, cuts):
        assert not reader.whole
        reader.feed(piece)
    assert reader.whole
    assert reader.reusable
    assert (reader.status, reader.headers["retry-after"], reader.take_body()) == (429, "3", b"hello world")
    assert "link" not in reader.headers


@given(st.lists(st.integers(0, 1000)))
def test_events_are_the_same_in_any_pieces(cuts: list[int]) -> None:
    reader = EventReader()
    events = [event for piece in pieces(STREAM, cuts) for event in reader.feed(piece)]
    assert events == [Event("record", b"{}", "a1"), Event("ping", b"", ""), Event("", b"x\ny", "")]


def test_an_answer_that_ends_with_its_connection_is_whole_and_not_reusable() -> None:
    reader = AnswerReader()
    reader.feed(b"HTTP/1.0 200 OK\r\n\r\nbo")
    reader.feed(b"dy")
    assert not reader.whole
    reader.feed(b"")
    assert (reader.whole, reader.reusable, reader.take_body()) == (True, False, b"body")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbody",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    ],
)
def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    reader = AnswerReader()
    with pytest.raises(TransportError):
        _ = [reader.feed(part) for part in (answer, b"")]


def test_an_answer_that_closes_its_connection_is_not_reusable() -> None:
    reader = AnswerReader()
    reader.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")
    assert (reader.whole, reader.reusable) == (True, False)


def test_requests_have_the_head_of_their_service() -> None:
    address = ServiceAddress("http://[::1]:4000/log/", "secret", None)
    assert (address.host, address.port, address.url) == ("::1", 4000, "http://[::1]:4000/log")
    assert address.request("POST", "/v0/topics/t?x=1", b"{}") == (
        b"POST /log/v0/topics/t?x=1 HTTP/1.1\r\nHost: [::1]:4000\r\nAccept-Encoding: identity\r\n"
        b"Authorization: Bearer secret\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    )
    assert b"Content-Length: 0\r\n" in address.request("PUT", "/v0/x", None)
    assert b"Content-Length" not in address.request("GET", "/v0/x", None)
    assert b"Last-Event-ID: 7\r\n" in address.request("GET", "/v0/x", None, {"Last-Event-ID": "7"})


def test_a_password_in_the_url_is_sent_and_in_no_message() -> None:
    address = ServiceAddress("http://me:p%40ss@proxy", None, None)
    assert b"Host: proxy\r\n" in address.request("GET", "/v0/x", None)
    assert b"Authorization: Basic bWU6cEBzcw==\r\n" in address.request("GET", "/v0/x", None)
    assert (address.url, address.port) == ("http://proxy", 80)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:4000", "ftp://host", "http://", "http://host:x", "http://ho st", "http://h/\x7f"]
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ClientError, match="url"):
        ServiceAddress(url, None, None)


@pytest.mark.parametrize("token", ["two\r\nlines", "ключ"])
def test_a_token_that_no_header_can_have_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(ClientError) as refused:
        ServiceAddress("http://host", token, None)
    assert token not in str(refused.value)
