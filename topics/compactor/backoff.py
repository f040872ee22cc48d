"""How long it is waited before something that failed is tried again. Pure."""

from __future__ import annotations

_DOUBLINGS_MAX = 32


def doubled_ms(first_ms: int, times: int, most_ms: int) -> int:
    """`first_ms` after a first failure (`times` 0 before it), twice as long after each further one, up to `most_ms`."""
    return min(most_ms, first_ms << min(times, _DOUBLINGS_MAX))
