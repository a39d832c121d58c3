"""Several engines in this process, on one PostgreSQL database, for tests of how they share the work."""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from skyrl_tx.contract.backend import AbstractBackend
from skyrl_tx.contract.ids import RequestId
from skyrl_tx.engine.engine import Engine
from skyrl_tx.launch.engine_process import open_store
from skyrl_tx.store import StoreError, engine_state, futures, placement
from tests.support.engine_harness import EngineHarness

_PATIENCE_S = 60.0


class RunningEngine:
    """One engine on a separate thread, with separate connections and a separate backend."""

    def __init__(self, harness: EngineHarness, backend: AbstractBackend) -> None:
        self._stop = threading.Event()
        self._store = open_store(harness.settings, self._stop)
        self._harness = harness
        self.number = self._store.engine_number
        self.backend = backend
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            harness = self._harness
            engine = Engine(
                harness.settings, self.backend, self._store, harness.artifacts, extensions=harness.extensions
            )
            engine.run(self._stop)
        except Exception as error:
            self.error = error
        finally:
            self._stop.set()
            self._store.close()

    def stop(self) -> None:
        """Stop cleanly, as on SIGTERM."""
        self._stop.set()
        self._store.wake()
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive()

    def lose(self) -> None:
        """Take its lease away, as the death of its process does."""
        number, harness = self.number, self._harness
        harness.api.write(lambda tx: placement.revoke_lease(tx, placement.get_running(tx)[number]))
        self._thread.join(_PATIENCE_S)
        assert isinstance(self.error, StoreError), self.error


class SeveralEngines:
    """Multiple engines on one database. Leaving the context stops all running engines."""

    def __init__(self, harness: EngineHarness, num_engines: int) -> None:
        assert harness.settings.engines > 1
        self._harness = harness
        self.engines = [RunningEngine(harness, harness.backend()) for _ in range(num_engines)]

    def __enter__(self) -> Self:
        self.until(lambda: len(self.ready()) == len(self.engines))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines:
            engine.stop()

    def start(self) -> RunningEngine:
        """Start one more engine, and wait until it is ready."""
        engine = RunningEngine(self._harness, self._harness.backend())
        self.engines.append(engine)
        self.until(lambda: engine.number in self.ready())
        return engine

    def get_engine(self, number: int) -> RunningEngine:
        """Return the newest engine with a number."""
        return next(engine for engine in reversed(self.engines) if engine.number == number)

    def ready(self) -> set[int]:
        """Return the numbers of the engines that execute requests."""
        rows, running = self._harness.api.read(lambda tx: (engine_state.list_engines(tx), placement.get_running(tx)))
        return {row.number for row in rows if row.status == "ready"} & running.keys()

    def wait(self, *request_ids: RequestId) -> None:
        """Wait until requests have results."""
        self.until(
            lambda: len(self._harness.api.read(lambda tx: futures.get_outcomes(tx, request_ids))) == len(request_ids)
        )

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something; raises the error of an engine that has failed."""
        end = time.monotonic() + _PATIENCE_S
        while not is_so():
            for engine in self.engines:
                if engine.error is not None and not isinstance(engine.error, StoreError):
                    raise engine.error
            assert time.monotonic() < end
            time.sleep(0.01)
