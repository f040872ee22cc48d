"""`/console`: the files of the console, and `/v0/key`, which tells it what its key may do (api §8, §0.10).

Browsers ask for the page itself each time. It names its parts by the checksum of all of them, so browsers keep those
for ever, and a page never runs with the parts of another release.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Final, NamedTuple

from topics.api import answers
from topics.core.errors import TopicsError
from topics.core.keys import KeyScope
from topics.frontend.asgi import Receive, Scope, Send
from topics.frontend.entry.access import Access
from topics.frontend.entry.responses import HeaderList, send_whole
from topics.frontend.routes import operations as api
from topics.frontend.routes.operations import ApiOperation, ApiRequest, JsonReply
from topics.shm.durations import Route

_MEDIA_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_KEEP: Final = b"public, max-age=31536000, immutable"
_SAFETY: Final[HeaderList] = [
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]


class PageFile(NamedTuple):
    """A file of a page: its media type without parameters, its bytes and their checksum."""

    media_type: str
    content: bytes
    checksum: bytes

    async def send(self, scope: Scope, send: Send, cache_control: bytes = b"no-cache") -> None:
        """Send the file, or `304` to a browser that has it."""
        headers, etag = dict(scope["headers"]), b'"%b"' % self.checksum
        head = [*_SAFETY, (b"etag", etag), (b"cache-control", cache_control)]
        known = headers.get(b"if-none-match", b"")
        if known.strip() == b"*" or etag in re.findall(rb'"[^"]*"', known):  # weak or not (RFC 9110 §13.1.2)
            await send({"type": "http.response.start", "status": 304, "headers": head})
            await send({"type": "http.response.body", "body": b""})
        else:
            content_type = (b"content-type", f"{self.media_type}; charset=utf-8".encode())
            await send_whole(send, headers, 200, content_type, self.content, head)


def page_file(name: str, content: bytes) -> PageFile:
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2], "text/plain")
    return PageFile(media_type, content, hashlib.sha256(content).hexdigest()[:16].encode())


def page_files(folder: str) -> dict[str, PageFile]:
    """Read the files of a folder beside this module, by their paths in it."""
    root, found = os.path.join(os.path.dirname(__file__), folder), {}
    for directory, _, names in os.walk(root):
        for path in [os.path.join(directory, name) for name in names]:
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = page_file(path, file.read())
    return found


class ConsoleRoutes:
    """The console's page and its parts, read once; and the rights of a request's key."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._parts = page_files("console")
        self._build = page_file("", b"".join(part.checksum for _, part in sorted(self._parts.items()))).checksum
        page = self._parts.pop("index.html").content.replace(b"{build}", self._build)
        self._page = page_file("index.html", page)
        paths = {"/console": self.page, "/console/{build}/{part:path}": self.part}
        described = ("service", "The console", dict[int, api.Answer]())
        self.operations = [
            ApiOperation("GET", path, endpoint, Route.OTHER, None, *described, public=True)
            for path, endpoint in paths.items()
        ]

    async def page(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await self._page.send(scope, send)

    async def part(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send a part of this build. One of another release is not there: the page has to be loaded again."""
        found = self._parts.get(scope["path_params"]["part"])
        if found is None or scope["path_params"]["build"] != self._build.decode():
            raise TopicsError("not_found", "this build of the console has no such file; load /console again")
        await found.send(scope, send, _KEEP)

    @api.json_route("GET", "/v0/key", Route.OTHER, KeyScope.NONE, "service")
    @api.describe("What the key of this request may do", api.ok("Its rights", answers.KeyRights))
    async def key(self, request: ApiRequest) -> JsonReply:
        caller = request.caller
        scopes = [str(scope.name).lower() for scope in caller.scopes]
        return JsonReply({"keys": self._access.on, "scopes": scopes, "prefixes": list(caller.prefixes)})
