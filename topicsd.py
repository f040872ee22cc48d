"""The programs of the distribution `topicsd`. They say in a sentence what is missing before anything else is imported.

`pip install topicsd` brings the client and the commands of `topics` that talk to a service; the service itself, Spark
and Delta are extras. A package of somebody else is called `topics` as well, and replaces ours where both are installed.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Final

EXIT_USAGE: Final = 2
BASE_MODULES: Final = frozenset(("httptools", "msgspec", "shtab", "tqdm"))
"""Modules that `pip install topicsd` brings."""
SERVER_MODULES: Final = frozenset(
    ("h2", "hypercorn", "posix_ipc", "psutil", "sortedcontainers", "starlette", "structlog", "uvloop", "wsproto")
) | {"xxhash"}
"""Modules that `topicsd[server]` brings."""
BUCKET_MODULE: Final = "obstore"
"""The module that `topicsd[bucket]` brings. It is imported with the first request to a bucket."""


COMMANDS: Final = {"topics": "topics.cli.main", "topics-supervisor": "topics.supervisor.command"}
"""The module whose `main` is each program."""


def topics() -> int:
    """Run the program `topics`; return its exit code."""
    return _run("topics")


def topics_supervisor() -> int:
    """Run the program `topics-supervisor`; return its exit code."""
    return _run("topics-supervisor")


def foreign(package: ModuleType) -> str | None:
    """Return why the imported package `topics` is not ours, None if it is."""
    if getattr(package, "DISTRIBUTION", None) == "topicsd":
        return None
    return (
        f"the package topics in {package.__path__[0]} is not the one of topicsd; run: pip uninstall topics,"
        " then pip install --force-reinstall --no-deps topicsd"
    )


def missing(error: ModuleNotFoundError) -> str:
    """Return the sentence about a module that is not installed; raises the error if no extra brings it."""
    module = (error.name or "").partition(".")[0]
    if module in BASE_MODULES:
        return f"the package {module} is missing, which every installation has: pip install --force-reinstall topicsd"
    if module == BUCKET_MODULE:
        return f"a bucket needs the package {module}: pip install 'topicsd[bucket]'"
    if module not in SERVER_MODULES:
        raise error
    return f"this needs the service's packages ({error.name} is missing): pip install 'topicsd[server]'"


def _run(program: str) -> int:
    problem = foreign(importlib.import_module("topics"))
    if problem is None:
        try:
            code: int = importlib.import_module(COMMANDS[program]).main()
        except ModuleNotFoundError as error:
            problem = missing(error)
        else:
            return code
    print(f"{program}: {problem}", file=sys.stderr)
    return EXIT_USAGE
