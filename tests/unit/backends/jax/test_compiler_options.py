"""XLA options that are set for a process."""

import os
import subprocess
import sys

import pytest

from skyrl_tx.backends.jax.compiler import configure_jax, set_cpu_options
from skyrl_tx.backends.jax.config import JaxConfig


def test_options_for_cpus_are_added_once_to_the_flags_of_the_user() -> None:
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    set_cpu_options(environment)
    flags = environment["XLA_FLAGS"].split()
    assert flags[0] == "--xla_force_host_platform_device_count=2"
    assert "xla_cpu_disable_loop_unrolling=1" in flags[1]
    set_cpu_options(environment)
    assert environment["XLA_FLAGS"].split() == flags


def test_options_of_the_same_flag_by_the_user_stay() -> None:
    environment = {"XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_optimize_for_size=1"}
    set_cpu_options(environment)
    assert environment == {"XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_optimize_for_size=1"}


def test_the_backend_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    configure_jax(JaxConfig(compile_cache_dir=None))
    assert "xla_cpu_disable_loop_unrolling=1" in os.environ["XLA_FLAGS"]


def test_xla_accepts_the_options_for_cpus() -> None:
    environment: dict[str, str] = {"JAX_PLATFORMS": "cpu"}
    set_cpu_options(environment)
    program = "import jax.numpy as jnp; print(float(jnp.arange(4.0).sum()))"
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("6.0\n", 0), run.stderr
