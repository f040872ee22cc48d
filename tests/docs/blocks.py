"""The fenced blocks of all pages, and who runs each.

`tests/docs/test_pages.py` runs a page of `RUN_HERE` from its first block to its last. The other pages have tests of
their own, in `RUN_ELSEWHERE`. A block that nobody runs is in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
_FENCE: Final = re.compile(r"\s*```+\s*(\S*)(.*)")
_TITLE: Final = re.compile(r'title="([^"]+)"')

RUN_HERE: Final = frozenset(
    {
        "docs/quickstart.md",
        "docs/archive.md",
        "docs/scale.md",
        "docs/commands.md",
        "docs/queues.md",
        "docs/guides/publish-subscribe.md",
        "docs/guides/queue.md",
        "docs/guides/durable-stream.md",
        "docs/guides/deployment.md",
        "docs/guides/security.md",
        "docs/guides/spark.md",
    }
)
RUN_ELSEWHERE: Final = {
    "README.md": ("tests/cli/test_readme.py", {"console", "python"}),
    "docs/api.md": ("tests/contract/test_api_page.py", {"http", "websocket", "sh"}),
    "docs/install.md": ("tests/deploy/test_systemd.py", {"console"}),
    "docs/operations.md": ("tests/cli/test_handbook.py", {"console"}),
    "docs/storage-format.md": ("tests/cli/test_handbook.py", {"console"}),
}
NOT_RUN: Final = {
    ("README.md", "python3 -m venv topics-demo"): "the quickstart's first commands, which test_pages.py compares",
    ("docs/architecture.md", "topics-supervisor"): "a picture",
    ("docs/archive.md", "*/10 * * * * topics"): "a line for cron; deploy/test_systemd.py has that user make a backup",
    ("docs/decisions/0011-transactions.md", "POST /v0/stage/:topic        frontend   writes"): "a table of steps",
    (
        "docs/bucket.md",
        "$ export AWS_ACCESS_KEY_ID=…",
    ): "a bucket of the reader; e2e/test_bucket.py runs a service on one",
    ("docs/bucket.md", 'spark.read.format("topics")'): "a shape with `…`; tests/spark/test_bucket_scan.py",
    (
        "docs/operations.md",
        "# /etc/topics/keys: an entry a line",
    ): "keys that are cut short; guides/security.md has whole ones",
    (
        "docs/operations.md",
        "$ curl -s localhost:4000/v0/topics -H 'Auth",
    ): "a key cut short; guides/security.md runs it",
    ("docs/commands.md", "topics completion bash >"): "files of the reader; test_service_commands.py runs the commands",
    ("docs/spark.md", 'frame = spark.read.format("topics")'): "a shape with `…`; guides/spark.md runs a whole program",
    ("docs/spark.md", 'frame.select("data", "tag").write'): "a shape with `…`; guides/spark.md runs a whole program",
    ("docs/spark.md", "topics spark export --topics commits"): "tests/spark/test_jobs.py runs these jobs",
    (
        "docs/spark.md",
        'spark.read.format("topics").options(url=…',
    ): "a shape with `…`; tests/spark/test_segment_read.py",
}
PICTURES_OF: Final = "docs/storage-format.md"
"""Each of its blocks is a layout of bytes; a reader written from it alone is tests/storage/test_format_page.py."""


class Block(NamedTuple):
    """A fenced block. `title` is the name of a file that the reader saves; `line` is that of its fence."""

    page: str
    line: int
    language: str
    title: str | None
    text: str


class OpenBlockError(ValueError):
    """A fence without an end."""


def pages() -> list[Path]:
    """Return the pages that people read: README, docs/ and the changelog."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, page: str) -> list[Block]:
    """Return every fenced block of a page; raise OpenBlockError for one without an end."""
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is not None:
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == "```"), None)
            if end is None:
                raise OpenBlockError(f"{page}, line {at + 1}")
            title = _TITLE.search(fence[2])
            content = "\n".join(lines[at + 1 : end]) + "\n"
            found.append(Block(page, at + 1, fence[1], title[1] if title else None, content))
            at = end
        at += 1
    return found


def of_page(page: str) -> list[Block]:
    """Return the blocks of a page that is named by its path in the repository."""
    return blocks((ROOT / page).read_text(), page)


def runner(block: Block) -> str | None:
    """Return who runs a block, or why nobody does; None for one that has slipped through."""
    for (page, beginning), reason in NOT_RUN.items():
        if block.page == page and block.text.lstrip().startswith(beginning):
            return reason
    if block.page == PICTURES_OF and not block.language:
        return "a layout of bytes"
    if block.page in RUN_HERE and block.language in ("console", "python", "text", "toml"):
        return "tests/docs/test_pages.py"
    test, languages = RUN_ELSEWHERE.get(block.page, ("", set()))
    return test if block.language in languages else None
