"""The programs of the distribution `topicsd`. They say in a sentence what is missing before anything else is imported.

`pip install topicsd` brings the client and the commands of `topics` that talk to a service; the service itself, Spark
and Delta are extras. A package of somebody else is called `topics` as well, and replaces ours where both are installed.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
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


class OutputError(Exception):
    """Stdout cannot be written, as on a full disk. No OSError, which a command may take for one of its own work."""


class _Stdout(io.FileIO):
    """File descriptor 1. It raises OutputError instead of OSError."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(f"cannot write to stdout: {error.strerror}") from error


class _Stderr(io.FileIO):
    """File descriptor 2. What it cannot take is lost, and changes no exit code."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)  # None of a pipe that is full and does not block
        except OSError:
            return len(data)


def open_output() -> None:
    """Have stdout and stderr take all that is printed: one that was closed (`2>&-`) leads nowhere, and what an encoding
    lacks is spelled. Without that the first file that is opened would be stderr.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    encoding, lines = (sys.stdout.encoding, sys.stdout.isatty()) if sys.stdout else ("utf-8", False)
    buffer = io.BufferedWriter(_Stdout(1, "w", closefd=False))
    sys.stdout = io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=lines)
    errors = io.BufferedWriter(_Stderr(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(errors, encoding, errors="backslashreplace", line_buffering=True)


def guarded(program: str, work: Callable[[], int]) -> int:
    """Do the work of a program; return its exit code, also when it is interrupted, or its output cannot be written.
    Its errors begin with `program`.
    """
    try:
        try:
            code = work()
        finally:  # also after the help, which ends with SystemExit
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except UnicodeEncodeError as error:
        print(f"{program}: an argument is not UTF-8: {os.fsencode(error.object)!r}", file=sys.stderr)
        return EXIT_USAGE
    except (OutputError, OSError) as error:
        # The reader of the output has closed it, or its disk is full. What waits to be written goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error.__cause__ or error, BrokenPipeError):
            return EXIT_BROKEN_PIPE
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USAGE
    return code


def _run(program: str) -> int:
    open_output()
    try:
        problem = foreign(importlib.import_module("topics"))
        if problem is None:
            code: int = importlib.import_module(COMMANDS[program]).main()
            return code
    except ModuleNotFoundError as error:
        problem = missing(error)
    except KeyboardInterrupt:  # while all of it was being imported
        return EXIT_INTERRUPTED
    print(f"{program}: {problem}", file=sys.stderr)
    return EXIT_USAGE
