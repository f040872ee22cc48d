"""`deploy/nginx.conf` lets through what clients of the service send."""

from __future__ import annotations

import re
from pathlib import Path

from topics.frontend.live.wording import encode_cursor
from topics.settings import load

NGINX = Path(__file__).parents[2] / "deploy" / "nginx.conf"
DEFAULT_BYTES = 8 << 10
"""The longest header that nginx takes by itself."""


def test_the_id_of_the_largest_watch_comes_back_through_nginx() -> None:
    """Within one buffer: nginx answers 400 to a longer header."""
    names = [f"{n:03}".ljust(255, "x") for n in range(load({}, {}).max_watch_topics)]
    header = b"Last-Event-ID: " + encode_cursor(dict.fromkeys(names, 2**64 - 1))
    found = re.search(r"^ *large_client_header_buffers \d+ (\d+)k;", NGINX.read_text(), re.MULTILINE)
    most_bytes = int(found[1]) << 10 if found else DEFAULT_BYTES
    assert len(header) <= most_bytes
