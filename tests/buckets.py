"""A real S3 server (`moto`, a process of its own) for tests, and a proxy before it that fails as networks do.

The proxy counts the requests and their bytes. Nothing in it waits for wall time but a delay that a test asks for; what
hangs, hangs until the test ends it.
"""

from __future__ import annotations

import functools
import http.client
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.harness import poll

UP_DEADLINE_S = 60.0
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce the rate.</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
Fault = Literal["deny", "throttle", "cut", "drop", "hang", "lost_answer"]
_buckets = itertools.count(1)


class S3Server:
    """One moto server; `new_bucket` gives each test a bucket of its own."""

    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port: int = found.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )
        poll("the S3 server", self._is_up, UP_DEADLINE_S)

    def new_bucket(self) -> str:
        name = f"bucket-{next(_buckets)}"
        signed = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("PUT", f"/{name}", headers={"Authorization": signed, "Content-Length": "0"})
        assert connection.getresponse().status == 200
        connection.close()
        return name

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_up(self) -> bool:
        assert self._process.poll() is None
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


class Proxy:
    """Passes requests on to an S3 server, or does to them what `fault` says, if `only` is their method or None."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.fault: Fault | None = None
        self.only: str | None = None
        self.delay_s = 0.0
        self.requests: Counter[str] = Counter()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.go_on = threading.Event()
        """Ends what hangs."""
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        return s3_env(self.port)

    def reset(self) -> None:
        """Forget the counts."""
        with self.lock:
            self.requests.clear()
            self.sent_bytes = self.received_bytes = 0

    @contextmanager
    def failing(self, fault: Fault, only: str | None = None) -> Iterator[None]:
        self.go_on.clear()
        self.fault, self.only = fault, only
        try:
            yield
        finally:
            self.fault = None
            self.go_on.set()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def __init__(self, proxy: Proxy, *args: Any) -> None:
        self._proxy = proxy
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def _pass_on(self) -> None:
        proxy = self._proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with proxy.lock:
            proxy.requests[self.command] += 1
            proxy.sent_bytes += len(body)
        fault = proxy.fault if proxy.only in (None, self.command) else None
        if proxy.delay_s:
            time.sleep(proxy.delay_s)
        if fault == "hang":
            proxy.go_on.wait()
        if fault in ("hang", "drop"):
            self.close_connection = True
            return
        if fault in ("deny", "throttle"):
            self._answer(403 if fault == "deny" else 503, {}, DENIED if fault == "deny" else SLOW_DOWN)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.upstream_port)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        with proxy.lock:
            proxy.received_bytes += len(content)
        if fault == "lost_answer":
            self._answer(500, {}, b"")
            return
        kept = {
            name: value for name, value in answer.getheaders() if name.lower() not in ("connection", "date", "server")
        }
        self._answer(answer.status, kept, content, cut=fault == "cut")

    def _answer(self, status: int, headers: dict[str, str], content: bytes, cut: bool = False) -> None:
        self.send_response(status)
        headers = {name: value for name, value in headers.items() if name.lower() != "transfer-encoding"}
        if not any(name.lower() == "content-length" for name in headers):
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.wfile.flush()
        if cut:
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815 — names of the standard library


def s3_env(port: int) -> dict[str, str]:
    """Return the variables with which a service finds this server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test-key-id",
        "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        "AWS_REGION": "us-east-1",
    }
