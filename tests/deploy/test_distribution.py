"""`make dist`: what is built can be installed, and serves."""

from __future__ import annotations

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
