"""The server keeps its promises in simulated histories with faults; see `tests.support.simulation`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.simulation.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]


def simulate(*flags: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process, in which sets have a fixed order."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.simulation", *flags]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.parametrize(("histories", "seed"), [(100, 1), pytest.param(50, 101, marks=pytest.mark.slow)])
def test_every_history_keeps_the_promises(histories, seed):
    """A history takes about 0.1 s, mostly in SQLAlchemy."""
    done = simulate("--histories", str(histories), "--seed", str(seed))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{histories} histories" in done.stdout


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("histories", "seed"), [(500, 151), (1000, 10001)])
def test_many_other_histories_keep_the_promises(histories, seed):
    done = simulate("--histories", str(histories), "--seed", str(seed), "--jobs", "2", timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{histories} histories" in done.stdout


def get_digest(*flags: str) -> str:
    """Run histories and return the digest of their traces."""
    done = simulate(*flags)
    found = re.search(r"digest (\w+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return found[1]


@pytest.mark.slow
def test_equal_seeds_give_equal_histories_also_without_prepared_statements():
    flags = ("--histories", "8", "--most-violations", "8", "--seed")
    prepared, plain, other = get_digest(*flags, "300"), get_digest(*flags, "300", "--plain"), get_digest(*flags, "400")
    assert prepared == plain != other


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if index % 3 else ())
        for index, name in enumerate(sorted(MUTATIONS))
    ],
)
def test_guarantee_that_is_taken_out_is_missed(name):
    _, kinds = MUTATIONS[name]
    done = simulate("--histories", "1200", "--kinds", kinds, "--without", name, "--most-violations", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "VIOLATION" in done.stdout
