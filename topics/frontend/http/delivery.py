"""The last message of an answer that counts only when it is out of this process (api §10, `at_least_once`).

`send` returns while the answer may still wait here for a client that reads slowly, or not at all: what was kept for it
is lost when the connection ends, or this process. `deliver` returns later:

    deliver(send, body) ─▶ all of it is the kernel's      it was passed on
                        └▶ ConnectionResetError           the client was gone before, and never gets all of it

What the kernel has of it when the client dies, no server can know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from topics.frontend.asgi import Send

Emptied = Callable[[], Awaitable[None]]
"""Returns when nothing is kept for the client; raises ConnectionResetError when that was lost."""


async def deliver(emptied: Emptied, send: Send, body: bytes) -> None:
    """Over HTTP/1.1, after a start that tells the length: the end of such a body is no bytes. Until it is said no other
    answer is written, so what is kept for the client is this one.
    """
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await emptied()
    with contextlib.suppress(ConnectionError):  # it has it all, and needs no connection any more
        await send({"type": "http.response.body", "body": b""})
