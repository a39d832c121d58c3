"""Rank 0 of two hosts that run out of memory. `test_hosts.py` runs it in a separate process.

    python -m tests.contract.exhausted_hosts DIRECTORY RANK

First both hosts run out of memory, then only the host with the given rank. Writes the observations
to `seen.json`.
"""

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from skyrl_tx.backends.hosts import leader
from skyrl_tx.backends.hosts.leader import LeadingBackend
from skyrl_tx.backends.hosts.protocol import Welcome
from skyrl_tx.backends.hosts.settings import HostsSettings
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import MeshConfig
from skyrl_tx.contract.backend import StatePart
from skyrl_tx.contract.errors import BackendLost
from skyrl_tx.testing.backend_driver import BackendDriver
from tests.support.exhausted_jax_device import exhaust_while
from tests.support.follower import follower_process
from tests.support.free_ports import free_ports
from tests.support.tiny import TINY_CONFIG, tiny_directory

LENGTHS = (30, 30, 20, 31)
CONFIG = TINY_CONFIG.model_copy(update={"mesh": MeshConfig(fsdp=2), "micro_batch_tokens": 128})


def main() -> None:
    directory, alone = Path(sys.argv[1]), int(sys.argv[2])
    files = [directory / "exhausted-0", directory / "lost.exhausted"]
    seen: dict[str, object] = {}

    def end(reason: str) -> NoReturn:
        (directory / "seen.json").write_text(json.dumps({**seen, "lost": reason}))
        os._exit(0)  # at a normal exit, JAX would wait for the other host

    leader.FAILURE_GRACE_S = 2.0
    settings = HostsSettings(size=2, address=f"127.0.0.1:{free_ports()}")
    model = str(tiny_directory(std=0.05))
    welcome = Welcome(backend="jax", base_model=model, config=CONFIG.model_dump_json().encode())
    backend = LeadingBackend(JaxBackend(model, CONFIG), settings, welcome, on_lost=end)
    exhaust_while(files[0])

    with follower_process(settings, directory / "lost", variables={"TEST_FOLLOWER_LOSES": "memory"}):
        driver = BackendDriver(backend, backend.start(), directory)
        models = [driver.model() for _ in range(2)]
        for file in files:
            file.write_text("64")

        seen["plans"] = plans = [backend.fingerprint_changes()["micro_batch_tokens"]]
        numbers: list[tuple[list[list[float]], dict[str, bytes]]] = []
        for model_id in models:  # the second model begins with the smaller plan
            results = backend.forward_backward(driver.batch(driver.request(model_id, LENGTHS)))
            gradient = driver.files_of(backend.capture(model_id, {StatePart.GRADIENT}))
            numbers.append(([result.logprobs.tolist() for result in results], gradient))
            plans.append(backend.fingerprint_changes()["micro_batch_tokens"])

        seen["are_equal"] = numbers[0] == numbers[1]
        files[1 - alone].unlink()
        files[alone].write_text("32")
        try:
            running = backend.begin_pass(driver.batch(driver.request(models[0], LENGTHS)), backward=True)
            while not running.step():
                pass
        except BackendLost as error:
            end(str(error))


if __name__ == "__main__":
    main()
