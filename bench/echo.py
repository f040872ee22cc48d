"""The baseline: an application that reads a body and answers, on the protocol stack of the frontend."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvloop

from topics.frontend.http.deadlines import HttpLimits
from topics.frontend.http.serve import serve

ANSWER = b'{"topic":"t","first_seq":1,"last_seq":1,"head_seq":1,"count":1,"created":false,"deduped":false}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]

Message = MutableMapping[str, Any]


async def echo(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """Read the whole body and answer like an acknowledgement, as a bare ASGI application."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER})


def _serve(listener: socket.socket, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)

    async def run() -> None:
        shutdown = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, shutdown.set)
        await serve(echo, [listener], HttpLimits(), shutdown)

    uvloop.run(run())


@contextmanager
def echo_server(cores: set[int]) -> Iterator[int]:
    """Start an echo process on these cores; yield its port, which accepts connections from the start."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        port: int = listener.getsockname()[1]
        # Spawned, not forked: a frontend begins with a fresh interpreter as well.
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(listener, cores))
        process.start()
        try:
            yield port
        finally:
            process.terminate()
            process.join(10)
            if process.is_alive():
                process.kill()
