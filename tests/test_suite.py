"""`tests/suite.py`: what it forgives, and what it never does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import suite

FAILS_ONCE = """
from pathlib import Path

def test_a_lost_race():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        assert False, "lost"
"""
PASSES = "def test_passes(): pass\n"


class Tests:
    """A folder of tests, run as a suite of one part a file."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.again = root / "unsteady"
        (root / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")

    def run(self, *, again: bool = True, **files: str) -> int:
        """Return the exit code."""
        for name, content in files.items():
            (self.root / f"test_{name}.py").write_text(content)
        return suite.run_suite(
            [(name, [f"test_{name}.py"]) for name in files], self.root, self.again if again else None
        )

    @property
    def unsteady(self) -> list[str]:
        return self.again.read_text().splitlines() if self.again.exists() else []


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tests:
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # what is installed takes seconds to import
    return Tests(tmp_path)


def test_all_pass(tests: Tests, capsys: pytest.CaptureFixture[str]) -> None:
    assert tests.run(one=PASSES, other=PASSES + PASSES.replace("passes", "too"), third=PASSES) == 0
    assert tests.unsteady == []
    assert "other: 2 passed" in capsys.readouterr().out


def test_a_lost_race_is_forgiven_and_named(tests: Tests, capsys: pytest.CaptureFixture[str]) -> None:
    assert tests.run(one=FAILS_ONCE + PASSES, other=PASSES) == 0
    assert tests.unsteady == ["test_one.py::test_a_lost_race"]
    assert "assert False" in capsys.readouterr().out, "how it was lost is shown"


def test_a_lost_race_is_a_failure_unless_asked_otherwise(tests: Tests) -> None:
    assert tests.run(again=False, one=FAILS_ONCE) == 1


def test_the_second_run_is_of_that_test_alone(tests: Tests) -> None:
    """With its parameter, even where that looks like a node id itself."""
    source = f"""
import pytest
{FAILS_ONCE}
@pytest.mark.parametrize("text", ["a::b [c] / d", "e"])
def test_text(text):
    seen = Path(__file__).with_name("text")
    if text != "e" and not seen.exists():
        seen.touch()
        assert False
def test_order():
    assert not Path(__file__).with_name("ran").exists()
    Path(__file__).with_name("ran").touch()
"""
    assert tests.run(one=source) == 0
    assert tests.unsteady == ["test_one.py::test_a_lost_race", "test_one.py::test_text[a::b [c] / d]"]


def test_what_fails_twice_is_a_failure(tests: Tests, capsys: pytest.CaptureFixture[str]) -> None:
    assert tests.run(one="def test_wrong(): assert 0\n" + FAILS_ONCE) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: test_one.py::test_wrong"


FINAL = {
    "fixture": (
        "import pytest\n@pytest.fixture\ndef broken():\n 1 / 0\ndef test_it(broken): pass",
        "error: test_one.py::test_it",
    ),
    "tear-down": (
        "import pytest\n@pytest.fixture\ndef broken():\n yield\n 1 / 0\ndef test_it(broken): assert 0",
        "error: test_one.py::test_it",
    ),
    "import": ("import nothing_of_that_name", "one: pytest ended with 2"),
    "no test": ("", "one: pytest ended with 5"),
    "exit": ("import os\ndef test_it(): os._exit(0)", "one: pytest ended with 0"),
    "crash": ("import os\ndef test_it(): os.abort()", "one: pytest ended with -6"),
    "broken off": ("import pytest\ndef test_it(): pytest.exit('enough', 0)", "one: only 0 of 1 tests have ended"),
    "skip": ("import pytest\ndef test_it(): pytest.skip('no browser')", "skipped: test_one.py::test_it"),
    "skipped module": ("import pytest\npytest.skip('no browser', allow_module_level=True)", "skipped: test_one.py"),
}
QUICK = ("fixture", "broken off", "skip")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.long) for name in FINAL]
)
def test_what_is_no_lost_race_is_final(tests: Tests, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source, said = FINAL[name]
    assert tests.run(one=source, other=FAILS_ONCE) == 1
    assert said in capsys.readouterr().out.splitlines()
    assert tests.unsteady == [], "nothing is run again where that cannot help"


def test_a_test_that_is_skipped_when_it_runs_again_has_not_passed(tests: Tests) -> None:
    source = FAILS_ONCE.replace("    if", "    import pytest\n    if seen.exists(): pytest.skip('later')\n    if")
    assert tests.run(one=source) == 1


def test_a_skip_is_no_failure_unless_asked(tests: Tests) -> None:
    assert tests.run(again=False, one=PASSES + "import pytest\ndef test_it(): pytest.skip('no browser')") == 0


def test_many_failures_are_no_lost_races(tests: Tests) -> None:
    many = "".join(f"def test_{n}(): assert 0\n" for n in range(suite.AGAIN_MAX))
    assert tests.run(one=many + FAILS_ONCE) == 1
    assert tests.unsteady == []


def test_no_more_run_at_once_than_there_is_place_for(tests: Tests) -> None:
    source = f"""
import os, time
from pathlib import Path
def test_it():
    own = Path({str(tests.root)!r}, f"running-{{os.getpid()}}")
    own.touch()
    most = 0
    for _ in range(20):
        most = max(most, len(list(own.parent.glob("running-*"))))
        time.sleep(0.01)
    own.unlink()
    assert most <= {suite.AT_ONCE}
"""
    assert tests.run(one=source, two=source, three=source, four=source) == 0


def test_runs_end_with_the_suite(tests: Tests) -> None:
    (tests.root / "test_one.py").write_text(
        "import os, time\ndef test_it():\n open('pid', 'w').write(str(os.getpid()))\n time.sleep(60)"
    )
    runs = suite.side_by_side([("one", ["test_one.py"]), ("other", ["-h"])], tests.root, tests.root)
    next(runs)
    pid = tests.root / "pid"
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    runs.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_every_file_is_in_both_suites() -> None:
    """A part that has no long tests, or none but those, is not named where pytest would find none."""
    files = set((suite.ROOT / "tests").rglob("test_*.py"))
    for chosen, parts in suite.PARTS.items():
        given = [suite.ROOT / path for part in parts for name in part.split() for path in suite.paths(name)]
        assert len(given) == len(set(given)), f"{chosen}: twice"
        missed = {path for path in files if not any(path.is_relative_to(one) for one in given)}
        if chosen == "long":
            missed = {path for path in missed if f"pytest.mark.{chosen}" in path.read_text()}
        else:
            missed = {
                path for path in missed if path.read_text().count("def test_") > path.read_text().count("mark.long")
            }
        assert not missed, f"no part of {chosen} has these"
