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

__all__ = ["AsyncClient", "Client", "Retry"]
__all__ += ["Appended", "AsyncProducer", "AsyncSentRecord", "NewRecord", "Producer", "ProducerLimits"]
__all__ += ["ProducerOptions", "RecordProducer", "SentRecord"]
__all__ += ["AsyncCursor", "Cursor", "CursorMade", "CursorPage", "CursorState", "Item", "Page", "Record", "Tombstone"]
__all__ += ["TopicEntry", "TopicGone", "TopicState"]
__all__ += ["AsyncJob", "AsyncQueue", "Backoff", "Claimed", "ClaimedJob", "Job", "Peeked", "PeekedJob", "Queue"]
__all__ += ["SeenJobs"]
__all__ += ["ApiError", "ClientError", "ConflictError", "GapError", "InvalidRequestError", "LeaseLostError"]
__all__ += ["NotAllowedError", "NotFiniteError", "NotFoundError", "ServiceBusyError", "ServiceFaultError"]
__all__ += ["TopicFullError", "UnreachableError"]
