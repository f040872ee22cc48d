"""Every fenced block of every page has somebody who runs it, or a reason why nobody does."""

from __future__ import annotations

import pytest

from tests.cli.test_handbook import examples, handbook, looks
from tests.docs.blocks import (
    NOT_RUN,
    ROOT,
    RUN_ELSEWHERE,
    RUN_HERE,
    Block,
    OpenBlockError,
    blocks,
    of_page,
    pages,
    runner,
)
from tests.docs.page_runner import commands

ALL = [block for page in pages() for block in blocks(page.read_text(), page.relative_to(ROOT).as_posix())]


def test_no_block_slips_through() -> None:
    assert len(ALL) > 90
    unseen = [f"{block.page}:{block.line} {block.language}" for block in ALL if runner(block) is None]
    assert not unseen, "run it in a page of tests/docs/blocks.py:RUN_HERE, or say in NOT_RUN why not"


def test_each_example_of_the_handbook_s_pages_is_one_that_its_test_runs() -> None:
    run = {command for command, _ in [*looks(), *examples(handbook())]}
    for page in ("docs/operations.md", "docs/storage-format.md"):
        claimed = [block for block in of_page(page) if "test_handbook" in (runner(block) or "")]
        assert claimed
        assert {command for block in claimed for command, _ in examples(f"```console\n{block.text}```\n")} <= run


def test_what_is_named_is_there() -> None:
    assert set(RUN_HERE) <= {block.page for block in ALL}
    for test, _ in RUN_ELSEWHERE.values():
        assert (ROOT / test).exists()
    for page, beginning in NOT_RUN:
        found = [block for block in of_page(page) if block.text.lstrip().startswith(beginning)]
        assert len(found) == 1, (page, beginning)


def test_the_guard_sees() -> None:
    page = "docs/new.md"
    for language in ("console", "sh", "python", "http", "json", ""):
        (block,) = blocks(f"# New\n\n```{language}\nx\n```\n", page)
        assert block == Block(page, 3, language, None, "x\n")
        assert runner(block) is None
    (block,) = blocks("# New\n\n  ```json\n  x\n  ```\n", "docs/quickstart.md")
    assert runner(block) is None
    with pytest.raises(OpenBlockError):
        blocks("```sh\n", page)


def test_commands_go_on_over_lines() -> None:
    text = "$ curl -d '\n{}'\nanswer\n$ a \\\n  b\n"
    assert commands(text) == [("curl -d '\n{}'", ["answer"]), ("a \\\n  b", [])]
