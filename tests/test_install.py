"""The parts that `pip install topicsd` brings, and the messages of its programs where something is missing."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

import topicsd
from tests.harness import COMMAND, clean_environment
from topics.storage.archive_objects import generation_name

ROOT = Path(topicsd.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXTS = (".py", ".md", ".toml", ".service", ".yml", ".yaml", ".sh", ".json", "Makefile")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if name.endswith(TEXTS)]


def test_nothing_tells_anybody_to_install_the_package_of_somebody_else() -> None:
    wrong = re.compile(r"pip install [^\n`]*(?<![\w./-])topics(?![\w/-])")
    found = [str(path.relative_to(ROOT)) for path in tracked() if wrong.search(path.read_text(errors="replace"))]
    assert found == []
    for what in ("topics", "topics[client]", "-q 'topics[spark]'"):
        assert wrong.search(f"pip install {what}")
    for what in ("topicsd", "'topicsd[server]'", "."):
        assert not wrong.search(f"pip install {what}")


def test_extras_are_named_with_the_distribution() -> None:
    extras = re.compile(rf"(?<![\w.])topics\[({'|'.join(PROJECT['optional-dependencies'])})\]")
    texts = {path: path.read_text(errors="replace") for path in tracked()}
    found = {path.name for path, text in texts.items() if extras.search(text)}
    assert found == {"CHANGELOG.md", Path(__file__).name}, "0.1.0 had that name"


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[ ]", requirement)[0].replace("-", "_") for requirement in requirements}


def test_the_extra_of_the_service_is_what_its_programs_ask_for() -> None:
    assert names(PROJECT["optional-dependencies"]["server"]) == topicsd.SERVER_MODULES
    assert names(PROJECT["dependencies"]) == topicsd.BASE_MODULES
    assert PROJECT["name"] == "topicsd"


BLOCKED = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None
import topicsd
sys.argv[1:] = sys.argv[2:]
sys.exit(topicsd.{program}())
"""


@pytest.mark.parametrize(
    ("program", "arguments"), [("topics_supervisor", ("run",)), ("topics", ("verify", "/nowhere"))]
)
def test_a_program_of_the_service_without_its_packages_says_what_to_install(
    program: str, arguments: tuple[str, ...]
) -> None:
    done = run(BLOCKED.format(program=program), " ".join(topicsd.SERVER_MODULES), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        rf"{program.replace('_', '-')}: this needs the service's packages \(\w+ is missing\): "
        r"pip install 'topicsd\[server\]'\n",
        done.stderr,
    )


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        (
            "obstore",
            "archive list s3://b/x",
            "topics: a bucket needs the package obstore: pip install 'topicsd[bucket]'",
        ),
        ("obstore", "restore s3://b/x --data-dir ./none", "topics: a bucket needs the package obstore: "),
        (
            "pyspark",
            "spark export",
            "topics spark: this needs Spark (pyspark is missing): pip install 'topicsd[spark]'",
        ),
        ("xxhash", "spark export", "topics spark: this needs Spark (xxhash is missing): pip install 'topicsd[spark]"),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(missing: str, arguments: str, said: str) -> None:
    done = run(BLOCKED.format(program="topics"), missing, *arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["msgspec", "httptools"])
def test_an_installation_with_a_hole_says_so(module: str) -> None:
    done = run(BLOCKED.format(program="topics"), module, "doctor")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"topics: the package {module} is missing")
    assert "pip install --force-reinstall topicsd" in done.stderr


def test_the_client_and_its_commands_need_nothing_of_the_service() -> None:
    blocked = " ".join(topicsd.SERVER_MODULES)
    done = run(BLOCKED.format(program="topics"), blocked, "list", "--url", "http://127.0.0.1:1")
    assert done.returncode not in (0, 2), done.stderr
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "topics").mkdir()
    (tmp_path / "topics" / "__init__.py").write_text("__version__ = '0.2.5'\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import topicsd; sys.exit(topicsd.topics())"
    done = run(program)
    assert done.returncode == 2
    assert f"the package topics in {tmp_path}/topics is not the one of topicsd" in done.stderr
    assert "pip uninstall topics" in done.stderr


def test_any_other_missing_module_is_an_error_of_its_own() -> None:
    with pytest.raises(ModuleNotFoundError, match="surprise"):
        topicsd.missing(ModuleNotFoundError("No module named 'surprise'", name="surprise"))


@pytest.mark.parametrize("closed", ["1", "2", "1 2", "0 1 2"])
def test_closed_outputs_lead_nowhere(closed: str, tmp_path: Path) -> None:
    """`nohup … >&- 2>&- <&- &` closes them. A traceback followed, or the first file that was opened became stderr."""
    where = tmp_path / "data"
    (damaged := where / "archive" / generation_name(1)).parent.mkdir(parents=True)
    damaged.touch()
    for program in (["topics-supervisor", "status", "--data-dir", where], ["topics", "archive", "verify", where]):
        done = shell_run(program, "".join(f" {fd}>&-" for fd in closed.split()))
        assert done.returncode == (3 if "status" in program else 1)
        assert "Traceback" not in done.stderr
        for fd, said in (("1", done.stdout), ("2", done.stderr)):
            assert (said == "") == (fd in closed.split() or (fd == "2" and "status" in program)), (fd, said)


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (2, "topics-supervisor run --port x"),
        (2, "topics-supervisor nonsense"),
        (3, "topics-supervisor promote --data-dir /nonexistent"),
        (2, "topics verify /nonexistent"),
        (2, "topics lag --url x:"),
        (2, "topics read a\udcff"),
        (3, "topics list --url http://127.0.0.1:1"),
    ],
)
def test_errors_that_stderr_cannot_take_keep_their_exit_code(code: int, command: str) -> None:
    done = shell_run(command.split(), " 2>/dev/full")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_error_for_a_full_pipe_that_does_not_block_keeps_its_exit_code() -> None:
    """Python ended with 120, as it could not flush."""
    reader, stderr = os.pipe()
    os.set_blocking(stderr, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(stderr, bytes(4096))
    done = subprocess.run([COMMAND, "run", "--port", "x"], stdout=subprocess.PIPE, stderr=stderr, check=False)
    os.close(reader)
    os.close(stderr)
    assert (done.returncode, done.stdout) == (2, b"")


def test_an_output_that_lacks_a_character_spells_it() -> None:
    done = shell_run(["topics", "archive", "prune", "--help"], "", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2026" in done.stdout


def test_an_argument_that_is_no_text() -> None:
    command: list[str | bytes] = [str(Path(sys.executable).with_name("topics")), "read", b"a\xff"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (2, "topics read: an argument is not UTF-8: b'a\\xff'\n")


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && "
    done = shell_run(["topics-supervisor", "status", "--data-dir", tmp_path / "data"], "", gone)
    assert (done.returncode, done.stderr) == (3, "")
    (tmp_path / "gone").mkdir()
    done = shell_run(["topics-supervisor", "status"], "", gone)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "topics-supervisor: TOPICS_DATA_DIR=topics-data: this shell's working directory is gone"
    )


def shell_run(
    program: Sequence[object], redirected: str, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = shlex.join([str(Path(sys.executable).with_name(str(program[0]))), *map(str, program[1:])])
    return subprocess.run(
        ["/bin/sh", "-c", f"{before}{command}{redirected}"],
        env=clean_environment(environment),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
