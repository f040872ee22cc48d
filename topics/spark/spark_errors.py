"""Errors of the data source, each in one line that says what is wrong, where, and the way out."""

from __future__ import annotations

import re

_OURS = re.compile(r"(^|\s)topics\.[\w.]+Error: ")
_TRACEBACK = "Traceback (most recent call last):"


class TopicsSparkError(Exception):
    """An error of the data source that its user can do something about."""


class OptionError(TopicsSparkError):
    """An option is missing, unknown, or has a value that it cannot have."""


class DataLossError(TopicsSparkError):
    """Records of the range that was asked for are gone (`failOnDataLoss`)."""


def plainly(error: BaseException) -> str:
    """Return this package's error in one that came through Spark, or else its Python error, or its first line."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        ours = _OURS.search(line)
        if ours is not None:
            return line[ours.end() :]
    traceback_at = next((number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)), len(lines))
    for line in lines[traceback_at + 1 :]:
        if not line.startswith(" "):
            return line
    return lines[0].strip() if lines else type(error).__name__
