"""Progress bars for work that lasts."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

from tqdm import tqdm

AFTER_S: Final = 1.0
T = TypeVar("T")


def progress(
    unit: str, total: float | None = None, *, shown: bool = False, typed: bool = False, **style: Any
) -> tqdm[Any]:
    """Return a bar with rate and ETA for work on a terminal that lasts longer than a second. Elsewhere it is silent.
    It is also silent beside output that is `shown` on a terminal, and for input that somebody has `typed` there.
    """
    at_terminal = typed and sys.stdin is not None and sys.stdin.isatty()
    quiet = not sys.stderr.isatty() or (shown and sys.stdout.isatty()) or at_terminal
    style = {"unit_scale": True, "leave": False, "disable": quiet} | style
    return tqdm(total=total, unit=unit, delay=AFTER_S, **style)


def counted(
    items: Iterable[T], unit: str, total: float | None = None, *, shown: bool = False, typed: bool = False
) -> Iterator[T]:
    """Yield the items with a bar."""
    with progress(unit, total, shown=shown, typed=typed) as bar:
        for item in items:
            yield item
            bar.update()


def stdin_bytes() -> int | None:
    """Return how many bytes are left of stdin; None unless it is a file."""
    if sys.stdin is None:
        return None
    at = os.fstat(sys.stdin.fileno())
    return at.st_size - os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR) if stat.S_ISREG(at.st_mode) else None
