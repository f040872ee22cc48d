"""The pause before something that failed is tried again: doubled each time, up to a bound. Pure."""

from __future__ import annotations

_DOUBLINGS_MAX = 32


def doubled_ms(first_ms: int, failures: int, longest_ms: int) -> int:
    """`first_ms`, doubled for each of the `failures` before the last one; `longest_ms` at most."""
    return min(longest_ms, first_ms << min(failures, _DOUBLINGS_MAX))
