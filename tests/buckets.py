"""Real object stores for tests, each a process of its own, and a proxy before one that fails as networks do.

The proxy counts the requests and their bytes. Nothing in it waits for wall time but a delay that a test asks for; what
hangs, hangs until the test ends it.
"""

from __future__ import annotations

import base64
import functools
import hmac
import http.client
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from tests.harness import poll, reserved_port

SERVERS_DIR: Final = Path(sys.prefix, "servers", "bin")
"""The Makefile puts there what it fetches."""
UP_DEADLINE_S = 60.0
KEY_ID: Final = "test-key-id"
SECRET_KEY: Final = "test-secret-key"
AZURITE_ACCOUNT: Final = "devstoreaccount1"
AZURITE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Everybody knows the account of Azurite."""
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce the rate.</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
Fault = Literal["deny", "throttle", "cut", "drop", "hang", "lost_answer", "refuse_early", "lag"]
_buckets = itertools.count(1)


class ObjectServer:
    """A real object store in a process of its own; `new_bucket` gives each test a bucket of its own."""

    scheme = "s3"

    def __init__(self) -> None:
        self._placeholder, self.port = reserved_port()
        self.directory = tempfile.mkdtemp(prefix="topics-buckets-")
        self._process = subprocess.Popen(
            self.command(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        )
        poll("the object store", self._is_up, UP_DEADLINE_S)

    def command(self) -> list[str]:
        raise NotImplementedError

    def make_bucket(self, name: str) -> None:
        raise NotImplementedError

    def env(self, port: int) -> dict[str, str]:
        """Return the variables with which a service finds this server, by itself or through a proxy on `port`."""
        return s3_env(port)

    def new_bucket(self) -> str:
        name = f"bucket-{next(_buckets)}"
        self.make_bucket(name)
        return name

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._placeholder.close()
        shutil.rmtree(self.directory)

    def request(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, body, headers | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        assert answer.status in (200, 201), answer.read()
        connection.close()

    def _is_up(self) -> bool:
        assert self._process.poll() is None
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1):
                return True
        except OSError:
            return False


class S3Server(ObjectServer):
    """The S3 of moto, which looks at no signature."""

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def make_bucket(self, name: str) -> None:
        signed = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        self.request("PUT", f"/{name}", {"Authorization": signed})


class S3sServer(ObjectServer):
    """The S3 of the Rust crate s3s-fs: another reading of the protocol, which checks signatures (the Makefile)."""

    def command(self) -> list[str]:
        keys = ["--access-key", KEY_ID, "--secret-key", SECRET_KEY]
        return [fetched("s3s-fs"), "--host", "127.0.0.1", "--port", str(self.port), *keys, self.directory]

    def make_bucket(self, name: str) -> None:
        os.mkdir(os.path.join(self.directory, name))


class AzureServer(ObjectServer):
    """Azurite, Microsoft's own emulator (`make buckets`)."""

    scheme = "az"

    def command(self) -> list[str]:
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", self.directory]
        return [fetched("azurite-blob"), "--silent", "--skipApiVersionCheck", "--disableTelemetry", *place]

    def make_bucket(self, name: str) -> None:
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container"
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items()), resource]
        digest = hmac.digest(base64.b64decode(AZURITE_KEY), "\n".join(lines).encode(), "sha256")
        headers["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}"
        self.request("PUT", f"/{AZURITE_ACCOUNT}/{name}?restype=container", headers)

    def env(self, port: int) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURITE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURITE_KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{AZURITE_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }


SERVERS: Final[dict[str, type[ObjectServer]]] = {"s3": S3Server, "s3s": S3sServer, "azure": AzureServer}

MORE: Final = ["azure"] if os.environ.get("TOPICS_REQUIRE_BUCKETS") else []
"""Kinds that are tried by `make buckets` only."""


def fetched(program: str) -> str:
    """Return the path of a server that the Makefile fetches. Skip the test if it is not here."""
    found = shutil.which(program, path=os.pathsep.join([str(SERVERS_DIR), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"there is no {program}: `make test-all` or `make buckets` fetches it")
    return found


def start_server() -> ObjectServer:
    """Start the S3 server that costs the machine least: s3s-fs where it was built (the Makefile), else moto."""
    return S3sServer() if (SERVERS_DIR / "s3s-fs").exists() else S3Server()


class Proxy:
    """Passes requests on to an S3 server, or does to them what `fault` says, if `only` is their method or None."""

    def __init__(self, server: ObjectServer) -> None:
        self.server = server
        self.fault: Fault | None = None
        self.only: str | None = None
        self.delay_s = 0.0
        self.requests: Counter[str] = Counter()
        self.sent_bytes = 0
        self.received_bytes = 0
        self.go_on = threading.Event()
        """Ends what hangs."""
        self.lock = threading.Lock()
        self.listed: dict[str, bytes] = {}
        """The last answer to each listing: what one that lags answers again."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, self))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        return self.server.env(self.port)

    @property
    def direct_env(self) -> dict[str, str]:
        """The variables of who goes past the proxy."""
        return self.server.env(self.server.port)

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
        if proxy.fault == "refuse_early" and self.command == "PUT":
            self._answer(412, {}, b"", cut=True)
            return
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
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.server.port)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        with proxy.lock:
            proxy.received_bytes += len(content)
        if "list-type=2" in self.path:
            content = proxy.listed.get(self.path, content) if fault == "lag" else content
            proxy.listed[self.path] = content
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
    """Return the variables with which a service finds an S3 server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }
