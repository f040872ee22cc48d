"""The Python client of the `/v0` API: `Client` for threads, `AsyncClient` for asyncio. Install as `topics[client]`."""

from topics.client.asynchronous import AsyncClient
from topics.client.attempts import Retry
from topics.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    GapError,
    InvalidRequestError,
    NotAllowedError,
    NotFoundError,
    ServiceBusyError,
    ServiceFaultError,
    TopicFullError,
    UnreachableError,
)
from topics.client.records import (
    Appended,
    Item,
    NewRecord,
    Page,
    Record,
    Tombstone,
    TopicEntry,
    TopicGone,
    TopicState,
)
from topics.client.sync import Client

__all__ = [
    "ApiError",
    "Appended",
    "AsyncClient",
    "Client",
    "ClientError",
    "ConflictError",
    "GapError",
    "InvalidRequestError",
    "Item",
    "NewRecord",
    "NotAllowedError",
    "NotFoundError",
    "Page",
    "Record",
    "Retry",
    "ServiceBusyError",
    "ServiceFaultError",
    "Tombstone",
    "TopicEntry",
    "TopicFullError",
    "TopicGone",
    "TopicState",
    "UnreachableError",
]
