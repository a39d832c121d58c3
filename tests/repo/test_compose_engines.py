"""deploy/compose.engines.yaml on top of compose.yaml, as Docker Compose reads it."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.tools.serve import read_settings
from tests.support.client_environments import DEPLOYMENT, ClientEnvironment, PreparedEnvironment
from tests.support.compose import DEPLOY, ComposeRefused, read_file, read_project
from tests.support.deployment_variables import check_variables

FILES = ("compose.yaml", "compose.engines.yaml")
PASSWORDS = {"POSTGRES_PASSWORD": "of-postgres", "MINIO_ROOT_PASSWORD": "of-minio"}
STARTED = {"server", "engine-1", "engine-2", "postgres", "minio", "bucket"}
ENGINES = ("engine-1", "engine-2", "engine-1-gpu", "engine-2-gpu")
OURS = ("server", *ENGINES, "cli")


@pytest.fixture(scope="module")
def environment(client_environment: Callable[[ClientEnvironment], PreparedEnvironment]) -> PreparedEnvironment:
    return client_environment(DEPLOYMENT)


@pytest.fixture(scope="module")
def services(environment: PreparedEnvironment) -> dict[str, Any]:
    """The services of all profiles."""
    return read_project(environment, FILES, profiles=("gpu", "commands"), variables=PASSWORDS)["services"]


def test_it_has_no_passwords_and_its_variables_are_explained() -> None:
    text = (DEPLOY / FILES[1]).read_text()
    assert read_file(FILES[1])["services"].keys() == STARTED | set(ENGINES) | {"cli"}
    assert re.findall(r"PASSWORD: (?!\$\{\w+:\?)", text) == []
    described = (DEPLOY / "compose.env").read_text()
    used = set(re.findall(r"\$\{(\w+)", text)) - {"SKYRL_TX_IMAGE_TAG"}
    assert {name for name in used if f"{name}=" not in described} == set()
    assert f"COMPOSE_FILE={':'.join(FILES)}" in described


@pytest.mark.slow
def test_it_starts_an_api_two_engines_and_what_they_need(environment: PreparedEnvironment, tmp_path: Path) -> None:
    project = read_project(environment, FILES, variables=PASSWORDS)
    assert project["services"].keys() == STARTED
    assert {"data", "cache", "postgres", "minio"} <= project["volumes"].keys()
    (tmp_path / "merged.json").write_text(json.dumps(project))
    program = environment.python.with_name("check-jsonschema")
    command = [program, "--builtin-schema", "vendor.compose-spec", tmp_path / "merged.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("missing", PASSWORDS)
def test_a_missing_password_is_named(environment: PreparedEnvironment, missing: str) -> None:
    with pytest.raises(ComposeRefused, match=f"set {missing} in .env"):
        read_project(environment, FILES, variables={k: v for k, v in PASSWORDS.items() if k != missing})


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_our_containers_share_database_and_weights_and_are_confined(
    services: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = services[name]
    variables = {key: value for key, value in service["environment"].items() if value is not None}
    check_variables(variables)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    program, *command = service["entrypoint"]
    assert program == "skyrl-tx" and (name == "cli") == (not command)

    settings = read_settings((command or ["doctor"])[0], [*command[1:], *(service["command"] or ["--base-model=x"])])
    assert settings.store_url == "postgresql://skyrl@postgres/skyrl_tx" and variables["PGPASSWORD"] == "of-postgres"
    assert settings.artifacts == "s3://skyrl-tx/weights" and variables["AWS_SECRET_ACCESS_KEY"] == "of-minio"
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
    assert {volume["target"] for volume in service["volumes"]} == {"/data", "/cache"}
    conditions = {needed: how["condition"] for needed, how in service["depends_on"].items()}
    assert conditions == {"postgres": "service_healthy", "bucket": "service_completed_successfully"}
    assert all(how["required"] for how in service["depends_on"].values())


@pytest.mark.slow
def test_engines_join_others_and_differ_in_name_and_device_only(services: dict[str, Any]) -> None:
    for name in ENGINES:
        command = services[name]["entrypoint"][1:]
        assert read_settings(command[0], [*command[1:], *services[name]["command"]]).engines > 1
        assert services[name]["healthcheck"]["test"] == ["CMD", "skyrl-tx", "status", "--here"]
        assert services[name]["stop_grace_period"] == services["server"]["stop_grace_period"] == "1m0s"
        assert services[name]["restart"] == "unless-stopped" and "ports" not in services[name]
    apart = [{k: v for k, v in services[n].items() if k not in ("hostname", "profiles", "deploy")} for n in ENGINES]
    assert all(service == apart[0] for service in apart)
    assert [services[name]["hostname"] for name in ENGINES] == ["engine-1", "engine-2"] * 2

    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"] for name in ENGINES[2:]]
    assert [device["device_ids"] for (device,) in devices] == [["0"], ["1"]]
    assert [services[name].get("profiles") for name in ENGINES] == [None, None, ["gpu"], ["gpu"]]


@pytest.mark.slow
def test_the_bucket_is_made_before_it_is_used(services: dict[str, Any]) -> None:
    minio, bucket = services["minio"], services["bucket"]
    assert bucket["depends_on"]["minio"]["condition"] == "service_healthy" and minio["healthcheck"]["test"]
    assert "restart" not in bucket and "skyrl-tx" in bucket["command"][0]
    assert minio["image"] == bucket["image"] and "ports" not in minio
    assert minio["environment"]["MINIO_ROOT_USER"] == services["server"]["environment"]["AWS_ACCESS_KEY_ID"]
    assert minio["environment"]["MINIO_ROOT_PASSWORD"] == "of-minio"
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD"] == "of-postgres"
    for service in services.values():
        assert re.search(r":[\w.-]*\d[\w.-]*$|:local$", service["image"]), f"{service['image']} is not of one version"
