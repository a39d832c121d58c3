"""What importing a room must not cost."""

import subprocess
import sys

import pytest

HEAVY = ("jax", "flax", "optax", "torch", "transformers")


@pytest.mark.parametrize(
    "module",
    [
        "skyrl_tx.api.app",
        "skyrl_tx.backends.registry",
        "skyrl_tx.backends.jax",
        "skyrl_tx.cli",
        "skyrl_tx.contract.backend",
        "skyrl_tx.store.database",
        "skyrl_tx.supervisor",
    ],
)
def test_importing_a_room_loads_no_device_library(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []
