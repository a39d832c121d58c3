"""deploy/compose.yaml: its format, its files, and the configuration of its server."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.test_dockerfile import get_arguments
from tests.support.client_environments import DEPLOYMENT, ClientEnvironment, PreparedEnvironment
from tests.support.compose import DEPLOY, read_project
from tests.support.deployment_variables import check_variables

FILE = DEPLOY / "compose.yaml"
SERVERS = ("server", "server-gpu")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return read_compose_file()["services"]


def read_compose_file() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


@pytest.mark.slow
def test_it_fits_the_schema(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> None:
    program = client_environment(DEPLOYMENT).python.with_name("check-jsonschema")
    command = [program, "--builtin-schema", "vendor.compose-spec", FILE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_docker_compose_reads_it(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> None:
    profiles = ("gpu", "postgres", "monitoring", "commands")
    project = read_project(client_environment(DEPLOYMENT), ["compose.yaml"], profiles=profiles)
    assert project["services"].keys() == read_compose_file()["services"].keys()


def test_profiles(services: dict[str, Any]) -> None:
    found = {name: service.get("profiles") for name, service in services.items()}
    assert found == {
        "server": None,
        "server-gpu": ["gpu"],
        "cli": ["commands"],
        "postgres": ["postgres"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }


def test_servers_differ_in_their_devices_only(services: dict[str, Any]) -> None:
    gpu = {name: value for name, value in services["server-gpu"].items() if name not in ("profiles", "deploy")}
    assert gpu == services["server"]
    (device,) = services["server-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("name", [*SERVERS, "cli"])
def test_our_containers_are_confined_and_keep_their_data(services: dict[str, Any], name: str) -> None:
    service = services[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    mounted = {volume.partition(":")[2] for volume in service["volumes"]}
    assert mounted == set(get_arguments("VOLUME")[0].split())
    check_variables(service["environment"])


def test_the_health_check_is_that_of_the_image(services: dict[str, Any]) -> None:
    (check,) = get_arguments("HEALTHCHECK")
    assert services["server"]["healthcheck"]["test"] == ["CMD", *json.loads(check[check.index("CMD ") + 4 :])]


def test_ports_are_published_on_loopback(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert len(published) == 4
    assert all(re.match(r"127\.0\.0\.1:|\$\{\w+:-127\.0\.0\.1:", port) for port in published)


def test_there_are_no_secrets_in_it() -> None:
    for name, secret in read_compose_file()["secrets"].items():
        assert not (DEPLOY / secret["file"]).exists(), name
    for service in read_compose_file()["services"].values():
        for name, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|TOKEN|SECRET|KEY", name):
                assert value in (None, "${POSTGRES_PASSWORD:-}") or name.endswith("__FILE"), name
    assert not re.search(r"tml-|://\w+:\w+@", FILE.read_text())
    ignored = (DEPLOY / ".gitignore").read_text().split()
    assert ignored == [".env", "secrets/"]


def test_variables_are_explained() -> None:
    used = set(re.findall(r"\$\{(\w+)", FILE.read_text()))
    used |= {name for name, value in read_compose_file()["services"]["server"]["environment"].items() if value is None}
    described = set(re.findall(r"^#?(\w+)=", (DEPLOY / "compose.env").read_text(), re.MULTILINE))
    described -= {"COMPOSE_FILE", "MINIO_ROOT_PASSWORD"}  # for compose.engines.yaml
    assert described <= used and used - described == {"SKYRL_TX_IMAGE_TAG", "SKYRL_TX_LOG_FORMAT"}


def test_mounted_files_exist_and_dashboards_are_all_there(services: dict[str, Any]) -> None:
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", ())
        if volume.startswith("./")
    ]
    assert len(mounted) == 7 and all((DEPLOY / path).is_file() for path in mounted)
    dashboards = {path.name for path in (DEPLOY / "monitoring").glob("*.json")} - {"alerts.json"}
    assert dashboards <= {Path(path).name for path in mounted}


def test_grafana_and_prometheus_are_connected(services: dict[str, Any]) -> None:
    (source,) = yaml.safe_load((DEPLOY / "monitoring/compose/grafana-datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    (provider,) = yaml.safe_load((DEPLOY / "monitoring/compose/grafana-dashboards.yml").read_text())["providers"]
    targets = [volume.split(":")[1] for volume in services["grafana"]["volumes"] if ".json:" in volume]
    assert {str(Path(target).parent) for target in targets} == {provider["options"]["path"]}
    (scrape,) = yaml.safe_load((DEPLOY / "monitoring/compose/prometheus.yml").read_text())["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["skyrl-tx:8000"]
    assert all(services[name]["networks"]["default"]["aliases"] == ["skyrl-tx"] for name in SERVERS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "monitoring/compose/prometheus.yml", tmp_path)
    shutil.copy(DEPLOY / "monitoring/alerts.json", tmp_path)
    command = ["promtool", "check", "config", "--syntax-only", tmp_path / "prometheus.yml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
