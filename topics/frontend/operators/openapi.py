"""`GET /v0/openapi.json`: the table of operations as OpenAPI 3.1, and a page that shows it.

The schemas are made from the types in `topics/api`: frontends decode requests into them, the client decodes answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from topics import __version__
from topics.api.answers import Error
from topics.core.config import TopicConfig
from topics.core.errors import RETRY_AFTER_S, STATUS_BY_CODE
from topics.core.keys import KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.responses import encode_json, send_whole
from topics.frontend.operators.console_routes import page_files
from topics.frontend.routes.operations import JSON, Answer, ApiOperation, common_codes, ok
from topics.shm.durations import Route

_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_NAME_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:\-]{0,254}$"
_PATH_PATTERNS: Final = {
    "topic": _NAME_PATTERN,
    "sink": _NAME_PATTERN,
    "router": r"^[A-Za-z0-9][A-Za-z0-9._:>\-]{0,254}$",
    "cursor": _NAME_PATTERN,
    "pin": r"^pin_[A-Za-z0-9_\-]{22}$",
    "wid": r"^wid_[A-Za-z0-9_\-]{22}$",
}
_FILES: Final = {"docs": "index.html", "docs.js": "docs.js", "docs.css": "docs.css"}


class EchoedConfig(TopicConfig, frozen=True):
    """The whole configuration of a topic in answers."""

    durable: bool = False


def document(operations: Sequence[ApiOperation]) -> dict[str, Any]:
    answers = [answer for one in operations for answer in one.answers.values()]
    bodies = [body for answer in answers for body in answer.bodies.values() if body is not None]
    by_type, components = _schemas([Error, *bodies])
    _leave_out_nulls(components)
    requests, request_components = _schemas([EchoedConfig, *(one.body for one in operations if one.body is not None)])
    by_type |= requests
    components |= request_components
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "topics",
            "version": __version__,
            "description": "Named append-only logs. Within /v0 only additions are made.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _schemas(types: Sequence[Any]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the schema of each of these types, and the components that they refer to."""
    distinct = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(distinct, ref_template=_REF)
    return dict(zip(distinct, schemas, strict=True)), components


def _leave_out_nulls(components: dict[str, Any]) -> None:
    """Remove `null` from the types of optional fields: they are absent where they do not apply (`api/answers.py`)."""
    for component in components.values():
        for schema in component["properties"].values():
            if schema.get("default", ...) is None:
                del schema["default"]
                (present,) = (one for one in schema.pop("anyOf") if one != {"type": "null"})
                schema.update(present)


def _operation(one: ApiOperation, by_type: dict[Any, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": _PATH_PATTERNS[name]}}
        for name in _PARAMETER.findall(one.path)
    ]
    parameters += [
        {"name": query.name, "in": "query", "required": False, "schema": query.schema, "description": query.about}
        for query in one.query
    ]
    responses = {str(status): _success(answer, by_type) for status, answer in one.answers.items()}
    by_status: dict[int, list[str]] = {}
    only_reads = one.needs is not None and one.needs in KeyScope.READ
    for code in dict.fromkeys((*common_codes(one.body is not None, one.public, only_reads), *one.codes)):
        by_status.setdefault(STATUS_BY_CODE[code], []).append(code)
    for status, codes in sorted(by_status.items()):
        responses[str(status)] = _failure(codes, by_type)
    shown: dict[str, Any] = {
        "operationId": "_".join([one.method.lower(), *re.findall(r"[a-z0-9]+", one.path)]),
        "tags": [one.tag],
        "summary": one.summary,
        "responses": responses,
    }
    if parameters:
        shown["parameters"] = parameters
    if one.body is not None:
        shown["requestBody"] = {"required": one.body_required, "content": {JSON: {"schema": by_type[one.body]}}}
    if one.needs:
        scopes = [str(scope.name).lower() for scope in KeyScope if scope in one.needs]
        shown["description"] = f"Needs a key with {' and '.join(scopes)}, if keys are in use."
    if one.public:
        shown["security"] = []
    return shown


def _success(answer: Answer, by_type: dict[Any, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {"description": answer.about}
    if answer.bodies:
        shown["content"] = {
            media: {"schema": {"type": "string"} if body is None else by_type[body]}
            for media, body in answer.bodies.items()
        }
    return shown


def _failure(codes: list[str], by_type: dict[Any, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "description": "`error.code`: " + ", ".join(codes),
        "content": {JSON: {"schema": by_type[Error]}},
    }
    if any(code in RETRY_AFTER_S for code in codes):
        shown["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return shown


class OpenApiRoutes:
    """The document of `operations` and of its own routes, made once; and the files of the page."""

    def __init__(self, operations: Sequence[ApiOperation]) -> None:
        files = page_files("api_page")
        self._files = {path: files[name] for path, name in _FILES.items()}
        about = ok("OpenAPI 3.1", dict[str, Any])
        itself = ("GET", "/v0/openapi.json", self.get, Route.OTHER, None, "service", "This document", about)
        self.operations = [ApiOperation(*itself, public=True)]
        for path, file in self._files.items():
            summary = "A page that shows this document" if path == "docs" else f"Part of the page: {path}"
            content = ok("A file", None, file.media_type)
            one = ("GET", f"/v0/{path}", self.page, Route.OTHER, None, "service", summary, content)
            self.operations.append(ApiOperation(*one, public=True))
        self._document = encode_json(document([*operations, *self.operations]))

    async def get(self, scope: Scope, receive: Receive, send: Send) -> None:
        content_type = (b"content-type", JSON.encode())
        await send_whole(send, dict(scope["headers"]), 200, content_type, self._document)

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._files[scope["path"].removeprefix("/v0/")].send(scope, send)
