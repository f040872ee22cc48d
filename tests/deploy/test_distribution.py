"""`make dist`: what is built can be installed, and serves."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.deploy import distribution

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return distribution.build(tmp_path_factory.mktemp("dist"))


def test_the_wheel_serves_in_a_bare_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    distribution.check_installed(built[0], tmp_path)


def test_the_sdist_serves_in_a_bare_environment(built: tuple[Path, Path], tmp_path: Path) -> None:
    distribution.check_installed(built[1], tmp_path)


def test_uvx_runs_the_service_from_the_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    distribution.check_with_uvx(built[0], tmp_path)


def test_the_wheel_has_every_file_of_the_pages(built: tuple[Path, Path]) -> None:
    folder = Path("topics", "frontend", "operators")
    with zipfile.ZipFile(built[0]) as wheel:
        packed = set(wheel.namelist())
    for page in ("console", "api_page"):
        files = [path for path in (distribution.ROOT / folder / page).rglob("*") if path.is_file()]
        assert files
        assert {str(path.relative_to(distribution.ROOT)) for path in files} <= packed
