"""docs/install.md on a bare Debian, and systemd's own verdict on the units."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy import distribution
from tests.deploy.bare import Bare, needs_debian
from tests.harness import poll

ROOT = Path(__file__).parents[2]
UNITS = [ROOT / "deploy" / "topics.socket", ROOT / "deploy" / "topics.service"]
PAGE = ROOT / "docs" / "install.md"
EXPOSURE_MAX = 1.5
KNOWN_ON_252 = "Failed to parse service type, ignoring: notify-reload"
"""Debian 12 has no notify-reload. The unit names `notify` first, which then stays."""
HAMMER = """
import http.client, subprocess, urllib.request
for _ in range(3):
    restart = subprocess.Popen(["systemctl", "restart", "topics.service"])
    asked = 0
    while restart.poll() is None:
        try:
            urllib.request.urlopen("http://127.0.0.1:4000/v0/health", timeout=240).read()
        except (http.client.RemoteDisconnected, ConnectionResetError):
            continue  # accepted in the last moment before the drain, and closed before the request was there
        asked += 1
    assert restart.returncode == 0
    print("asked", asked)
"""


class Step(NamedTuple):
    """A line of the page, and the output that the page shows."""

    command: str
    shown: list[str]


def steps() -> list[Step]:
    found: list[Step] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for line in block.splitlines():
            if line.startswith("# "):
                found.append(Step(line[2:], []))
            else:
                found[-1].shown.append(line)
    return found


def matches(shown: list[str], printed: str) -> bool:
    """Return whether the output is what the page shows; `…` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in "\n".join(shown).split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    """A Debian that knows where our wheel is."""
    folder = tmp_path_factory.mktemp("bare")
    wheel, _ = distribution.build(folder / "dist")
    with Bare(folder / "root") as bare:
        (bare.root / "wheels").mkdir()
        shutil.copy(wheel, bare.root / "wheels")
        yield bare


@needs_debian
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_page_leads_from_a_bare_debian_to_a_service_and_back(bare: Bare) -> None:
    booted = False
    for command, shown in steps():
        needs_network = command.startswith("apt-get ") or "/pip install " in command
        if command.startswith("systemctl ") and not booted:
            check_units(bare)
            bare.boot()
            booted = True
        if command.startswith("systemctl disable "):
            look_closer(bare)
        if command.startswith("systemctl show "):  # READY=1 comes before the last process, and the page after it
            poll(f"{command} to print {shown}", lambda: matches(shown, bare.run_booted(command)), every_s=0.2)
            continue
        if booted and not needs_network:
            printed = bare.run_booted(command)
        else:
            printed = bare.run(command, PIP_FIND_LINKS="/wheels", DEBIAN_FRONTEND="noninteractive")
        assert not shown or matches(shown, printed), f"{command}\n{printed}"
    assert (bare.root / "var/lib/topics/wal").is_dir()


def check_units(bare: Bare) -> None:
    """Have the systemd of this Debian judge the installed units: no word about them, and little exposure."""
    names = " ".join(f"/etc/systemd/system/{unit.name}" for unit in UNITS)
    assert bare.run(f"systemd-analyze verify --man=no {names}") == ""
    assert exposure(bare.run("systemd-analyze security --offline=true /etc/systemd/system/topics.service"))


def exposure(report: str) -> bool:
    level = re.search(r"Overall exposure level for topics\.service: ([\d.]+)", report)
    assert level is not None, report
    return float(level[1]) <= EXPOSURE_MAX


def look_closer(bare: Bare) -> None:
    """Check what the page only tells: reloads, refused ones too, and restarts that refuse no connection."""
    bare.run_booted("systemctl reload topics.service")
    assert bare.run_booted("systemctl show --property=Type --value topics.service").strip() == "notify-reload"
    # Who is killed has lost nothing, and says so: exit code 5 is a gap. With DynamicUser= the start could not tell.
    key = "TOPICS_KEY_FILE=/root/topics.key /opt/topics/bin/topics"
    bare.run_booted(f"echo 2 | {key} write shop && systemctl kill --signal=SIGKILL topics.service")
    assert len(bare.run_booted(f"{key} read shop").splitlines()) == 2
    bare.run_booted("install -d -o topics /backup")
    backup = "/opt/topics/bin/topics backup --data-dir /var/lib/topics --to /backup"
    bare.run_booted(f"setpriv --reuid topics --regid topics --clear-groups {backup}")
    # docs/archive.md: a restore in the place of the service.
    bare.run_booted("systemctl stop topics.service && mv /var/lib/topics /var/lib/topics.before")
    bare.run_booted("/opt/topics/bin/topics restore /backup --data-dir /var/lib/topics --copy")
    bare.run_booted("systemctl start topics.service")
    bare.run_booted("until /opt/topics/bin/topics-supervisor status --data-dir /var/lib/topics; do sleep 0.2; done")
    assert '"reason":"restored"' in bare.run_booted(f"{key} read shop || test $? = 5")
    program = bare.root / "hammer.py"
    program.write_text(HAMMER)
    asked = re.findall(r"asked (\d+)", bare.run_booted("/opt/topics/bin/python /hammer.py"))
    assert len(asked) == 3
    assert all(int(count) for count in asked)
    assert "enabled" in bare.run_booted("systemctl is-enabled topics.service")


def test_systemd_here_takes_the_units(tmp_path: Path) -> None:
    for unit in UNITS:
        text = unit.read_text().replace("/opt/topics/bin/topics-supervisor", "/bin/true")
        (tmp_path / unit.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    said = [line for line in done.stderr.splitlines() if KNOWN_ON_252 not in line and str(tmp_path) in line]
    assert said == []
    report = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(UNITS[1])],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert exposure(report.stdout)
