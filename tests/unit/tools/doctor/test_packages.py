"""Versions of packages."""

import pytest
from packaging.version import Version

from skyrl_tx.tools.doctor import packages
from skyrl_tx.tools.doctor.findings import Finding
from tests.support.client_environments import SDKS


def problems(subject) -> list[Finding]:
    return [finding for finding in packages.check_packages(subject) if finding.level != "ok"]


def replace(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    present = packages.version

    def find(name: str) -> str:
        given = versions.get(name.replace("-", "_"), present)
        if given is None:
            raise packages.PackageNotFoundError(name)
        return present(name) if given is present else given

    monkeypatch.setattr(packages, "version", find)


def test_this_environment_is_fine(subject) -> None:
    assert problems(subject()) == []


@pytest.mark.parametrize(
    ("versions", "level", "text"),
    [
        ({"jax": "0.4.1"}, "error", "jax 0.4.1 is installed, needed is jax>="),
        ({"uvicorn": None}, "error", "uvicorn is not installed"),
        ({"skyrl_tx_server": None}, "error", "skyrl-tx-server is not installed"),
        ({"tinker": "0.1.0"}, "warning", "tinker 0.1.0 is older"),
        ({"jaxlib": "0.10.2", "jax_cuda12_plugin": "0.9.0"}, "error", "jax-cuda12-plugin 0.9.0"),
    ],
)
def test_unsuitable_versions_are_found(subject, monkeypatch, versions, level: str, text: str) -> None:
    replace(monkeypatch, **versions)
    (found,) = problems(subject())
    assert found.level == level and text in found.message and found.advice


def test_driver_of_postgresql_is_needed_for_it_only(subject, monkeypatch) -> None:
    replace(monkeypatch, psycopg=None)
    assert problems(subject()) == []
    (found,) = problems(subject("--database-url", "postgresql://h/d"))
    assert found.level == "error" and "psycopg" in found.message


def test_the_oldest_sdk_is_the_oldest_tested_one() -> None:
    assert Version(packages.OLDEST_SDK) == min(map(Version, SDKS))
