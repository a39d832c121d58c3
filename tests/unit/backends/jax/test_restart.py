"""A process that does what another did before it finds every program in the cache on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tx.testing.tiny_models import write_model


def programs_of_a_process(model: Path, cache: Path) -> tuple[int, int]:
    """How many programs it needed, and how many of them it found."""
    script = Path(__file__).parent / "first_work.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, script, model, cache], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    said = json.loads(done.stdout.splitlines()[-1])
    return said["programs"], said["found"]


@pytest.mark.slow
def test_a_restarted_backend_compiles_nothing(tmp_path):
    model, cache = write_model(tmp_path / "model", num_layers=1), tmp_path / "cache"
    programs, _ = programs_of_a_process(model, cache)
    assert programs > 20
    assert programs_of_a_process(model, cache) == (programs, programs)
