"""The Helm chart: its values, and the resources that it renders."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyrl_tx import __version__
from skyrl_tx.launch.settings import ServerSettings
from skyrl_tx.tools.serve import read_settings
from tests.support.client_environments import DEPLOYMENT, ClientEnvironment, PreparedEnvironment
from tests.support.deployment_variables import check_variables
from tests.support.helm import Helm

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "skyrl-tx"
Resource = dict[str, Any]
API = (
    *("api.replicas=2", "database.existingSecret=pg", "persistence.accessModes={ReadWriteMany}"),
    *("tls.existingSecret=certificate", "hub.token=secret", "metrics.serviceMonitor.enabled=true"),
    *("metrics.serviceMonitor.keySecret=scrape", "config.max_request_bytes=268435456", "service.port=80"),
)
GPU = (
    *("resources.limits.nvidia\\.com/gpu=1", "runtimeClassName=nvidia", "cache.isEphemeral=true", "firstKeyOwner="),
    *("persistence.existingClaim=mine", "database.url=postgresql://h/d", "config.no_auth=true"),
)
SHARED = ("database.existingSecret=pg", "config.artifacts=s3://weights/prod", "env[0].name=AWS_REGION")
ENGINES = (
    *SHARED,
    "engines.replicas=3",
    "api.replicas=1",
    "resources.limits.nvidia\\.com/gpu=1",
    "nodeSelector.gpu=h100",
)
HOSTS = (*SHARED, "engines.replicas=2", "hosts.size=4", "hosts.existingSecret=group", "cache.existingClaim=models")
CASES = pytest.mark.parametrize(
    "given", [(), API, GPU, ENGINES, HOSTS], ids=["default", "api", "gpu", "engines", "hosts"]
)


def read_values() -> dict[str, Any]:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def read_schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(scope="module")
def environment(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> PreparedEnvironment:
    return client_environment(DEPLOYMENT)


@pytest.fixture(scope="module")
def helm(environment: PreparedEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(environment, tmp_path_factory.mktemp("helm"))


def render(helm: Helm, given: Sequence[str] = ()) -> Mapping[tuple[str, str], Resource]:
    """Render the chart and return the resources by kind and name."""
    flags = [flag for value in given for flag in ("--set", value)]
    done = helm.run("template", "prod", CHART, "--namespace", "train", *flags)
    assert done.returncode == 0, done.stderr
    found = [resource for resource in yaml.safe_load_all(done.stdout) if resource]
    by_name = {(resource["kind"], resource["metadata"]["name"]): resource for resource in found}
    assert len(by_name) == len(found)
    return by_name


def list_pods(resources: Mapping[tuple[str, str], Resource]) -> list[Resource]:
    found: list[Resource] = []
    for (kind, _), resource in resources.items():
        if kind in ("StatefulSet", "Deployment"):
            found.append(resource["spec"]["template"]["spec"])
        elif kind == "LeaderWorkerSet":
            group = resource["spec"]["leaderWorkerTemplate"]
            found += [group[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]
    return found


def list_containers(pod: Resource) -> list[Resource]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_value_has_a_schema_and_the_other_way_round() -> None:
    def compare(given: dict[str, Any], described: dict[str, Any], path: str) -> None:
        assert described["additionalProperties"] is False, path
        assert given.keys() == described["properties"].keys() - {"global"}, path
        for name, below in given.items():
            if isinstance(below, dict) and "properties" in described["properties"][name] and name != "config":
                compare(below, described["properties"][name], f"{path}.{name}")

    compare(read_values(), read_schema(), "values")


def test_the_chart_is_of_this_release() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_settings_of_the_chart_are_settings_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(read_values()["config"]))
    assert read_settings("serve", ["--config", str(tmp_path / "config.yaml")]).log_format == "json"
    refused = {name for name, rule in read_schema()["properties"]["config"]["properties"].items() if rule is False}
    assert refused <= set(ServerSettings.model_fields)


@pytest.mark.slow
def test_helm_finds_no_fault(helm: Helm) -> None:
    done = helm.run("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@CASES
def test_resources_are_valid(helm: Helm, environment: PreparedEnvironment, given: tuple[str, ...], tmp_path) -> None:
    checked = 0
    for (kind, name), resource in render(helm, given).items():
        if kind in ("ServiceMonitor", "PodMonitor", "LeaderWorkerSet"):
            continue  # not part of Kubernetes itself
        file = tmp_path / f"{kind}-{name}.yaml"
        file.write_text(yaml.safe_dump(resource))
        command = [environment.python.with_name("kubernetes-validate"), "--strict", "-k", "1.30", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        checked += 1
    assert checked >= 5


@pytest.mark.slow
@CASES
def test_containers_are_confined_and_configured(
    helm: Helm, given: tuple[str, ...], tmp_path: Path, monkeypatch
) -> None:
    resources = render(helm, given)
    config = resources["ConfigMap", "prod-skyrl-tx"]["data"]["config.yaml"]
    (tmp_path / "config.yaml").write_text(config)

    for pod in list_pods(resources):
        assert pod["securityContext"]["runAsNonRoot"] and pod["terminationGracePeriodSeconds"] == 60
        assert pod["enableServiceLinks"] is False, "SKYRL_TX_PORT of a Service would be taken for --port"
        volumes = {volume["name"] for volume in pod["volumes"]} | {
            claim["metadata"]["name"]
            for (kind, _), resource in resources.items()
            if kind == "StatefulSet" and resource["spec"]["template"]["spec"] is pod
            for claim in resource["spec"].get("volumeClaimTemplates", ())
        }

        for container in list_containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            variables = {variable["name"]: variable.get("value", "") for variable in container["env"]}
            check_variables(variables)
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
        settings = read_settings("serve", ["--config", str(tmp_path / "config.yaml")])
        assert settings.data_dir == Path("/data/skyrl_tx")
        assert (settings.ssl_certfile is not None) == (given is API)

    assert settings.max_request_bytes == 268435456, "no 2.68435456e+08"


@pytest.mark.slow
def test_probes_and_monitoring(helm: Helm) -> None:
    (pod,) = list_pods(render(helm))
    (server,) = pod["containers"]
    paths = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {
        "startupProbe": "/api/v1/healthz",
        "livenessProbe": "/api/v1/livez",
        "readinessProbe": "/api/v1/livez",
    }
    assert server["startupProbe"]["failureThreshold"] * server["startupProbe"]["periodSeconds"] == 3600

    resources = render(helm, API)
    monitor = resources["ServiceMonitor", "prod-skyrl-tx"]["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    scraped = [
        resource
        for (kind, _), resource in resources.items()
        if kind == "Service" and wanted <= resource["metadata"]["labels"].items()
    ]
    assert [resource["metadata"]["name"] for resource in scraped] == ["prod-skyrl-tx"], "each pod is scraped once"

    selector = scraped[0]["spec"]["selector"].items()
    for kind, name in (("StatefulSet", "prod-skyrl-tx"), ("Deployment", "prod-skyrl-tx-api")):
        assert selector <= resources[kind, name]["spec"]["template"]["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["scheme"] == "https"
    (claim,) = [volume for volume in list_pods(resources)[0]["volumes"] if volume["name"] == "data"]
    assert claim["persistentVolumeClaim"]["claimName"] == "data-prod-skyrl-tx-0"


def get_flags(container: Resource) -> Sequence[str]:
    """Return the flags of an engine except its settings file, which does not exist here."""
    program, command, *flags = container["command"]
    assert (program, command) == ("skyrl-tx", "engine")
    return [flag for flag in flags if not flag.startswith("--config=")]


@pytest.mark.slow
def test_engines_are_pods_of_their_own_that_are_replaced_one_at_a_time(helm: Helm) -> None:
    resources = render(helm, ENGINES)
    engines = resources["StatefulSet", "prod-skyrl-tx-engine"]["spec"]
    assert engines["replicas"] == 3 and engines["updateStrategy"] == {"type": "RollingUpdate"}
    (engine,) = engines["template"]["spec"]["containers"]
    assert read_settings("engine", ["--base-model", "m", *get_flags(engine)]).engines > 1
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert engine["startupProbe"]["exec"]["command"] == ["skyrl-tx", "status", "--here"], "the next waits for it"
    assert {volume["name"]: volume.get("emptyDir") for volume in engines["template"]["spec"]["volumes"]}["data"] == {}

    for kind, name in (("StatefulSet", "prod-skyrl-tx"), ("Deployment", "prod-skyrl-tx-api")):
        pod = resources[kind, name]["spec"]["template"]["spec"]
        assert "nodeSelector" not in pod and "resources" not in pod["containers"][0], "GPUs are for engines"
        assert pod["containers"][0]["command"][:2] == ["skyrl-tx", "api"]
    monitored = render(helm, (*ENGINES, "metrics.serviceMonitor.enabled=true"))
    (endpoint,) = monitored["ServiceMonitor", "prod-skyrl-tx"]["spec"]["endpoints"]
    assert endpoint["metricRelabelings"][0]["regex"] == "skyrl_tx_engine_up;(api|server)", "no pod has both"

    scraped = monitored["StatefulSet", "prod-skyrl-tx-engine"]["spec"]["template"]
    (engine,) = scraped["spec"]["containers"]
    assert engine["ports"] == [{"name": "metrics", "containerPort": 9100}]

    settings = read_settings("engine", ["--base-model", "m", *get_flags(engine)])
    assert (settings.metrics_host, settings.metrics_port) == ("0.0.0.0", 9100)
    pod_monitor = monitored["PodMonitor", "prod-skyrl-tx-engine"]["spec"]
    assert pod_monitor["selector"]["matchLabels"].items() <= scraped["metadata"]["labels"].items()
    assert pod_monitor["podMetricsEndpoints"][0]["port"] == "metrics"
    labels = engines["template"]["metadata"]["labels"].items()
    assert engines["selector"]["matchLabels"].items() <= labels
    for (kind, _), resource in resources.items():
        assert kind != "Service" or not resource["spec"]["selector"].items() <= labels, "engines serve no HTTP"


@pytest.mark.slow
def test_groups_of_hosts_are_engines(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = render(helm, HOSTS)
    assert ("StatefulSet", "prod-skyrl-tx-engine") not in resources
    groups = resources["LeaderWorkerSet", "prod-skyrl-tx-engine"]["spec"]
    assert groups["replicas"] == 2 and groups["leaderWorkerTemplate"]["size"] == 4
    assert groups["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}

    names = "leaderTemplate", "workerTemplate"
    leader, worker = (groups["leaderWorkerTemplate"][name]["spec"]["containers"][0] for name in names)
    assert "startupProbe" in leader and "startupProbe" not in worker, "only the leader has an engine"
    assert {**leader, "startupProbe": None} == {**worker, "startupProbe": None}
    (key,) = (
        variable["valueFrom"]["secretKeyRef"] for variable in leader["env"] if variable["name"] == "SKYRL_TX_HOSTS__KEY"
    )
    assert key == {"name": "group", "key": "key"}

    monkeypatch.setenv("SKYRL_TX_HOSTS__KEY", "secret")
    given = {"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3", "LWS_LEADER_ADDRESS": "prod-engine-0.prod-engine"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    hosts = read_settings("engine", ["--base-model", "m", *get_flags(worker)]).host_settings
    assert (hosts.size, hosts.rank, hosts.address) == (4, 3, "prod-engine-0.prod-engine:7700")
    assert hosts.key_bytes == b"secret"


@pytest.mark.slow
def test_secrets_are_made_of_given_values_only(helm: Helm) -> None:
    assert not any(kind == "Secret" for kind, _ in render(helm))
    assert render(helm, API)["Secret", "prod-skyrl-tx"]["stringData"] == {"hub-token": "secret"}
    assert render(helm, GPU)["Secret", "prod-skyrl-tx"]["stringData"] == {"database-url": "postgresql://h/d"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (("api.replicas=1",), "api.replicas needs PostgreSQL"),
        (("api.replicas=1", "database.existingSecret=pg"), "ReadWriteMany"),
        (("engines.replicas=2",), "engines.replicas needs PostgreSQL"),
        (("engines.replicas=2", "database.url=x"), "engines.replicas needs an object store"),
        ((*SHARED, "engines.replicas=2", "config.engines=2"), "set one of them"),
        (("hosts.size=2",), "hosts.size above 1 needs engines.replicas"),
        ((*SHARED, "engines.replicas=1", "hosts.size=2"), "hosts.size above 1 needs hosts.existingSecret"),
        (("config.launcher=lws",), "launcher"),
        (("config.port=1",), "config"),
        (("no_such_value=1",), "no_such_value"),
        (("terminationGracePeriodSeconds=10",), "terminationGracePeriodSeconds"),
    ],
)
def test_wrong_values_are_refused(helm: Helm, given: tuple[str, ...], text: str) -> None:
    done = helm.run("template", "prod", CHART, *(flag for value in given for flag in ("--set", value)))
    assert done.returncode != 0 and text in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("given", [ENGINES, HOSTS], ids=["engines", "hosts"])
def test_scaling_the_engines_changes_no_pod(helm: Helm, given: tuple[str, ...]) -> None:
    rendered = [list_pods(render(helm, (*given, f"engines.replicas={number}"))) for number in (1, 2, 5)]
    assert rendered[0] == rendered[1] == rendered[2]


@pytest.mark.slow
def test_the_first_key_is_made_once_and_printed_in_no_log(helm: Helm, tmp_path: Path, monkeypatch) -> None:
    """Runs the container's command with a directory instead of the volume."""
    (pod,) = list_pods(render(helm))
    (container,) = pod["initContainers"]
    program, *arguments = [
        argument.replace("/data/", f"{tmp_path}/") for argument in (*container["command"], *container["args"])
    ]
    assert program == "skyrl-tx"
    monkeypatch.setenv("SKYRL_TX_DATA_DIR", str(tmp_path / "skyrl_tx"))
    keys: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "skyrl_tx", *arguments], capture_output=True, text=True, check=True
        )
        keys.append((tmp_path / "first-key").read_text().strip())
        assert keys[0] not in done.stdout + done.stderr

    assert keys[0].startswith("tml-") and keys[0] == keys[1]
    assert (tmp_path / "first-key").stat().st_mode & 0o777 == 0o600
    listed = subprocess.run(["python", "-m", "skyrl_tx", "keys", "list"], capture_output=True, text=True, check=True)
    assert listed.stdout.count("admin") == 1
