"""The log of all processes: one event a line on stderr, as JSON or text, with the process's role and index.

Events never carry a key, a token or a payload. Each line is one `write`, so lines of processes that share a pipe or a
file never mix.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_tb
from typing import Any, Final, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
LASTING_EVERY_S: Final = 60.0
SPARSE_KINDS_MAX: Final = 256
_PLACE: Final = "topic", "source", "sink"
_encode = msgspec.json.Encoder(enc_hook=repr).encode

_process: dict[str, Any] = {}
"""Role and index of this process; `identify` sets them after the fork."""


def get_logger() -> FilteringBoundLogger:
    """Return a logger whose lines carry role and index of the process."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger


def configure_log(level: str, format: str) -> None:
    """Set up the log of this process and of those it forks; `level` and `format` as in Settings."""
    render: Processor = (
        structlog.processors.JSONRenderer(serializer=lambda event, **_: _encode(event).decode())
        if format == "json"
        # The default formatter may show local variables, and so the headers with keys.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    # The console renderer formats exceptions itself.
    trace: list[Processor] = [structlog.processors.format_exc_info] if format == "json" else []
    structlog.configure(
        processors=[
            _SparseTracebacks(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_process,
            *trace,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stderr())),
    )
    # Libraries (asyncio, hypercorn) log through `logging`: their warnings and errors get the same form.
    logging.basicConfig(handlers=[_Forward()], level=max(_LEVELS[level], logging.WARNING), force=True)


def identify(role: str, index: int | None = None) -> None:
    """Set the role that lines of this process carry, and the index where a role has several processes."""
    _process.clear()
    _process["role"] = role
    if index is not None:
        _process["index"] = index


def _add_process(logger: Any, method: str, event: EventDict) -> EventDict:
    first = {key: event.pop(key) for key in ("timestamp", "level")}
    return {**first, **_process, "event": event.pop("event"), **event}


class SparseLines:
    """Log lines that requests can cause. Of one event and _PLACE one line in `every_s` is written, and tells how many
    were left out. Beyond SPARSE_KINDS_MAX, an event has one for all its other places.
    """

    def __init__(self, every_s: float, time_s: Callable[[], float]) -> None:
        self._every_s = every_s
        self._time_s = time_s
        self._kinds: dict[tuple[Any, ...], tuple[float, int]] = {}
        """The time of the next line of each, and the number left out so far; the earliest first."""

    def left_out(self, *kind: Any) -> int | None:
        """Return how many lines of this kind were left out before this one; None if this one is left out, too."""
        now_s = self._time_s()
        if kind not in self._kinds and len(self._kinds) >= SPARSE_KINDS_MAX:
            oldest = next(iter(self._kinds))
            if self._kinds[oldest][0] <= now_s:
                del self._kinds[oldest]
            else:
                kind = kind[:1]
        next_s, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now_s < next_s:
            self._kinds[kind] = next_s, left_out + 1
            return None
        self._kinds.pop(kind, None)
        self._kinds[kind] = now_s + self._every_s, 0
        return left_out

    def error(self, event: str, **values: Any) -> None:
        """Log an error, or count it."""
        if (left_out := self.left_out(event, *map(values.get, _PLACE))) is not None:
            get_logger().error(event, **values, more_like_it=left_out)

    def warning(self, event: str, **values: Any) -> None:
        """Log a warning, or count it."""
        if (left_out := self.left_out(event, *map(values.get, _PLACE))) is not None:
            get_logger().warning(event, **values, more_like_it=left_out)


class LastingFailures(SparseLines):
    """Failures that a loop meets in each turn for as long as something lasts, as a full disk. The first of an event is
    logged, then one in LASTING_EVERY_S, and once that they are over. `place` says which of several things fails.
    """

    def __init__(self, time_s: Callable[[], float]) -> None:
        super().__init__(LASTING_EVERY_S, time_s)
        self._logged: dict[tuple[Any, ...], dict[str, Any]] = {}

    def failed(self, event: str, error: object, **place: Any) -> None:
        kind = event, *place.values()
        if (left_out := self.left_out(*kind)) is not None:
            self._logged[kind] = place
            get_logger().error(event, **place, reason=str(error), more_like_it=left_out)

    def over(self, *events: str, **place: Any) -> None:
        """Note that nothing fails with these events any more, at that place if one is given."""
        for kind in [kind for kind, at in self._logged.items() if kind[0] in events and place.items() <= at.items()]:
            get_logger().info("a failure is over", failure=kind[0], **self._logged.pop(kind))


class _SparseTracebacks:
    """Drops lines with a traceback, but for one in LASTING_EVERY_S of each event and way to the fault: each request may
    meet it. Another event is told: a process may end by what a request has met before.
    """

    def __init__(self) -> None:
        self._lines = SparseLines(LASTING_EVERY_S, time.monotonic)

    def __call__(self, logger: Any, method: str, event: EventDict) -> EventDict:
        error = event.get("exc_info")
        error = sys.exception() if error is True else error[1] if isinstance(error, tuple) else error
        if isinstance(error, BaseException):
            way = frozenset((frame.f_code, line) for frame, line in walk_tb(error.__traceback__))
            left_out = self._lines.left_out(event.get("logger", event["event"]), type(error), way)
            if left_out is None:
                raise structlog.DropEvent
            if left_out:
                event["more_like_it"] = left_out
        return event


class _Stderr:
    """Writes lines to stderr. A line that fails (a full disk, no reader any more) is lost, but ends no process."""

    def write(self, line: str) -> None:
        with suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))

    def flush(self) -> None: ...


class _Forward(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
