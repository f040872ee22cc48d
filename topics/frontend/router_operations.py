"""The operations on routers (api §6), as `table.py` has those on topics."""

from __future__ import annotations

from typing import Final

from topics.api import answers as answer
from topics.api.requests import GivenRouter
from topics.core.keys import KeyScope
from topics.frontend.operations import LOST, Operation, Query, json_answer
from topics.frontend.routers import RouterRoutes
from topics.shm.durations import Route

_ROUTER: Final = "/v0/routers/{router}"
_NAME: Final = {"type": "string"}
_PAGE_SIZE: Final = {"type": "integer", "minimum": 0, "default": 100}


def router_operations(routers: RouterRoutes) -> list[Operation]:
    """Lists, registers, shows and removes them."""
    return [
        Operation(
            "GET",
            "/v0/routers",
            routers.list_all,
            Route.LIST_ROUTERS,
            KeyScope.READ,
            "routers",
            "List routers by name",
            {200: json_answer("A page of routers", answer.RouterList)},
            query=(
                Query("prefix", _NAME, "only names that begin with it"),
                Query("source", _NAME, "only routers from this topic"),
                Query("dest", _NAME, "only routers into this topic"),
                Query("page_size", _PAGE_SIZE, "at most 1000"),
                Query("cursor", _NAME, "next_cursor of the page before"),
            ),
        ),
        Operation(
            "GET",
            _ROUTER,
            routers.get,
            Route.GET_ROUTER,
            KeyScope.READ,
            "routers",
            "A router, and how much it has forwarded",
            {200: json_answer("The router", answer.RouterState)},
            ("router_not_found",),
        ),
        Operation(
            "PUT",
            _ROUTER,
            routers.put,
            Route.PUT_ROUTER,
            KeyScope.ADMIN,
            "routers",
            "Forward what comes into a topic to another one",
            {
                200: json_answer("It was there", answer.PutRouterAnswer),
                201: json_answer("It was made", answer.PutRouterAnswer),
            },
            ("topic_not_found", "topic_exists_incompatible", "router_cycle", *LOST),
            body=GivenRouter,
        ),
        Operation(
            "DELETE",
            _ROUTER,
            routers.delete,
            Route.DELETE_ROUTER,
            KeyScope.DELETE,
            "routers",
            "Remove a router; what it has forwarded stays",
            {200: json_answer("It is gone", answer.DeleteRouterAnswer)},
            LOST,
        ),
    ]
