"""The engine as a process."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from enum import IntEnum
from types import FrameType

from pydantic import BaseModel

from skyrl_tx.artifacts import ArtifactStore
from skyrl_tx.contract.backend import BackendSpec
from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.errors import BackendLost, UserError
from skyrl_tx.engine.engine import Engine
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store, StoreError, StoreInUse
from skyrl_tx.store.errors import StoreBlocked
from skyrl_tx.store.patience import Patience

_log = logging.getLogger(__name__)
_OPEN_AGAIN_S = 1.0


class ExitCode(IntEnum):
    """How the engine process ended, for whoever watches it."""

    STOPPED = 0
    """As asked."""
    LOST = 1
    """Something broke; a new process goes on where this one was."""
    CANNOT_START = 2
    """The settings are wrong or the data directory is in use; a new process would say the same."""


def run_engine(
    settings: EngineSettings,
    spec: BackendSpec,
    backend_config: BaseModel,
    *,
    on_ready: Callable[[Capabilities], None] = lambda _: None,
    second_signal_exits: bool = True,
) -> ExitCode:
    """Run an engine until SIGTERM or SIGINT, on the main thread; a second signal ends the process at once.

    Unless another process decides on that: then `second_signal_exits` is False, and more signals mean no more than one.
    """
    stop = threading.Event()
    try:
        store = open_store(settings, stop)
    except StoreInUse as error:
        _log.error("%s", error)
        return ExitCode.CANNOT_START

    def on_signal(number: int) -> None:
        if stop.is_set() and second_signal_exits:
            os._exit(128 + number)
        stop.set()
        store.wake()

    with closing(store), _heard({signal.SIGTERM, signal.SIGINT}, on_signal):
        try:
            backend = spec.load()(settings.base_model, backend_config)
            Engine(settings, backend, store, ArtifactStore(settings.data_dir / "artifacts")).run(stop, on_ready)
        except UserError as error:
            _log.error("%s", error.message)
            return ExitCode.CANNOT_START
        except (BackendLost, StoreError):
            _log.exception("the engine cannot go on")
            return ExitCode.LOST
    return ExitCode.STOPPED


def open_store(settings: EngineSettings, stop: threading.Event) -> Store:
    """Open the engine's database. While it is full or locked wait for it, and later with each write, until `stop`."""
    patience = Patience(until=stop, tell=lambda tx, why: engine_state.say_waiting(tx, why, time.time()))
    while True:
        try:
            return Store.open(settings.data_dir, role="engine", url=settings.store_url, patience=patience)
        except StoreBlocked as error:
            _log.warning("%s; trying again", error)
            time.sleep(_OPEN_AGAIN_S)


@contextmanager
def _heard(numbers: set[signal.Signals], on_signal: Callable[[int], None]) -> Generator[None]:
    """Have signals heard on a thread of their own: the main one, where handlers run, may be busy on the device."""
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def listen() -> None:
        while number := os.read(heard, 1):
            if number[0] in numbers:
                on_signal(number[0])

    listener = threading.Thread(target=listen, name="hear signals", daemon=True)
    listener.start()
    for number in numbers:
        signal.signal(number, _note)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        os.close(told)
        listener.join()
        os.close(heard)


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: without a handler Python would take no note of a signal, and the process would end."""
