"""The commands of both clients, written once. A command makes a call (`calls.py`) or a walk (`walks.py`), which its
owner carries out: a `Client` returns the answer, an `AsyncClient` an awaitable for it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from topics.api.answers import Record
from topics.client import calls, walks
from topics.client.calls import Call
from topics.client.http import Event
from topics.client.walks import Item, Raised, Tombstones, Walk

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
RecordsT = TypeVar("RecordsT", covariant=True)
ItemsT = TypeVar("ItemsT", covariant=True)


class Caller(Protocol):
    """Carries out calls in the calling thread."""

    def call(self, call: Call[T], /) -> T: ...


class AsyncCaller(Protocol):
    """Carries out calls on an event loop."""

    def call(self, call: Call[T], /) -> Coroutine[Any, Any, T]: ...


class AsyncService(AsyncCaller, Protocol):
    """Carries out calls on an event loop and opens event streams."""

    def events(self, path: str, query: Mapping[str, str], *, silence_max_s: float) -> AsyncGenerator[Event, None]: ...


class Command(Protocol[P, T_co]):
    """A method that returns the answer of a call, or an awaitable for it, depending on its owner."""

    @overload
    def __get__(self, owner: Caller, kind: type | None = None, /) -> Callable[P, T_co]: ...
    @overload
    def __get__(self, owner: AsyncCaller, kind: type | None = None, /) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


class WalkCommand(Protocol[P, T_co]):
    """A method that yields the items of a walk."""

    @overload
    def __get__(self, owner: Caller, kind: type | None = None, /) -> Callable[P, Iterator[T_co]]: ...
    @overload
    def __get__(self, owner: AsyncCaller, kind: type | None = None, /) -> Callable[P, AsyncIterator[T_co]]: ...


class Read(Protocol[RecordsT, ItemsT]):
    """`read`, which yields only records if gaps are raised, else also tombstones."""

    @overload
    def __call__(
        self, topic: str, from_seq: int = 0, *, tombstones: Raised = "raise", wait: bool = False, **options: Any
    ) -> RecordsT: ...
    @overload
    def __call__(
        self, topic: str, from_seq: int = 0, *, tombstones: Tombstones, wait: bool = False, **options: Any
    ) -> ItemsT: ...


class ReadCommand(Protocol):
    """The method `read`, whose items depend on its arguments."""

    @overload
    def __get__(self, owner: Caller, kind: type | None = None, /) -> Read[Iterator[Record], Iterator[Item]]: ...
    @overload
    def __get__(
        self, owner: AsyncCaller, kind: type | None = None, /
    ) -> Read[AsyncIterator[Record], AsyncIterator[Item]]: ...


def command(build: Callable[P, Call[T]]) -> Command[P, T]:
    """Return a method that carries out the call that `build` makes."""
    return cast("Command[P, T]", _method(build, "call", 0))


def topic_command(build: Callable[Concatenate[str, P], Call[T]]) -> Command[P, T]:
    """Return a `command` whose first argument is the topic of its owner."""
    return cast("Command[P, T]", _method(build, "call", 1))


def member_command(build: Callable[Concatenate[str, str, P], Call[T]]) -> Command[P, T]:
    """Return a `command` whose first arguments are the topic of its owner and the owner's name in it."""
    return cast("Command[P, T]", _method(build, "call", 2))


def walk_command(build: Callable[P, Walk[T]]) -> WalkCommand[P, T]:
    """Return a method that goes through the walk that `build` makes."""
    return cast("WalkCommand[P, T]", _method(build, "_walk", 0))


def _method(build: Callable[..., object], carry_out: str, known: int) -> object:
    """Return the method of a command. Its owner's `_target` supplies the first `known` arguments of `build`."""

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self, carry_out)(build(*self._target[:known], *args, **options))

    signature = inspect.signature(build)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [own, *list(signature.parameters.values())[known:]]
    vars(method)["__signature__"] = signature.replace(parameters=parameters)
    method.__name__, method.__doc__ = build.__name__, build.__doc__
    return method


class Commands:
    """The commands of a client."""

    _target = ()

    put_topic = command(calls.put_topic)
    get_topic = command(calls.get_topic)
    list_topics = walk_command(walks.list_topics)
    delete_topic = command(calls.delete_topic)
    append = command(calls.append)
    diff = command(calls.diff)
    read = cast("ReadCommand", walk_command(walks.read))
    delete_records = command(calls.delete_records)
    list_cursors = walk_command(walks.list_cursors)
    put_router = command(calls.put_router)
    get_router = command(calls.get_router)
    list_routers = walk_command(walks.list_routers)
    delete_router = command(calls.delete_router)


class Member:
    """A worker of a queue, or a cursor: a topic and a name in it, which its commands begin with."""

    def __init__(self, topic: str, name: str) -> None:
        self.topic = topic
        self._target = (topic, name)


class SyncMember(Member):
    """A member for programs with threads."""

    def __init__(self, client: Caller, topic: str, name: str) -> None:
        super().__init__(topic, name)
        self.call = client.call


class AsyncMember(Member):
    """A member for programs with an event loop."""

    def __init__(self, client: AsyncCaller, topic: str, name: str) -> None:
        super().__init__(topic, name)
        self.call = client.call


class QueueCommands:
    """The commands of a queue, for one worker."""

    claim = member_command(calls.claim)
    ack = member_command(calls.ack)
    nack = member_command(calls.nack)
    peek = topic_command(calls.peek)
    redrive = topic_command(calls.redrive)


class CursorCommands(Member):
    """The commands of a named cursor: a read position that the server keeps (api §10)."""

    put = member_command(calls.put_cursor)
    get = member_command(calls.get_cursor)
    read = member_command(calls.read_cursor)
    delete = member_command(calls.delete_cursor)

    @property
    def name(self) -> str:
        """The cursor's name."""
        return self._target[1]


class Cursor(CursorCommands, SyncMember):
    """A named cursor for programs with threads."""


class AsyncCursor(CursorCommands, AsyncMember):
    """A named cursor for programs with an event loop."""
