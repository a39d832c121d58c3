"""The server keeps its promises in simulated histories with faults, see `tests.support.simulation`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.simulation.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
HISTORIES = 100
"""In each of four parts. A history takes 0.1 s or more, nearly all of it in SQLAlchemy."""


def simulate(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, in which sets have a fixed order."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.simulation", *flags]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("part", range(4))
def test_every_history_keeps_the_promises(part):
    done = simulate("--histories", str(HISTORIES), "--seed", str(1 + part * HISTORIES))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{HISTORIES} histories" in done.stdout


@pytest.mark.slow
def test_two_thousand_histories_keep_the_promises():
    done = simulate("--histories", "2000", "--seed", "10001", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2000 histories" in done.stdout


def test_equal_seeds_give_equal_histories():
    flags = ("--histories", "10", "--seed", "300", "--most-violations", "10")
    first, second = simulate(*flags), simulate(*flags)
    digest = re.search(r"digest (\w+)", first.stdout)
    assert digest is not None, first.stdout + first.stderr
    assert digest[0] in second.stdout
    other = simulate("--histories", "10", "--seed", "400", "--most-violations", "10")
    assert digest[0] not in other.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MUTATIONS))
def test_guarantee_that_is_taken_out_is_missed(name):
    _, kinds = MUTATIONS[name]
    done = simulate("--histories", "300", "--kinds", kinds, "--without", name, "--most-violations", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION" in done.stdout
