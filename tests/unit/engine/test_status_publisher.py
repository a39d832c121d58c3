"""The engine's status as seen by API processes on other machines."""

import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_tx.engine.metrics import StatusPublisher
from skyrl_tx.process.progress import ByteProgress
from skyrl_tx.server.engine_status import EngineHealth
from skyrl_tx.store.database import Store


def test_an_engine_whose_clock_is_behind_is_not_silent(
    tmp_path: Path, postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Store.open(tmp_path / "api", role="api", url=postgresql_url)
    engine = Store.open(tmp_path / "engine", role="engine", url=postgresql_url)
    with closing(api), closing(engine):
        publisher = StatusPublisher(
            engine, "boot", ["tiny"], SimpleNamespace(describe_activity=lambda: ("start", 5.0), overdue="")
        )
        real_time = time.time
        monkeypatch.setattr(time, "time", lambda: real_time() - 3600)
        publisher.start()
        publisher.close()
        monkeypatch.setattr(time, "time", real_time)
        assert EngineHealth(api, silence_s=10.0).read_report().problem == "the engine is starting"
        monkeypatch.setattr(time, "time", lambda: real_time() + 3600)
        assert EngineHealth(api, silence_s=10.0).read_report().problem == "the engine is starting"


def test_progress_of_a_start_is_published(tmp_path: Path) -> None:
    with (
        closing(Store.open(tmp_path, role="engine")) as store,
        closing(ByteProgress("loading weights", 2 * 10**9)) as task,
    ):
        task.add(10**9)
        publisher = StatusPublisher(
            store, "boot", ["tiny"], SimpleNamespace(describe_activity=lambda: ("start", 5.0), overdue="")
        )
        publisher.start()
        publisher.close()
        problem = EngineHealth(store, silence_s=10.0).read_report().problem
        assert (problem or "").startswith("the engine is starting: loading weights: 1.0 of 2.0 GB, ")
