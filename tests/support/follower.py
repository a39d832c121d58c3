"""A host of rank 1 or above in a separate process.

    python -m tests.support.follower ADDRESS RANK SIZE LOST_FILE

While a file named LOST_FILE exists, its devices are lost. With TEST_FOLLOWER_LOSES=memory they are out of memory while
there is LOST_FILE.exhausted, see `exhausted_jax_device`.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_tx.backends.hosts import follower
from skyrl_tx.backends.hosts.follower import follow
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.testing.fake.backend import FakeBackend


@contextmanager
def follower_process(
    settings: HostsSettings, lost_file: Path, rank: int = 1, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a follower, and kill it at the end unless it has ended."""
    arguments = [str(settings.address), str(rank), str(settings.size), str(lost_file)]
    command = [sys.executable, "-m", "tests.support.follower", *arguments]
    process = subprocess.Popen(command, env={**os.environ, **(variables or {})})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> None:
    address, rank, size, lost_file = sys.argv[1:]
    logging.basicConfig(level=logging.INFO)
    FakeBackend.is_lost = property(lambda _: Path(lost_file).exists(), lambda *_: None)  # type: ignore[assignment]
    if "jax" in os.environ.get("TEST_FOLLOWER_LOSES", ""):
        _let_jax_programs_fail(Path(lost_file))
    if os.environ.get("TEST_FOLLOWER_LOSES") == "memory":
        from tests.support.exhausted_jax_device import exhaust_while

        exhaust_while(Path(f"{lost_file}.exhausted"))
    _accept_constants()
    settings = HostsSettings(address=address, rank=int(rank), size=int(size))
    follow(settings, on_ready=lambda _: None, on_lost=lambda _: os._exit(1))


def _accept_constants() -> None:
    """Let rank 0 of a test send constants of the JAX backend, as well as what an operator sets."""
    find = follower.find_backend

    def find_with_constants(name: str) -> BackendSpec:
        spec = find(name)
        return replace(spec, config=JaxConfig) if name == "jax" else spec

    follower.find_backend = find_with_constants


def _let_jax_programs_fail(lost_file: Path) -> None:
    from tests.support import lost_jax_device

    def call(program: Any, *arguments: Any, **named: Any) -> Any:
        return lost_jax_device.fail() if lost_file.exists() else program(*arguments, **named)

    for module, name in lost_jax_device.PROGRAMS:
        setattr(module, name, partial(call, getattr(module, name)))


if __name__ == "__main__":
    main()
