"""The Python client of the `/v0` API: `Client` for threads, `AsyncClient` for asyncio. Install as `topics[client]`."""

from topics.client.asynchronous import AsyncClient
from topics.client.attempts import Retry
from topics.client.cursor import AsyncCursor, Cursor
from topics.client.cursor_calls import CursorMade, CursorPage, CursorState
from topics.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    GapError,
    InvalidRequestError,
    LeaseLostError,
    NotAllowedError,
    NotFoundError,
    ServiceBusyError,
    ServiceFaultError,
    TopicFullError,
    UnreachableError,
)
from topics.client.queue import AsyncJob, AsyncQueue, Job, Queue
from topics.client.queue_calls import Claimed, ClaimedJob, Peeked, PeekedJob
from topics.client.records import (
    Appended,
    Item,
    NewRecord,
    Page,
    Producer,
    Record,
    Tombstone,
    TopicEntry,
    TopicGone,
    TopicState,
)
from topics.client.seen import SeenJobs
from topics.client.shift import Backoff
from topics.client.sync import Client

__all__ = [
    "ApiError",
    "Appended",
    "AsyncClient",
    "AsyncCursor",
    "AsyncJob",
    "AsyncQueue",
    "Backoff",
    "Claimed",
    "ClaimedJob",
    "Client",
    "ClientError",
    "ConflictError",
    "Cursor",
    "CursorMade",
    "CursorPage",
    "CursorState",
    "GapError",
    "InvalidRequestError",
    "Item",
    "Job",
    "LeaseLostError",
    "NewRecord",
    "NotAllowedError",
    "NotFoundError",
    "Page",
    "Peeked",
    "PeekedJob",
    "Producer",
    "Queue",
    "Record",
    "Retry",
    "SeenJobs",
    "ServiceBusyError",
    "ServiceFaultError",
    "Tombstone",
    "TopicEntry",
    "TopicFullError",
    "TopicGone",
    "TopicState",
    "UnreachableError",
]
