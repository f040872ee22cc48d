"""A headless Chromium, driven over its DevTools protocol: what a page of the service's own origin can do.

It is the one that TOPICS_CHROMIUM names, the one on the PATH, or the one that `make test-all` has fetched
(`fetch_chromium.py`).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Self

import httpx
from websockets.sync.client import connect

from tests.harness import poll

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_TIMEOUT_S = 120.0


def find_browser() -> str | None:
    """The browser's command."""
    named = os.environ.get("TOPICS_CHROMIUM")
    fetched = shutil.which("chromium", path=os.path.join(sys.prefix, "chromium"))
    return named or next((path for name in NAMES if (path := shutil.which(name))), fetched)


EMPTY: Final = "about:blank"
STARTS: Final = 3


class Browser:
    """One tab at `url`."""

    def __init__(self, command: str, url: str) -> None:
        for left in reversed(range(STARTS)):
            try:
                self._start(command)
                break
            except (AssertionError, OSError, httpx.TransportError):
                self._end()
                if not left:
                    raise
        self._last_id = 0
        try:
            # By a command: what is done in a page that the browser opens by itself may be lost with its first document.
            self.command("Page.navigate", url=url)
            poll("the page to be loaded", self._is_loaded, 30)
        except BaseException:
            self._end()
            raise

    def _start(self, command: str) -> None:
        """Start the browser with an empty page."""
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
                EMPTY,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        port_file = Path(self._profile, "DevToolsActivePort")
        # It is made empty, and filled later.
        port = poll("the browser to listen", lambda: port_file.exists() and port_file.read_text().split("\n")[0], 30)
        self._url = f"http://127.0.0.1:{port}/json"
        try:
            place = poll("an empty page to be open", self._empty_page, 2)
        except AssertionError:  # once in some ten starts on a busy machine it opens none by itself
            place = self._new_page()
        self._socket = connect(place, max_size=None, ping_interval=None, open_timeout=ANSWER_TIMEOUT_S).__enter__()

    def _is_loaded(self) -> bool:
        try:
            return bool(self.run(f"location.href !== '{EMPTY}' && document.readyState === 'complete'"))
        except KeyError:  # the document was replaced meanwhile
            return False

    def _empty_page(self) -> str | None:
        try:
            targets = httpx.get(f"{self._url}/list", timeout=ANSWER_TIMEOUT_S).json()
        except httpx.TransportError:
            return None
        for target in targets:
            if target["type"] == "page" and target["url"] == EMPTY:
                return str(target["webSocketDebuggerUrl"])
        return None

    def _new_page(self) -> str:
        answer = httpx.put(f"{self._url}/new?{EMPTY}", timeout=ANSWER_TIMEOUT_S)
        return str(answer.raise_for_status().json()["webSocketDebuggerUrl"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited when it is a promise."""
        result = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def command(self, method: str, **parameters: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(ANSWER_TIMEOUT_S))
            if message.get("id") == self._last_id:
                return message["result"]

    def press(self, key: str) -> None:
        """A key, pressed and released."""
        more: dict[str, Any] = {"text": key} if len(key) == 1 else {}
        if key == "Escape":
            more = {"code": key, "windowsVirtualKeyCode": 27}  # by which the browser knows it
        self.command("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.command("Input.dispatchKeyEvent", type="keyUp", key=key, **more)

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def prefer(self, theme: str) -> None:
        """The system's theme: `dark` or `light`; without motion."""
        features = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
        given = [{"name": name, "value": value} for name, value in features.items()]
        self.command("Emulation.setEmulatedMedia", features=given)

    def picture(self) -> bytes:
        """Return the page as it is seen, as PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._end()
