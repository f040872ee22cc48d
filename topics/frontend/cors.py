"""CORS (`TOPICS_CORS_ORIGINS`): which web pages may call the API from a browser. Starlette's rules, our error envelope.

Never with credentials: keys travel in a header that the page itself sets, no browser has to add any, and `*` is safe.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from topics.core.errors import invalid
from topics.frontend.answers import error_body
from topics.frontend.asgi import AsgiApp

_METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
_REQUEST_HEADERS: Final = ("Authorization", "Cache-Control", "Content-Encoding", "Idempotency-Key", "Last-Event-ID")
_ANSWER_HEADERS: Final = ("Retry-After",)
_MAX_AGE_S: Final = 600


class Cors(CORSMiddleware):
    """`app` for pages of these origins. Everybody else is served as ever: browsers keep answers from other pages."""

    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=_REQUEST_HEADERS,
            expose_headers=_ANSWER_HEADERS,
            max_age=_MAX_AGE_S,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """204 or, in the envelope of api §0.6, what is not allowed."""
        answer = super().preflight_response(request_headers)
        headers = {name: answer.headers[name] for name in answer.headers if not name.startswith("content-")}
        if answer.status_code == 200:
            return Response(status_code=204, headers=headers)
        refusal = invalid(bytes(answer.body).decode())
        return Response(error_body(refusal), refusal.status, headers, media_type="application/json")
