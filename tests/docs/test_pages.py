"""The guides are true: each is run from its first block to its last, and prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy import distribution
from tests.docs.blocks import RUN_HERE, Block, of_page
from tests.docs.page_runner import SERVICE, PageRunner, commands
from tests.spark.conftest import make_java_home, spark_environment

QUICKSTART = "docs/quickstart.md"
SPARK = "docs/guides/spark.md"
PRELUDES = {
    "docs/queues.md": """
import os
from topics.client import Client

def charge(data):
    print("charged", data)

def send(data):
    print("sent", data, flush=True)
    os._exit(0)  # the worker waits for jobs for ever

"""
}
"""The parts of a page's programs that are the reader's own."""


def starts_its_own(blocks: list[Block]) -> bool:
    return any(SERVICE.match(line.removeprefix("$ ")) for block in blocks for line in block.text.splitlines())


def run(page: str, folder: Path, environment: dict[str, str]) -> None:
    blocks = of_page(page)
    with PageRunner(folder, environment) as runner:
        if not starts_its_own(blocks):
            runner.start_service()
        for block in blocks:
            if "pip install" in block.text and page == SPARK:
                continue  # tests/deploy/test_distribution.py installs the extras
            runner.run(block, PRELUDES.get(page, ""))
        runner.finish()


@pytest.mark.long
@pytest.mark.parametrize("page", sorted(RUN_HERE - {QUICKSTART, SPARK}))
def test_a_guide_does_what_it_shows(page: str, tmp_path: Path) -> None:
    run(page, tmp_path, {})


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_quickstart_leads_from_nothing_to_a_worker(tmp_path: Path) -> None:
    """In a bare environment, in a folder with the sources of this checkout."""
    distribution.copy_sources(tmp_path)
    run(QUICKSTART, tmp_path, {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})


def test_the_first_page_begins_as_the_quickstart_does() -> None:
    readme = next(block.text for block in of_page("README.md"))
    shown = [command for block in of_page(QUICKSTART)[:2] for command, _ in commands(block.text)]
    assert readme.splitlines() == shown


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_guide_to_spark_does_what_it_shows(tmp_path: Path) -> None:
    (tmp_path / "reader").mkdir()
    run(SPARK, tmp_path / "reader", spark_environment(make_java_home(tmp_path / "java")))
