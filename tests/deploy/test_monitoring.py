"""`deploy/prometheus` and `deploy/grafana` ask for what a service says, and Prometheus takes them as they are.

promtool is found as `tests/contract/test_8_metrics.py` finds it; with TOPICS_REQUIRE_PROMTOOL=1 its absence is a
failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.asking import put, write
from tests.contract.test_8_metrics import PROMTOOL
from tests.harness import Service

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
BOARD = DEPLOY / "grafana" / "topics.json"
METRIC = re.compile(r"\btopics_[a-z0-9_]+")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None and os.environ.get("TOPICS_REQUIRE_PROMTOOL") != "1",
    reason="there is no promtool; `make test` fetches one",
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[str]]:
    """Names of all series of a service that has a queue and an archive."""
    with Service(env={"TOPICS_ARCHIVE_URL": tmp_path_factory.mktemp("archive").as_uri()}) as service:
        put(service.client, "jobs", type="queue", durability="fsync")
        write(service.client, "jobs", 1)
        text = service.client.get("/v0/metrics").text
        yield {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def expressions() -> list[str]:
    """Return the expressions of all panels."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_alerts_are_about_what_there_is(said: set[str]) -> None:
    asked = {name for line in ALERTS.read_text().splitlines() if "expr:" in line for name in METRIC.findall(line)}
    assert len(asked) > 10
    assert asked <= said


def test_the_dashboard_shows_what_there_is(said: set[str]) -> None:
    asked = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(asked) > 20
    assert asked <= said


def promtool(*arguments: str) -> None:
    assert PROMTOOL is not None, "TOPICS_REQUIRE_PROMTOOL=1, but there is no promtool"
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))


@needs_promtool
def test_alerts_wake_whom_they_should() -> None:
    promtool("test", "rules", str(Path(__file__).parent / "alerts_test.yml"))


@needs_promtool
def test_prometheus_takes_the_expressions_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$instance", ".*")}
        for number, expression in enumerate(expressions())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    promtool("check", "rules", str(path))
