"""Checks of package versions, process limits and memory."""

import resource

import pytest
from packaging.version import Version

from skyrl_tx.tools.doctor import machine
from skyrl_tx.tools.doctor.findings import Finding, get_worst_level
from tests.support.client_environments import SDKS


def problems(subject) -> list[Finding]:
    return [finding for finding in machine.check_packages(subject) if finding.level != "ok"]


def replace(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    present = machine.version

    def find(name: str) -> str:
        given = versions.get(name.replace("-", "_"), present)
        if given is None:
            raise machine.PackageNotFoundError(name)
        return present(name) if given is present else given

    monkeypatch.setattr(machine, "version", find)


def test_this_environment_is_fine(subject) -> None:
    assert problems(subject()) == []


@pytest.mark.parametrize(
    ("versions", "level", "text"),
    [
        ({"jax": "0.4.1"}, "error", "jax 0.4.1 is installed, but jax>="),
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
    assert Version(machine.OLDEST_SDK) == min(map(Version, SDKS))


def limits(monkeypatch: pytest.MonkeyPatch, **given: int) -> None:
    """Set the process limits that the checks see. All other limits are infinite."""
    found = {getattr(resource, name): value for name, value in given.items()}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (found.get(which, resource.RLIM_INFINITY),) * 2)


def test_no_limit_is_fine(subject, monkeypatch) -> None:
    limits(monkeypatch)
    assert get_worst_level(machine.check_limits(subject())) == "ok"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"RLIMIT_NOFILE": 4096}, "at most 4096 files can be open"),
        ({"RLIMIT_NPROC": 100}, "at most 100 processes"),
        ({"RLIMIT_AS": 2**33}, "limited to 8.0 GiB"),
    ],
)
def test_low_limits_are_named(subject, monkeypatch, given: dict[str, int], text: str) -> None:
    limits(monkeypatch, **given)
    (found,) = [finding for finding in machine.check_limits(subject()) if finding.level == "warning"]
    assert text in found.message and found.advice


def test_memory_of_a_container_is_found(subject, monkeypatch) -> None:
    limits(monkeypatch)
    monkeypatch.setattr(machine, "get_memory_limit", lambda: 2**20)
    assert "1.0 MiB of memory for this container" in "".join(
        finding.message for finding in machine.check_limits(subject())
    )
