"""A process that finds the cache of another one compiles nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tx.testing.tiny_models import write_model

PROGRAM = Path(__file__).with_name("start_and_train.py")


def start_and_train(model: Path, cache: Path) -> tuple[int, int]:
    """Return how many programs a new process asked for, and how many of them it found."""
    done = subprocess.run([sys.executable, PROGRAM, model, cache], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    asked, found = map(int, done.stdout.split())
    return asked, found


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Neither in its warm-up, nor for what the first was asked beyond it."""
    model, cache = write_model(tmp_path / "model", num_layers=1), tmp_path / "cache"
    asked, found = start_and_train(model, cache)
    assert asked > 20 and found < asked
    assert start_and_train(model, cache) == (asked, asked)
