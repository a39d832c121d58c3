"""After a restart, every program is read from the compilation cache on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fast_jit import FAST_COMPILE_FLAGS
from tests.support.tiny import tiny_directory


def count_programs(model: Path, cache: Path) -> tuple[int, int]:
    """Return how many programs a process needed, and how many of them it found in the cache."""
    script = Path(__file__).parent / "restart_script.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment["XLA_FLAGS"] = FAST_COMPILE_FLAGS
    done = subprocess.run(
        [sys.executable, script, model, cache], env=environment, check=True, capture_output=True, text=True, timeout=300
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    return counts["programs"], counts["found"]


@pytest.mark.slow
def test_a_restarted_backend_compiles_nothing(tmp_path):
    cache = tmp_path / "cache"
    programs, _ = count_programs(tiny_directory(), cache)
    assert programs > 20
    assert count_programs(tiny_directory(), cache) == (programs, programs)
