"""The operations on a topic's segments: where they are, and pins that keep them (docs/decisions/0009-pins.md)."""

from __future__ import annotations

from typing import Final

from topics.api import answers as answer
from topics.core.keys import KeyScope
from topics.frontend.operations import Operation, Query, json_answer
from topics.frontend.reads.manifest import PIN_TTL_DEFAULT_MS, PIN_TTL_MAX_MS, ManifestRoutes
from topics.shm.durations import Route

_TOPIC: Final = "/v0/topics/{topic}"
_SEQ: Final = {"type": "integer", "minimum": 0}
_TTL: Final = f"how long the files stay whatever happens, ms, at most {PIN_TTL_MAX_MS}"


def manifest_operations(manifest: ManifestRoutes) -> list[Operation]:
    """Lists segments, renews and ends pins."""
    return [
        Operation(
            "GET",
            f"{_TOPIC}/segments",
            manifest.list_segments,
            Route.OTHER,
            KeyScope.READ,
            "segments",
            "The sealed segments of a topic, for readers of the files themselves",
            {200: json_answer("The segments, and what else it takes to read them", answer.Manifest)},
            ("topic_not_found", "storage_unavailable"),
            query=(
                Query("from_seq", {**_SEQ, "default": 0}, "a cursor: only segments with records behind it"),
                Query("to_seq", _SEQ, "only segments with records up to it"),
                Query("pin_ttl_ms", {**_SEQ, "default": 0}, f"{_TTL}; 0: no pin"),
            ),
        ),
        Operation(
            "PUT",
            f"{_TOPIC}/pins/{{pin}}",
            manifest.renew,
            Route.OTHER,
            KeyScope.READ,
            "segments",
            "Keep pinned files for longer",
            {200: json_answer("Whether the pin still holds", answer.PinRenewed)},
            query=(Query("pin_ttl_ms", {**_SEQ, "default": PIN_TTL_DEFAULT_MS}, f"{_TTL}, from now on"),),
        ),
        Operation(
            "DELETE",
            f"{_TOPIC}/pins/{{pin}}",
            manifest.end,
            Route.OTHER,
            KeyScope.READ,
            "segments",
            "End a pin before its time",
            {200: json_answer("It is over", answer.PinEnded)},
        ),
    ]
