"""What the engine says of itself, about once a second, while its own thread is busy."""

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError, StoreUnreachable
from skyrl_tx.store.tables import EngineStatus

_log = logging.getLogger(__name__)
_PERIOD_S = 1.0


class StatePublisher:
    """A thread that repeats the last word."""

    def __init__(self, store: Store, base_models: list[str]) -> None:
        self._store = store
        self._base_models = base_models
        self._boot_id = secrets.token_hex(8)
        self._status: EngineStatus = "starting"
        self._capabilities: Mapping[str, object] = {}
        self.load: engine_state.SampleLoad | None = None
        """To be said with the next word."""
        self._failure: StoreUnreachable | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="engine-state", daemon=True)

    def start(self) -> None:
        """Say "starting", and go on."""
        self._publish()
        self._thread.start()

    def say(self, status: EngineStatus, capabilities: Capabilities) -> None:
        """Say something new, at once."""
        self._status, self._capabilities = status, summary(capabilities)
        self._publish()

    def close(self) -> None:
        """Fall silent."""
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise StoreUnreachable once the database was: this process cannot write any more."""
        if self._failure is not None:
            raise self._failure

    def _repeat(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                self._publish()
            except StoreUnreachable as error:
                self._failure = error
                self._store.wake()
                return
            except StoreError as error:
                _log.error("the engine's state cannot be written; trying again: %s", error)

    def _publish(self) -> None:
        status, capabilities = self._status, self._capabilities
        self._store.write(
            lambda tx: engine_state.publish(
                tx,
                boot_id=self._boot_id,
                pid=os.getpid(),
                status=status,
                capabilities=capabilities,
                base_models=self._base_models,
                load=self.load,
                now=time.time(),
            )
        )


def summary(capabilities: Capabilities) -> Mapping[str, object]:
    """The part of the capabilities that clients and operators see, as JSON."""
    return {
        "max_context_length": capabilities.max_context_length,
        "vocab_size": capabilities.vocab_size,
        "max_lora_rank": capabilities.max_lora_rank,
        "max_models": capabilities.max_models,
        "devices": list(capabilities.devices),
        "num_parameters": capabilities.num_parameters,
        "losses": sorted(capabilities.losses),
    }
