"""What both clients offer, written once. A command makes a call (`calls.py`) or a walk (`walks.py`), and its owner
carries that out: a `Client` returns the answer, an `AsyncClient` returns what to await for it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import httpx_sse

from topics.client import calls, walks
from topics.client.calls import Call
from topics.client.walks import Walk

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Caller(Protocol):
    """Carries out calls in the thread that asks."""

    def call(self, call: Call[T], /) -> T: ...


class AsyncCaller(Protocol):
    """Carries out calls on an event loop."""

    def call(self, call: Call[T], /) -> Coroutine[Any, Any, T]: ...


class AsyncService(AsyncCaller, Protocol):
    """Carries out calls on an event loop and opens event streams."""

    def events(
        self, path: str, query: Mapping[str, str] = {}, *, headers: Mapping[str, str] = {}, silence_max_s: float
    ) -> AsyncGenerator[httpx_sse.ServerSentEvent, None]: ...


class Command(Protocol[P, T_co]):
    """A method that returns the answer of a call, or what to await for it: its owner decides."""

    @overload
    def __get__(self, owner: Caller, kind: type | None = None, /) -> Callable[P, T_co]: ...
    @overload
    def __get__(self, owner: AsyncCaller, kind: type | None = None, /) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


class WalkCommand(Protocol[P, T_co]):
    """A method that yields what a walk brings."""

    @overload
    def __get__(self, owner: Caller, kind: type | None = None, /) -> Callable[P, Iterator[T_co]]: ...
    @overload
    def __get__(self, owner: AsyncCaller, kind: type | None = None, /) -> Callable[P, AsyncIterator[T_co]]: ...


def command(build: Callable[P, Call[T]]) -> Command[P, T]:
    """The method that carries out what `build` makes."""
    return cast("Command[P, T]", _method(build, "call", 0))


def topic_command(build: Callable[Concatenate[str, P], Call[T]]) -> Command[P, T]:
    """A `command` whose first argument is the topic of its owner."""
    return cast("Command[P, T]", _method(build, "call", 1))


def member_command(build: Callable[Concatenate[str, str, P], Call[T]]) -> Command[P, T]:
    """A `command` whose first arguments are the topic of its owner and its owner's name in it."""
    return cast("Command[P, T]", _method(build, "call", 2))


def walk_command(build: Callable[P, Walk[T]]) -> WalkCommand[P, T]:
    """The method that goes the way that `build` makes."""
    return cast("WalkCommand[P, T]", _method(build, "_walk", 0))


def _method(build: Callable[..., object], carry_out: str, known: int) -> object:
    """`known`: how many of the arguments its owner has, in `_target`."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        given = (*self._target[:known], *args) if known else args
        return getattr(self, carry_out)(build(*given, **options))

    signature = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *list(signature.parameters.values())[known:]]
    )
    method.__name__, method.__doc__ = build.__name__, build.__doc__
    return method


class Commands:
    """The commands of a client."""

    put_topic = command(calls.put_topic)
    get_topic = command(calls.get_topic)
    list_topics = walk_command(walks.list_topics)
    delete_topic = command(calls.delete_topic)
    append = command(calls.append)
    diff = command(calls.diff)
    read = walk_command(walks.read)
    delete_records = command(calls.delete_records)
    list_cursors = walk_command(walks.list_cursors)


class QueueCommands:
    """The commands of a queue, for the worker that is called `node`."""

    def __init__(self, topic: str, node: str) -> None:
        self.topic = topic
        self.node = node
        self._target = (topic, node)

    claim = member_command(calls.claim)
    ack = member_command(calls.ack)
    nack = member_command(calls.nack)
    peek = topic_command(calls.peek)
    redrive = topic_command(calls.redrive)


class CursorCommands:
    """The commands of a named cursor: a read position that the server keeps (api §10)."""

    def __init__(self, topic: str, name: str) -> None:
        self.topic = topic
        self.name = name
        self._target = (topic, name)

    put = member_command(calls.put_cursor)
    get = member_command(calls.get_cursor)
    read = member_command(calls.read_cursor)
    delete = member_command(calls.delete_cursor)


class Cursor(CursorCommands):
    """A cursor for programs with threads."""

    def __init__(self, client: Caller, topic: str, name: str) -> None:
        super().__init__(topic, name)
        self._client = client

    def call(self, call: Call[T]) -> T:
        """Carries out a call of this cursor."""
        return self._client.call(call)


class AsyncCursor(CursorCommands):
    """A cursor for programs with an event loop."""

    def __init__(self, client: AsyncCaller, topic: str, name: str) -> None:
        super().__init__(topic, name)
        self._client = client

    async def call(self, call: Call[T]) -> T:
        """Carries out a call of this cursor."""
        return await self._client.call(call)
