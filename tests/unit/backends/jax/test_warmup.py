"""After the warm-up, common requests compile nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_tx.backends.jax import start_plan
from tests.support.fast_jit import FAST_COMPILE_FLAGS
from tests.support.tiny import tiny_directory


def test_training_lengths_are_those_of_the_micro_batch_plan():
    assert list(start_plan.iter_training_lengths(64, 32)) == [64]
    assert list(start_plan.iter_training_lengths(128, 512)) == [64, 128, 256, 384, 512]


def run_script(name: str, *arguments: Path) -> Any:
    """Run a script of this directory with the tiny model, and return what it prints."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(name), tiny_directory(), *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        | {"XLA_FLAGS": FAST_COMPILE_FLAGS},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=1200,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up_and_its_model_is_deleted():
    assert run_script("warmup_script.py") == []


@pytest.mark.slow
def test_rl_on_an_accelerator_waits_for_no_compiler_and_a_restart_compiles_nothing(tmp_path: Path):
    first, second = (run_script("accelerator_script.py", tmp_path / "cache") for _ in range(2))
    assert first["kinds_queued_before_load"] == ["MicroBatchShape", "tuple"], (
        "of training and sampling, before the weights are loaded"
    )
    assert first["compiled_in_loop"] == second["compiled_in_loop"] == []
    assert second["num_from_cache"] == second["num_programs"] == first["num_programs"] > 30
