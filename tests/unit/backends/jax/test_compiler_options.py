"""XLA options that are set for a process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_tx.backends.jax.compiler import configure_jax, set_cpu_options
from skyrl_tx.backends.jax.config import JaxConfig
from tests.support.denied import obey_modes


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


@pytest.mark.parametrize("name", ["file", "file/below", "read-only", "read-only/below"])
def test_a_cache_that_cannot_be_written_is_left_out(tmp_path: Path, name: str, caplog) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir(mode=0o500)
    with obey_modes():
        configured = configure_jax(JaxConfig(compile_cache_dir=tmp_path / name))
    assert configured.compile_cache_dir is None
    culprit, reason = tmp_path / Path(name).parts[0], "is a file, not a directory|has mode 0500: change its mode"
    assert re.search(rf"no compile cache: {tmp_path / name}: .*({reason}); all programs", caplog.text)
    assert str(culprit) in caplog.text


def test_xla_accepts_the_options_for_cpus() -> None:
    environment: dict[str, str] = {"JAX_PLATFORMS": "cpu"}
    set_cpu_options(environment)
    program = "import jax.numpy as jnp; print(float(jnp.arange(4.0).sum()))"
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (run.stdout, run.returncode) == ("6.0\n", 0), run.stderr
