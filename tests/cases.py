"""Many cases in one test: what fails says which case it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """Add `what` to the error of a case that fails. A test loops over its cases and has each in a `with` of its own."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(repr, what))}")
        raise
