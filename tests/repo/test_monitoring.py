"""Dashboards and alert rules are current, use metrics that exist, and pass promtool where it is installed."""

import json
import re
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from skyrl_tx.engine.metrics import EngineMetrics
from skyrl_tx.process.exposition import render
from skyrl_tx.server.monitoring import ApiMetrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
METRIC = re.compile(r"\b(?:skyrl_tx|process|python)_[a-z0-9_]+")
SUFFIXES = {"counter": ("_total",), "info": ("_info",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = spec_from_file_location("build_monitoring", MONITORING / "build.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_promtool(*arguments: str, text: bytes | None = None) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=MONITORING, input=text, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    return done.stdout.decode()


def list_series() -> set[str]:
    """Return the names of all series that the API process or the engine may serve."""
    return {
        family.name + suffix
        for registry in (ApiMetrics().registry, EngineMetrics().registry)
        for family in registry.collect()
        for suffix in SUFFIXES[family.type]
    }


def read_expressions() -> list[str]:
    boards = [json.loads((MONITORING / f"{name}.json").read_text()) for name in ("server", "training", "sampling")]
    rules = json.loads((MONITORING / "alerts.json").read_text())["groups"][0]["rules"]
    targets = [target["expr"] for board in boards for panel in board["panels"] for target in panel["targets"]]
    return [*targets, *(rule["expr"] for rule in rules)]


def test_the_committed_files_are_those_that_the_program_writes(build: ModuleType) -> None:
    for name, text in build.files().items():
        assert (MONITORING / name).read_text() == text, f"run python deploy/monitoring/build.py: {name}"
    assert sorted(build.files()) == sorted(path.name for path in MONITORING.glob("*.json"))


def test_every_metric_of_a_dashboard_or_a_rule_exists() -> None:
    known, used = list_series(), {name for text in read_expressions() for name in METRIC.findall(text)}
    assert len(used) > 50 and used <= known, used - known


def test_no_family_is_in_both_processes() -> None:
    api, engine = (
        {family.name for family in registry.collect()} for registry in (ApiMetrics().registry, EngineMetrics().registry)
    )
    assert not api & engine
    assert all(name.startswith("skyrl_tx_") for name in engine)


def test_every_alert_has_a_paragraph(build: ModuleType) -> None:
    guide = (ROOT / "docs" / "guides" / "alerts.md").read_text()
    headings = re.findall(r"^## (\w+)$", guide, re.MULTILINE)
    assert headings == [alert[0] for alert in build.ALERTS]


def test_every_paragraph_names_a_command_or_a_setting() -> None:
    """A runbook entry without a command or a setting says what is wrong, but not what to do."""
    guide = (ROOT / "docs" / "guides" / "alerts.md").read_text()
    for paragraph in guide.split("\n## ")[1:]:
        assert re.search(r"`(skyrl-tx |--)", paragraph), paragraph.partition("\n")[0]


@needs_promtool
def test_prometheus_accepts_rules_and_configuration() -> None:
    assert "12 rules found" in run_promtool("check", "rules", "alerts.json")
    run_promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    run_promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_names_and_types_of_metrics_follow_the_conventions_of_prometheus() -> None:
    text = b"".join(render(metrics.registry, is_openmetrics=False) for metrics in (ApiMetrics(), EngineMetrics()))
    run_promtool("check", "metrics", text=text)
