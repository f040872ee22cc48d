"""The addresses of one service: those of its leader and of its followers. A client finds out which one leads."""

from __future__ import annotations

import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple, get_args

from topics.client.arguments import require
from topics.client.errors import ApiError, ClientError
from topics.client.http import ServiceAddress
from topics.client.links import AsyncLink, Link, LinkPool

Reads = Literal["leader", "any"]
"""The servers to which requests that only read may go: the leader, which has all that was written, or any."""

GIVEN_UP_MAX: Final = 3
"""Requests without an answer after which another address is asked, though each caller had only little time."""


class Server(NamedTuple):
    """One address, and the connections to it."""

    address: ServiceAddress
    links: LinkPool


class Servers:
    """The addresses of one service. It owns the choice of the current one, which threads share: when requests to it
    fail, the first thread that reports this moves on to another address.
    """

    def __init__(self, every: Sequence[Server]) -> None:
        self.every = every
        self.current = every[0]
        self.have_led = False
        """True once a server has carried out a write: a later `not_leader` may mean that the leader moves."""
        self.given_up = 0
        """Requests, one after another, that their callers gave up since the current address has answered."""
        self._given_up_s = 0.0
        self._left: list[Server] = []
        """Addresses that failed in this round, which ends when all have: a follower may name a leader that is dead."""

    def __len__(self) -> int:
        return len(self.every)

    @property
    def urls(self) -> str:
        return ",".join(server.address.url for server in self.every)

    def give_up(self, asked: Server, asked_s: float) -> None:
        """Note that a caller waits no longer for an answer to what it asked at `asked_s`: an address that leaves so
        many waiting may hang. Those that waited at the same time count once, as all tasks of a group are cancelled when
        one fails.
        """
        if self.current is not asked or asked_s < self._given_up_s:
            return
        self._given_up_s = time.monotonic()
        self.given_up += 1
        if self.given_up >= GIVEN_UP_MAX:
            self.move_on(asked)

    def move_on(self, failed: Server, refusal: ApiError | None = None) -> None:
        """Ask another one of this round from now on: the leader that a refusal names, else the next in order."""
        if self.current is not failed:
            return
        self.given_up = 0
        after = self.every.index(failed) + 1
        left = [*self._left, failed]
        self._left = left if len(left) < len(self.every) else []
        left_over = [server for server in (*self.every[after:], *self.every[:after]) if server not in self._left]
        leader = None if refusal is None else refusal.detail.get("leader")
        self.current = next((server for server in left_over if server.address.url == leader), left_over[0])


def split_urls(url: str | Sequence[str]) -> list[str]:
    """Return the URLs of one text, between commas, or of a sequence. ClientError without any."""
    found = url.split(",") if isinstance(url, str) else url
    if not (isinstance(found, Sequence) and found and all(isinstance(one, str) and one.strip() for one in found)):
        raise ClientError(f"url {url!r} does not name a service: give one like http://127.0.0.1:4000")
    return [one.strip() for one in found]


def make_servers(
    url: str | Sequence[str],
    reads: Reads,
    token: str | None,
    tls: ssl.SSLContext | None,
    connect: Callable[[ServiceAddress], Awaitable[Link | AsyncLink]],
) -> tuple[Servers, Servers]:
    """Return (the servers for requests that change anything, those for requests that only read)."""
    require(reads in get_args(Reads), "reads", reads, "'leader' or 'any'")
    require(tls is None or isinstance(tls, ssl.SSLContext), "tls", tls, "an ssl.SSLContext")
    urls = split_urls(url)
    needs_leader = len(urls) > 1 and reads == "leader"
    addresses = [ServiceAddress(one, token, tls, needs_leader) for one in urls]
    every = [Server(address, LinkPool(partial(connect, address))) for address in addresses]
    writes = Servers(every)
    return writes, writes if reads == "leader" else Servers(every)
