"""Exceptions of the client in programs of several processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from topics.client import ClientError, GapError, LeaseLostError, NotFiniteError, Tombstone, UnreachableError
from topics.client.errors import api_error


def unreachable() -> UnreachableError:
    error = UnreachableError("POST /v0/topics/t: refused")
    error.may_be_done = True
    return error


GAP = Tombstone(gap_from=1, gap_to=2, reason="cap", missed_estimate=2, earliest_seq=3, head_seq=4)


@pytest.mark.parametrize(
    "error",
    [
        api_error(409, "head_mismatch", "the head is 7", {"head_seq": 7}),
        api_error(500, "internal", "it failed", {}),
        NotFiniteError("records[0].data", float("inf")),
        GapError("t", GAP),
        LeaseLostError("t", 5),
        unreachable(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_gets_from_one_process_to_another(error: ClientError) -> None:
    """`multiprocessing.Pool` waits for ever for one that does not."""
    for copied in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)
        assert copied.may_be_done == error.may_be_done


@pytest.mark.parametrize(
    ("reason", "gap_from", "gap_to", "earliest_seq", "next_from_seq"),
    [("cap", 1, 2, 3, 2), ("restored", 528, 131_598, 1, 131_598), ("recreated", 1, 5, 3, 2)],
)
def test_a_gap_error_names_the_cursor_behind_the_gap(
    reason: str, gap_from: int, gap_to: int, earliest_seq: int, next_from_seq: int
) -> None:
    """A cursor before the gap would repeat what was read, and one behind its next record would miss that."""
    gap = Tombstone(gap_from, gap_to, reason, gap_to - gap_from + 1, earliest_seq, 131_600)
    assert gap.next_from_seq == next_from_seq
    assert f"read on from {next_from_seq}, or pass tombstones='yield'" in str(GapError("t.disk", gap))
