"""What frontends say to shards about routers (api §6), and the answers; `messages.py` carries it."""

from __future__ import annotations

import msgspec

from topics.core.routers import Router, RouterSpec


class PutRouter(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To shard 0, as the next two: register a router, or change it."""

    name: str
    spec: RouterSpec


class DeleteRouter(msgspec.Struct, tag=True, array_like=True, frozen=True):
    name: str


class RemoveRouters(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Those that are still there of these."""

    router_ids: list[int]


class SyncRouters(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the shard of a dest: do what the table of routers says now. Has this router (0: any) begun?"""

    dest: str
    router_id: int
    version: int


class CatchUp(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the shard of a dest: copy what its source has now."""

    dest: str


RouterCall = PutRouter | DeleteRouter | RemoveRouters | SyncRouters | CatchUp


class PutRouterReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    created: bool
    router: Router


class DeleteRouterReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    deleted: bool


class SyncRoutersReply(msgspec.Struct, tag=True, array_like=True, frozen=True):
    begun: bool


class CaughtUp(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """`done`: nothing is gained by asking again now. `pending`: not everything was copied that there is room for; if it
    is not `done`, because the source could not be read at this moment: ask again in a while.
    """

    done: bool
    pending: bool


RouterReply = PutRouterReply | DeleteRouterReply | SyncRoutersReply | CaughtUp
