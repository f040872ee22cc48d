"""The Python client of the `/v0` API: `Client` for threads, `AsyncClient` for asyncio (`pip install topicsd`)."""

from topics.api.answers import AppendAnswer as Appended
from topics.api.answers import ClaimAnswer as Claimed
from topics.api.answers import CursorState, PeekedJob, Record, TopicEntry, TopicState
from topics.api.answers import DiffAnswer as Page
from topics.api.answers import JobAnswer as ClaimedJob
from topics.api.answers import PeekAnswer as Peeked
from topics.api.answers import PutCursorAnswer as CursorMade
from topics.api.answers import ReadCursorAnswer as CursorPage
from topics.api.answers import TombstoneAnswer as Tombstone
from topics.api.requests import NewRecord
from topics.api.requests import ProducerBody as Producer
from topics.client.accumulator import ProducerLimits
from topics.client.attempts import Retry
from topics.client.clients import AsyncClient, Client
from topics.client.commands import AsyncCursor, Cursor
from topics.client.errors import (
    ApiError,
    ClientError,
    ConflictError,
    GapError,
    InvalidRequestError,
    LeaseLostError,
    NotAllowedError,
    NotFiniteError,
    NotFoundError,
    ServiceBusyError,
    ServiceFaultError,
    TopicFullError,
    UnreachableError,
)
from topics.client.producers import AsyncProducer, AsyncSentRecord, ProducerOptions, SentRecord
from topics.client.producers import Producer as RecordProducer
from topics.client.queue import AsyncJob, AsyncQueue, Job, Queue
from topics.client.seen import SeenJobs
from topics.client.shift import Backoff
from topics.client.walks import Item, TopicGone

__all__ = [
    "ApiError",
    "Appended",
    "AsyncClient",
    "AsyncCursor",
    "AsyncJob",
    "AsyncProducer",
    "AsyncQueue",
    "AsyncSentRecord",
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
    "NotFiniteError",
    "NotFoundError",
    "Page",
    "Peeked",
    "PeekedJob",
    "Producer",
    "ProducerLimits",
    "ProducerOptions",
    "Queue",
    "Record",
    "RecordProducer",
    "Retry",
    "SeenJobs",
    "SentRecord",
    "ServiceBusyError",
    "ServiceFaultError",
    "Tombstone",
    "TopicEntry",
    "TopicFullError",
    "TopicGone",
    "TopicState",
    "UnreachableError",
]
