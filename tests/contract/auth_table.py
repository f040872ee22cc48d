"""api §0.10 as a table: every route, the scopes it needs, and where it names a topic."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

SCOPES = ("read", "write", "delete", "admin")
TOPIC = "in.side"
"""The topic that the table's requests are about."""
DEAD = "in.side.dead"
ROUTER = {"source": f"{TOPIC}.s", "dest": f"{TOPIC}.d"}
"""The router that they are about has the topic's name."""
PREFIXES = {"any": "", "covering": "in.", "one-of-two": "zz|in.s", "another": "out.", "longer": "in.side."}
COVERING = ("any", "covering", "one-of-two")


class RouteRow(NamedTuple):
    """`path` is the router's own; `json` the body that succeeds. `named`: a topic is named, in path or body."""

    method: str
    path: str
    needs: frozenset[str]
    named: bool = True
    json: Any = None


def _row(method: str, path: str, *needs: str, named: bool = True, json: Any = None) -> RouteRow:
    return RouteRow(method, path, frozenset(needs), named, json)


ROUTES = [
    _row("GET", "/v0/topics", "read", named=False),
    _row("GET", "/v0/topics/{topic}", "read"),
    _row("PUT", "/v0/topics/{topic}", "admin", json={}),
    _row("DELETE", "/v0/topics/{topic}", "delete"),
    _row("POST", "/v0/topics/{topic}", "write", json={"records": [{"data": 1}]}),
    _row("POST", "/v0/topics/{topic}/diff", "read", json={}),
    _row("POST", "/v0/topics/{topic}/delete", "delete", json={"before_seq": 1}),
    _row("POST", "/v0/topics/{topic}/claim", "read", "write", json={"node": "w"}),
    _row("POST", "/v0/topics/{topic}/ack", "write", json={"node": "w", "seqs": [1]}),
    _row("POST", "/v0/topics/{topic}/nack", "write", json={"node": "w", "seqs": [1]}),
    _row("POST", "/v0/topics/{topic}/extend", "write", json={"node": "w", "seqs": [1], "lease_ms": 1000}),
    _row("POST", "/v0/topics/{topic}/peek", "read", json={}),
    _row("POST", "/v0/topics/{topic}/redrive", "admin", json={"from": DEAD}),
    _row("GET", "/v0/topics/{topic}/cursors", "read"),
    _row("PUT", "/v0/topics/{topic}/cursors/{cursor}", "write", json={}),
    _row("GET", "/v0/topics/{topic}/cursors/{cursor}", "read"),
    _row("POST", "/v0/topics/{topic}/cursors/{cursor}/read", "read", json={}),
    _row("DELETE", "/v0/topics/{topic}/cursors/{cursor}", "delete"),
    _row("GET", "/v0/topics/{topic}/segments", "read"),
    _row("PUT", "/v0/topics/{topic}/pins/{pin}", "read"),
    _row("DELETE", "/v0/topics/{topic}/pins/{pin}", "read"),
    _row("POST", "/v0/stage/{topic}", "write", json={"txn": "t", "records": [{"data": 1}]}),
    _row("DELETE", "/v0/stage/{topic}", "write", json={"txn": "t"}),
    _row("POST", "/v0/txn/{sink}/commit", "write", json={"batch": 0, "stages": []}),
    _row("GET", "/v0/txn/{sink}", "read"),
    _row("DELETE", "/v0/txn/{sink}", "delete"),
    _row("GET", "/v0/routers", "read", named=False),
    _row("GET", "/v0/routers/{router}", "read"),
    _row("PUT", "/v0/routers/{router}", "admin", json=ROUTER),
    _row("DELETE", "/v0/routers/{router}", "delete"),
    _row("POST", "/v0/watch", "read", json={"topics": {TOPIC: {}}}),
    _row("GET", "/v0/metrics", "read", named=False),
]
"""A key that lacks what it needs gets 403, nobody's key 401."""

STREAM = _row("GET", "/v0/watch/{wid}", "read")
"""Its own key only: any other gets 401. An unknown wid is 404 for any key, and 401 without one."""

WORK = _row("GET", "/v0/topics/{topic}/work", "read", "write")
"""Takes its key as `?token=`, too."""

TAIL = _row("POST", "/v0/archive/tail", "read", "admin", named=False, json={"ends": []})
"""Its key must have no prefixes (`archive/test_following.py`)."""

PROBES = [_row("GET", path, named=False) for path in ("/v0/health", "/healthz", "/v0/ready", "/readyz")]
"""Open, unless TOPICS_PROBE_AUTH."""


class TableKey(NamedTuple):
    """One key of the table's service."""

    scopes: frozenset[str]
    prefix: str

    def text(self, marker: str) -> str:
        """`marker` makes it one that can be looked for where it must not be."""
        return f"{marker}+{'.'.join(sorted(self.scopes)) or 'none'}/{self.prefix}=="

    def entry(self, marker: str) -> str:
        return f"{self.text(marker)}:{'+'.join(sorted(self.scopes))}:{PREFIXES[self.prefix]}"

    @property
    def covers(self) -> bool:
        return self.prefix in COVERING


KEYS = [
    TableKey(frozenset(scopes), prefix)
    for size in range(1, len(SCOPES) + 1)
    for scopes in itertools.combinations(SCOPES, size)
    for prefix in PREFIXES
]
ROOT = TableKey(frozenset(SCOPES), "any")
