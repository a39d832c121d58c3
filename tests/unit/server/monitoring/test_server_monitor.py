"""Samples of the server's state: rates between two engine reports, gauges, and a row every ten seconds."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlmodel import Session

from skyrl_tx.server.monitoring.server_monitor import EngineReading, combine_engines, compute_rates, read_gauges
from skyrl_tx.server.settings import ApiSettings
from skyrl_tx.store import engine_state
from skyrl_tx.store.tables import EngineStateRow
from tests.support.live_api import live_api
from tests.support.polling import until


def word(at: float, tokens: int = 0, busy_s: float = 0.0, boot_id: str = "a", **backend: object) -> EngineReading:
    queue = {"waiting": 2, "running": 1, "backlog_bytes": 100, "backlog_limit_bytes": 1000}
    meters: dict[str, Any] = {
        "totals": {"training_tokens": tokens},
        "device_seconds": {"train": busy_s},
        "queues": {"training": queue},
        "places": {"models_resident": 3},
        "backend": backend,
    }
    return EngineReading(boot_id, at, meters)


def test_rates_are_differences_by_time() -> None:
    found = compute_rates(word(100.0, tokens=500, busy_s=10.0), word(110.0, tokens=1500, busy_s=15.0))
    assert found["training_tokens_per_s"] == 100.0
    assert found["sampled_tokens_per_s"] == 0.0
    assert found["train_share"] == 0.5


def test_padding_and_compilation_are_rates_of_the_backend() -> None:
    before = word(0.0, padding_tokens=50, compile_seconds=3.0)
    after = word(10.0, padding_tokens=70, compile_seconds=9.0)
    found = compute_rates(before, after)
    assert (found["padding_tokens_per_s"], found["compile_share"]) == (2.0, 0.6)
    assert "compile_share" not in compute_rates(word(0.0), after), "another backend may not count it"


def test_a_new_engine_has_no_rates_yet() -> None:
    assert compute_rates(word(100.0), word(110.0, boot_id="b")) == {}
    assert compute_rates(None, word(110.0)) == {} and compute_rates(word(100.0), None) == {}
    assert compute_rates(word(100.0), word(100.0)) == {}


def test_gauges_leave_out_what_the_backend_does_not_tell() -> None:
    memory = [{"used_bytes": 5, "limit_bytes": 9}, {"used_bytes": 7, "limit_bytes": 9}]
    found = read_gauges(word(1.0, decode_slots=8, decode_slots_used=2, device_memory=memory))
    assert (found["training_waiting"], found["models_resident"], found["decode_slots_used"]) == (2, 3, 2)
    assert (found["memory_used_bytes"], found["memory_limit_bytes"]) == (7, 9), "of the fullest device"
    assert "kv_cache_tokens" not in found and read_gauges(None) == {}


def test_an_engine_of_another_release_may_publish_fewer_groups() -> None:
    """A KeyError would end the thread, and with it the health of the server."""
    meters: dict[str, Any] = {"backend": {"decode_slots": 8}}
    rows = [
        EngineStateRow(
            number=1, boot_id="a", pid=1, status="ready", capabilities={}, base_models=[], meters=meters, updated_at=at
        )
        for at in (1.0, 2.0)
    ]
    before, after = map(EngineReading.from_row, rows)
    assert read_gauges(after) == {"decode_slots": 8}
    assert set(compute_rates(before, after).values()) <= {0.0}


def test_numbers_of_several_engines_are_those_of_one_server() -> None:
    found = combine_engines([read_gauges(word(1.0, decode_slots=8)), read_gauges(word(1.0, decode_slots=4))])
    assert (found["training_waiting"], found["models_resident"], found["decode_slots"]) == (4, 6, 12)
    ran = [
        compute_rates(word(0.0), word(10.0, tokens=tokens, busy_s=busy_s))
        for tokens, busy_s in ((500, 10.0), (100, 5.0))
    ]
    assert (combine_engines(ran)["training_tokens_per_s"], combine_engines(ran)["train_share"]) == (60.0, 0.75)
    memory = [{"used_bytes": 5, "limit_bytes": 9}], [{"used_bytes": 7, "limit_bytes": 9}]
    assert (
        combine_engines([read_gauges(word(1.0, device_memory=device_memory)) for device_memory in memory])[
            "memory_used_bytes"
        ]
        == 7
    )
    assert combine_engines([]) == {} and combine_engines([{"a": 1.5}]) == {"a": 1.5}


def test_a_row_is_written_each_ten_seconds_with_and_without_an_engine(tmp_path: Path) -> None:
    with live_api(ApiSettings(data_dir=tmp_path, base_model="tiny", port=0)) as server:
        server.model()
        sampler = server.api.monitor
        values = sampler.collect(time.time())
        assert (values["engine_ready"], values["requests_open"], values["sessions_active"]) == (0.0, 1, 1)
        assert values["disk_free_bytes"] > 0 and "training_waiting" not in values

        def ready(tx: Session) -> None:
            row = EngineStateRow(
                boot_id="a", pid=1, status="ready", capabilities={}, base_models=[], updated_at=time.time()
            )
            row.meters = word(0.0).meters
            engine_state.publish(tx, row)

        server.store.write(ready)
        values = sampler.collect(time.time())
        assert (values["engine_ready"], values["training_waiting"]) == (1.0, 2)
        text = server.client.get("/metrics").text
        assert "skyrl_tx_sessions_active 1.0" in text and "skyrl_tx_engine_ready 1.0" in text
        assert 'skyrl_tx_store_bytes{part="db"}' in text

        def find_rows() -> list[tuple[int, Mapping[str, float]]]:
            rows = server.store.read(lambda tx: engine_state.list_gauges(tx, 0))
            assert all(at % 10 == 0 for at, _ in rows)
            return [row for row in rows if row[1]["requests_open"] == 1]  # the first row may be older than the model

        assert until(find_rows, within_s=25)
