"""A WebSocket client for tests: the `websockets` library, and JSON on top."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from tests.harness import Service

READ_TIMEOUT_S = 30.0


class Socket:
    """One open WebSocket."""

    def __init__(
        self,
        service: Service,
        *,
        key: str | None = None,
        origin: str | None = None,
        headers: Mapping[str, str] = {},
        **options: Any,
    ) -> None:
        own = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._stack = ExitStack()
        opening = connect(
            service.url.replace("http", "ws") + "/v0/ws",
            additional_headers={**own, **headers},
            origin=None if origin is None else Origin(origin),
            max_size=None,
            **options,
        )
        self.wire: ClientConnection = self._stack.enter_context(opening)

    def send(self, op: str, **fields: Any) -> None:
        self.wire.send(json.dumps({"op": op, **fields}))

    def text(self) -> str:
        message = self.wire.recv(READ_TIMEOUT_S)
        assert isinstance(message, str)
        return message

    def next(self, op: str | None = None) -> dict[str, Any]:
        """The next message, asserted to be of this kind."""
        message: dict[str, Any] = json.loads(self.text())
        if op is not None:
            assert message["op"] == op, message
        return message

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and reads on until its answer; what comes before is passed over."""
        self.send(op, **fields)
        while True:
            message = self.next()
            if "request_id" in message:
                return message

    def records(self, count: int) -> list[dict[str, Any]]:
        """The next `count` records, other messages passed over."""
        got: list[dict[str, Any]] = []
        while len(got) < count:
            message = self.next()
            if message["op"] == "record":
                got += message["records"]
        return got

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
