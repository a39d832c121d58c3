"""Publishes the engine's status and the activity of its loop every second, on a thread of its own."""

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sqlmodel import Session

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.engine.watchdog import Watchdog
from skyrl_tx.process.threads import ServiceThread
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError, StoreUnreachable
from skyrl_tx.store.pauses import Pause
from skyrl_tx.store.tables import EngineStateRow, EngineStatus

_log = logging.getLogger(__name__)
_PERIOD_S = 1.0


class StatusPublisher:
    """Writes the engine's current status to the database: at once when it changes, and every second."""

    def __init__(self, store: Store, boot_id: str, base_models: list[str], watchdog: Watchdog) -> None:
        self._store = store
        self._watchdog = watchdog
        self._base_models = base_models
        self._boot_id = boot_id
        self._status: EngineStatus = "starting"
        self._capabilities: Mapping[str, object] = {}
        self.sample_load: engine_state.SampleLoad | None = None
        """Published with the next status."""
        self.meters: Mapping[str, object] | None = None
        """Published with the next status."""
        self.pauses: Sequence[Pause] = ()
        """Published with the next status."""
        self._failure: StoreUnreachable | None = None
        self._ended = threading.Event()
        self._thread = ServiceThread("engine-status", self._repeat)

    def start(self) -> None:
        """Publish "starting", and go on publishing."""
        self._publish()
        self._thread.start()

    def set_status(self, status: EngineStatus, capabilities: Capabilities) -> None:
        """Change the status and publish it at once, with the capabilities that clients and operators see."""
        self._status = status
        self._capabilities = {
            "max_context_length": capabilities.max_context_length,
            "vocab_size": capabilities.vocab_size,
            "max_lora_rank": capabilities.max_lora_rank,
            "max_models": capabilities.max_models,
            "devices": list(capabilities.devices),
            "num_parameters": capabilities.num_parameters,
            "losses": sorted(capabilities.losses),
            "custom_losses": capabilities.offers_custom_losses,
            "eos_token_ids": list(capabilities.eos_token_ids),
            "max_topk_logprobs": capabilities.max_topk_logprobs,
            "fingerprint": dict(capabilities.fingerprint),
            "base_model_hash": capabilities.base_model_hash,
        }
        self._publish()

    def close(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise StoreUnreachable if the database was lost: this process cannot write any more."""
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
                _log.error("cannot write the engine's status; retrying: %s", error)

    def _publish(self) -> None:
        status, capabilities, load, meters = self._status, self._capabilities, self.sample_load, self.meters
        pauses, activity, detail = self.pauses, self._watchdog.describe_activity(), self._watchdog.overdue

        def work(tx: Session) -> None:
            now = engine_state.get_shared_time(tx)
            row = EngineStateRow(
                number=self._store.engine_number,
                host=socket.gethostname(),
                boot_id=self._boot_id,
                pid=os.getpid(),
                status=status,
                capabilities=capabilities,
                base_models=self._base_models,
                load=None if load is None else asdict(load),
                meters=meters,
                pauses=[asdict(pause) for pause in pauses] or None,
                detail=detail,
                activity="" if activity is None else activity[0],
                activity_since=None if activity is None else now - activity[1],
                updated_at=now,
            )
            engine_state.publish(tx, row)

        self._store.write(work)
