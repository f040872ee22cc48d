"""Long writes are decoded by a thread: the event loop has other requests to serve."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.live import Live, on_loop
from topics.frontend.asgi import Receive, Send
from topics.frontend.routes.append import DECODED_INLINE_BYTES_MAX, AppendRoute

HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]
SHORTEST = b'{"data":1,"tag":"a","meta":{"k":"v"}}'
"""A record with all that costs the event loop time, in the fewest bytes."""


@pytest.mark.parametrize("is_long", [False, True])
def test_a_thread_decodes_many_records_with_tag_and_meta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    count = DECODED_INLINE_BYTES_MAX // len(SHORTEST) if is_long else 10
    body = b'{"records":[%b]}' % b",".join([SHORTEST] * count)
    assert (len(body) > DECODED_INLINE_BYTES_MAX) is is_long
    decoded_in: list[int] = []
    decode = AppendRoute.decode

    def noted(route: AppendRoute, *given: Any) -> Any:
        decoded_in.append(threading.get_ident())
        return decode(route, *given)

    monkeypatch.setattr(AppendRoute, "decode", noted)

    async def test(live: Live) -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v0/topics/t", "query_string": b"", "headers": HEADERS}
        asked: tuple[Receive, Send] = (receive, send)
        await live.frontend.app(scope, *asked)
        assert sent[0]["status"] == 201, sent
        assert live.reader.get("t").view.head_seq == count

    on_loop(tmp_path, test)
    assert (decoded_in == [threading.get_ident()]) is not is_long
