"""Limits, clock and proxies."""

import os
import resource
import time
from pathlib import Path

import pytest

from skyrl_tx.tools.doctor import machine
from skyrl_tx.tools.doctor.findings import worst


def limits(monkeypatch: pytest.MonkeyPatch, **given: int) -> None:
    """Set the limits of this process as the checks see them; all others are infinite."""
    found = {getattr(resource, name): value for name, value in given.items()}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (found.get(which, resource.RLIM_INFINITY),) * 2)
    monkeypatch.setattr(machine, "_CGROUP", Path("/nowhere"))


def test_no_limit_is_fine(subject, monkeypatch) -> None:
    limits(monkeypatch)
    assert worst(machine.check_limits(subject())) == "ok"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"RLIMIT_NOFILE": 4096}, "at most 4096 open files"),
        ({"RLIMIT_NPROC": 100}, "at most 100 processes"),
        ({"RLIMIT_AS": 2**33}, "limited to 8.0 GiB"),
    ],
)
def test_low_limits_are_named(subject, monkeypatch, given: dict[str, int], text: str) -> None:
    limits(monkeypatch, **given)
    (found,) = [finding for finding in machine.check_limits(subject()) if finding.level == "warning"]
    assert text in found.message and found.advice


def test_memory_of_a_container_is_found(subject, monkeypatch, tmp_path) -> None:
    limits(monkeypatch)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory_limit() is None
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_limit() is None
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    assert machine.memory_limit() == 2**20
    assert "1.0 MiB for this container" in "".join(finding.message for finding in machine.check_limits(subject()))


@pytest.mark.parametrize(("state", "level"), [(0, "ok"), (5, "warning"), (-1, "ok")])
def test_clock_is_judged_by_the_kernel(subject, monkeypatch, state: int, level: str) -> None:
    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            self.adjtimex = lambda _: state

    monkeypatch.setattr(machine.ctypes, "CDLL", Library)
    (found,) = machine.check_clock(subject())
    assert found.level == level


def test_a_clock_behind_the_database_is_found(subject, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    database = tmp_path / "data" / "skyrl_tx.db"
    database.touch()
    assert "behind" not in "".join(each.message for each in machine.check_clock(subject()))
    os.utime(database, (time.time() + 7200,) * 2)
    found = next(iter(machine.check_clock(subject())))
    assert found.level == "warning" and "2.0 h behind" in found.message


def test_a_proxy_for_the_own_address_is_found(subject, monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert list(machine.check_proxies(subject())) == []
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    (found,) = machine.check_proxies(subject("--host", "0.0.0.0"))
    assert found.level == "warning" and "https_proxy" in found.message and "127.0.0.1" in found.advice
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert list(machine.check_proxies(subject())) == []
