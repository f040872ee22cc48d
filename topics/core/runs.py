"""Ascending seqs as distances and lengths, which are small numbers: what a DELETE took (`core/control_bodies.py`)."""

from __future__ import annotations

from collections.abc import Sequence


def encode_runs(seqs: Sequence[int]) -> list[int]:
    """How many to pass over, from 1 on at first; how many follow each other; and so on."""
    runs: list[int] = []
    next_seq = 1
    for seq in seqs:
        if seq == next_seq and runs:
            runs[-1] += 1
        else:
            runs += (seq - next_seq, 1)
        next_seq = seq + 1
    return runs


def decode_runs(runs: Sequence[int]) -> list[int]:
    seqs: list[int] = []
    next_seq = 1
    for gap, count in zip(runs[0::2], runs[1::2], strict=True):
        next_seq += gap
        seqs += range(next_seq, next_seq + count)
        next_seq += count
    return seqs
