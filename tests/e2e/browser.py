"""A headless Chromium, driven over its DevTools protocol: what a page of the service's own origin can do.

It is the one that TOPICS_CHROMIUM names, the one on the PATH, or the one that `make test-all` has fetched
(`fetch_chromium.py`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import httpx
from websockets.sync.client import connect

from tests.harness import poll

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_TIMEOUT_S = 30.0


def find_browser() -> str | None:
    """The browser's command."""
    named = os.environ.get("TOPICS_CHROMIUM")
    fetched = shutil.which("chromium", path=os.path.join(sys.prefix, "chromium"))
    return named or next((path for name in NAMES if (path := shutil.which(name))), fetched)


class Browser:
    """One tab at `url`."""

    def __init__(self, command: str, url: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="topics-browser-")
        self._process = subprocess.Popen(
            [
                command,
                "--headless",
                "--no-sandbox",  # as root there is none, and it opens nothing but the service under test
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--remote-debugging-port=0",
                f"--user-data-dir={self._profile}",
                url,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port_file = Path(self._profile, "DevToolsActivePort")
            poll("the browser to listen", lambda: port_file.exists() and port_file.read_text().count("\n"), 30)
            port = int(port_file.read_text().split("\n")[0])
            self._url = f"http://127.0.0.1:{port}/json/list"
            self._socket = connect(poll("the page to be open", lambda: self._page(url), 30), max_size=None).__enter__()
        except BaseException:
            self._end()
            raise
        self._last_id = 0

    def _page(self, url: str) -> str | None:
        try:
            targets = httpx.get(self._url, timeout=ANSWER_TIMEOUT_S).json()
        except httpx.TransportError:
            return None
        for target in targets:
            if target["type"] == "page" and target["url"] == url:
                return str(target["webSocketDebuggerUrl"])
        return None

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited when it is a promise."""
        self._last_id += 1
        parameters = {"expression": script, "awaitPromise": True, "returnByValue": True}
        self._socket.send(json.dumps({"id": self._last_id, "method": "Runtime.evaluate", "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(ANSWER_TIMEOUT_S))
            if message.get("id") == self._last_id:
                result = message["result"]
                assert "exceptionDetails" not in result, result
                return result["result"].get("value")

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._end()
