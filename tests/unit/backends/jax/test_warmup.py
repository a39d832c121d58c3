"""After the warm-up, common requests compile nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tx.backends.jax import start_plan
from tests.support.fast_jit import FAST_COMPILE_FLAGS
from tests.support.tiny import tiny_directory


def test_training_lengths_are_those_of_the_micro_batch_plan():
    assert list(start_plan.iter_training_lengths(64, 32)) == [64]
    assert list(start_plan.iter_training_lengths(128, 512)) == [64, 128, 256, 384, 512]


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up_and_its_model_is_deleted():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("warmup_script.py"), tiny_directory()],
        env=os.environ | {"XLA_FLAGS": FAST_COMPILE_FLAGS},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
