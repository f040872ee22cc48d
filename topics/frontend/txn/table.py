"""The operations of transactions over topics (api §6)."""

from __future__ import annotations

from typing import Final

from topics.api import answers as answer
from topics.api.requests import CommitBody, DropBody, StageBody
from topics.core.keys import KeyScope
from topics.frontend.operations import LOST, Operation, Query, json_answer
from topics.frontend.txn.routes import TxnRoutes
from topics.shm.durations import Route

_STAGE: Final = "/v0/stage/{topic}"
_SINK: Final = "/v0/txn/{sink}"


def txn_operations(txn: TxnRoutes) -> list[Operation]:
    """Stages, commits, sinks."""
    return [
        Operation(
            "POST",
            _STAGE,
            txn.stage,
            Route.OTHER,
            KeyScope.WRITE,
            "transactions",
            "Keep records back until their transaction is committed",
            {200: json_answer("They are on the disk, and invisible", answer.StageAnswer)},
            ("batch_too_large", "record_too_large", "topic_full", *LOST),
            body=StageBody,
        ),
        Operation(
            "DELETE",
            _STAGE,
            txn.drop,
            Route.OTHER,
            KeyScope.WRITE,
            "transactions",
            "Drop what a transaction keeps back in a topic",
            {200: json_answer("They are gone", answer.DropStagesAnswer)},
            LOST,
            body=DropBody,
            body_required=False,
            query=(Query("txn", {"type": "string", "minLength": 1, "maxLength": 256}, "the transaction"),),
        ),
        Operation(
            "POST",
            f"{_SINK}/commit",
            txn.commit,
            Route.OTHER,
            KeyScope.WRITE,
            "transactions",
            "Publish all stages of a batch, once for each batch of the sink",
            {200: json_answer("All of it is visible, now or from an earlier commit", answer.CommitAnswer)},
            ("batch_too_large", "not_found", "topic_full", *LOST),
            body=CommitBody,
        ),
        Operation(
            "GET",
            _SINK,
            txn.get,
            Route.OTHER,
            KeyScope.READ,
            "transactions",
            "The latest batch of a sink",
            {200: json_answer("The sink; null when it never committed", answer.SinkAnswer)},
            LOST,
        ),
        Operation(
            "DELETE",
            _SINK,
            txn.forget,
            Route.OTHER,
            KeyScope.DELETE,
            "transactions",
            "Forget a sink: its next batch may have any number",
            {200: json_answer("It is forgotten", answer.ForgetSinkAnswer)},
            ("out_of_order", *LOST),
        ),
    ]
