"""What frontends and shards say to each other about transactions over topics (api §6); `messages.py` carries it."""

from __future__ import annotations

from typing import Literal

import msgspec


class TxnBegin(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Decide a batch of a sink: from here on its stages, (id, topic) each, will be published."""

    sink: str
    batch: int
    stages: list[tuple[str, str]]


class StagePublish(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Append a stage of a decided batch, once; answered as an append."""

    name: str
    stage: str
    sink: str
    batch: int


class TxnEnd(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Every stage of the batch is published."""

    sink: str
    batch: int


class StagesOver(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The batch is over: what the topic keeps to publish each stage once may go."""

    name: str
    sink: str
    batch: int


class TxnLook(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """What has this sink committed?"""

    sink: str


class TxnForget(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The sink will not be used any more."""

    sink: str


class TxnPending(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Which batches are decided and not over?"""


SinkCall = TxnBegin | TxnEnd | TxnLook | TxnForget | TxnPending
"""To the shard that owns the sink."""

TxnCall = SinkCall | StagePublish | StagesOver


class TxnReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """A sink after the call: `batch` is its latest, `pending` what of it is still to be published."""

    outcome: Literal["begun", "pending", "committed", "none"]
    batch: int
    pending: list[tuple[str, str]]


class TxnPendingReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """(sink, batch, stages) of each."""

    batches: list[tuple[str, int, list[tuple[str, str]]]]


SinkReply = TxnReply | TxnPendingReply
