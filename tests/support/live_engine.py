"""Runs the real engine with any backend on a thread."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

from skyrl_tx.artifacts import open_artifacts
from skyrl_tx.compose import APPS
from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.engine.engine import Engine
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.launch.command import load_engine_extensions
from skyrl_tx.store.database import Store


@contextmanager
def live_engine(settings: EngineSettings, backend: AbstractBackend) -> Generator[None]:
    """Run an engine until the context exits, and then raise its error, if any."""
    store = Store.open(settings.data_dir, role="engine", url=settings.store_url)
    artifacts = open_artifacts(settings.data_dir, settings.artifacts)
    engine = Engine(settings, backend, store, artifacts, extensions=load_engine_extensions(APPS))
    stop = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.run(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="engine")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        store.wake()
        thread.join()
        store.close()
    if failures:
        raise failures[0]
