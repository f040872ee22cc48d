"""deploy/Containerfile and deploy/compose.yml. No test here has a container runtime: each step of the image is executed
in a bare Debian, and the image's program serves in namespaces.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.deploy.bare import Bare, needs_debian
from tests.deploy.test_monitoring import needs_promtool, promtool
from tests.harness import STOP_GRACE_MS, Service, poll

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERFILE = DEPLOY / "Containerfile"
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))
BASE = "debian:trixie-slim"
SERVE = """
set -e
ip link set lo up
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=1777,size=256m shm "$1/dev/shm"
inside() { chroot --userspec 4000:4000 "$1" env -i $environment /bin/sh -ec "$2"; }
chroot --userspec 4000:4000 "$1" env -i $environment $program & service=$!
tries=0
until inside "$1" "$check" 2> /dev/null; do
  tries=$((tries + 1)); test $tries -lt 1200
  kill -0 $service
  sleep 0.2
done
inside "$1" 'until topics-supervisor status > /dev/null; do sleep 0.2; done'
inside "$1" 'echo "{\\"item\\": 1}" | topics write shop; topics read shop'
kill -TERM $service
wait $service
"""


class Step(NamedTuple):
    """An instruction of the file, with its continued lines."""

    word: str
    rest: str


def steps() -> Iterator[Step]:
    lines = [line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            yield Step(word, rest.strip())


class Image:
    """The stages of the file, each in a bare Debian; what the last one is started with."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._stages: dict[str, Bare] = {}
        self._cwd = "/"
        self.environment: dict[str, str] = {}
        self.rest: dict[str, str] = {}
        """The other instructions of the last stage, such as USER."""
        for step in steps():
            getattr(self, f"_do_{step.word.lower()}", lambda rest, word=step.word: self.rest.update({word: rest}))(
                step.rest
            )

    def _do_from(self, rest: str) -> None:
        base, _, name = rest.partition(" AS ")
        assert base == BASE
        self.root = self._stack.enter_context(Bare(self._folder / f"stage{len(self._stages)}"))
        self._stages[name] = self.root
        self._cwd, self.environment, self.rest = "/", {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, {}

    def _do_workdir(self, rest: str) -> None:
        self._cwd = rest
        (self.root.root / rest[1:]).mkdir(parents=True)

    def _do_env(self, rest: str) -> None:
        for pair in rest.split():
            name, _, value = pair.partition("=")
            self.environment[name] = value.replace("$PATH", self.environment["PATH"])

    def _do_run(self, rest: str) -> None:
        self.root.run(rest, cwd=self._cwd, DEBIAN_FRONTEND="noninteractive")

    def _do_copy(self, rest: str) -> None:
        *sources, target = rest.split()
        origin = ROOT
        if sources[0].startswith("--from="):
            origin = self._stages[sources.pop(0).removeprefix("--from=")].root
        into = self.root.root / self._cwd[1:] / target.removeprefix("/")
        for source in sources:
            path = origin / source.removeprefix("/")
            to = into / path.name if target.endswith("/") else into
            if path.is_dir():
                shutil.copytree(path, to, symlinks=True)
            else:
                shutil.copy(path, to)


@needs_debian
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_each_step_of_the_image_works_and_its_program_serves(tmp_path: Path) -> None:
    with ExitStack() as stack:
        image = Image(tmp_path, stack)
        assert image.rest["USER"] == "4000"
        program = [*json.loads(image.rest["ENTRYPOINT"]), *json.loads(image.rest["CMD"])]
        check = json.loads(image.rest["HEALTHCHECK"].partition("CMD ")[2])
        environment = image.environment | {"TOPICS_ALLOW_INSECURE_NO_AUTH": "1"}
        environment["TOPICS_SHUTDOWN_GRACE_MS"] = str(STOP_GRACE_MS)
        script = "\n".join(
            [
                f"environment={shlex.quote(' '.join(f'{name}={value}' for name, value in environment.items()))}",
                f"program={shlex.quote(shlex.join(program))}",
                f"check={shlex.quote(shlex.join(check))}",
                SERVE,
            ]
        )
        namespaces = [
            "--mount",
            "--pid",
            "--net",
            "--ipc",
            "--propagation",
            "private",
            "--fork",
            "--kill-child=SIGKILL",
        ]
        done = subprocess.run(
            ["unshare", *namespaces, "/bin/sh", "-c", script, "sh", str(image.root.root)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert '"data":{"item": 1}' in done.stdout
        owner = (image.root.root / "data").stat()
        assert (owner.st_uid, owner.st_mode & 0o777) == (4000, 0o700)
        assert not (image.root.root / "src").exists()


def test_the_health_check_takes_a_service_that_wants_a_key_and_has_another_port_for_healthy() -> None:
    """Docker called it unhealthy, and Swarm kept killing it."""
    (check,) = (step.rest.partition("CMD ")[2] for step in steps() if step.word == "HEALTHCHECK")
    service = Service(shards=1, frontends=1, env={"TOPICS_API_KEYS": "key", "TOPICS_PROBE_AUTH": "1"})

    def is_healthy() -> bool:
        done = subprocess.run(json.loads(check), env=service.environment(), capture_output=True, check=False)
        return done.returncode == 0

    try:
        service.start(wait_ready=False)
        poll("the check to find it", is_healthy, every_s=0.2)
        service.stop()
        assert not is_healthy()
    finally:
        service.close()


@pytest.mark.skipif(HADOLINT is None, reason="there is no hadolint; `make test` fetches it")
def test_the_linter_has_no_complaint() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(CONTAINERFILE)], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_gets_what_it_copies_and_nothing_else() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for step in steps() if step.word == "COPY" and "--from" not in step.rest for name in step.rest.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text())
    return read


def test_compose_mounts_what_is_there_and_names_what_it_means() -> None:
    services = compose()["services"]
    sources = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    named = {source for source in sources if not source.startswith("./")}
    assert named == set(compose()["volumes"])
    assert all((DEPLOY / source).exists() for source in sources if source not in named)
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())["scrape_configs"][0]
    usual = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped | {"static_configs": usual["static_configs"]} == usual
    assert scraped["static_configs"] == [{"targets": ["topics:4000"]}]
    (source,) = yaml.safe_load((DEPLOY / "compose" / "datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "compose" / "dashboards.yml").read_text())["providers"]
    assert f"./grafana:{provider['options']['path']}:ro" in services["grafana"]["volumes"]


@needs_promtool
def test_prometheus_takes_the_configuration_of_compose(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "compose" / "prometheus.yml", tmp_path)
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
