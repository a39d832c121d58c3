from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_tx.apps.console.health import EngineView, describe_engine
from skyrl_tx.apps.console.overview import (
    flatten_meters,
    make_gauge_tiles,
    make_rate_tiles,
    make_user_lines,
    read_overview,
)
from skyrl_tx.apps.console.queries import OpenGroup
from skyrl_tx.apps.teams.usage import Total
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.server.engine_status import EngineReport
from skyrl_tx.server.monitoring import read_gauges
from skyrl_tx.store.database import Store


def test_rates_are_tokens_a_second_of_the_last_buckets() -> None:
    buckets = [(900, "training", 30_000), (1200, "training", 15_000), (1200, "sampled", 450), (0, "prefill", 7)]
    training, sampling, prefill = make_rate_tiles(buckets, [], 1350.0)
    assert training.value == "100 tok/s" and sampling.value == "1 tok/s" and prefill.value == "0 tok/s"
    assert make_rate_tiles([], [], 1e9)[0].spark


def test_rates_of_the_server_come_before_those_of_usage() -> None:
    history = [(at, {"training_tokens_per_s": float(at)}) for at in range(0, 1300, 10)]
    training, sampling, _ = make_rate_tiles([(1200, "sampled", 450)], history, 1300.0)
    assert training.value == "1.3k tok/s" and training.detail == "last 21 min 30 s" and training.spark.count(",") == 60
    assert sampling.value == "1.1 tok/s"


def test_gauges_are_read_from_any_nesting_and_may_be_missing() -> None:
    assert make_gauge_tiles(None, []) == []
    meters = {
        "backend": {"kv_cache_tokens": 100, "kv_cache_tokens_used": 61, "compilations": None},
        "device_memory": [{"used_bytes": used, "limit_bytes": 2**31} for used in (2**29, 2**30)],
    }
    assert flatten_meters(meters)["memory_used_bytes"] == 2**30
    memory, cache = make_gauge_tiles(meters, [(1, {"kv_cache_tokens_used": 3.0}), (2, {"kv_cache_tokens_used": 9.0})])
    assert (memory.value, memory.detail, memory.share) == ("1.0 GiB", "of 2.0 GiB on the fullest device", 0.5)
    assert cache.share == 0.61 and cache.spark
    compared = {"compared_tokens": 2000, "trainer_gap_nats": 0.5, "trainer_gap_max_nats": 0.01}
    (gap,) = make_gauge_tiles({"backend": compared}, [])
    assert (gap.value, gap.detail) == ("2.5e-04 nats", "maximum 1.0e-02, 2.0k tokens")


def test_the_memory_tile_has_a_curve_from_the_stored_gauges() -> None:
    backend = {"device_memory": [{"used_bytes": 3, "limit_bytes": 8}, {"used_bytes": 5, "limit_bytes": 8}]}
    reading: Any = SimpleNamespace(meters={"queues": {}, "places": {}, "backend": backend})
    gauges = read_gauges(reading)
    assert flatten_meters({"backend": backend}).items() >= gauges.items()
    (tile,) = make_gauge_tiles({"backend": backend}, [(0, {**gauges, "memory_used_bytes": 1.0}), (10, gauges)])
    assert tile.title == "Device memory" and tile.value == "5 B" and tile.spark.count(",") == 2


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EngineReport(), EngineView("ok", "ready", "sampling")),
        (EngineReport(progress="2 of 3"), EngineView("ok", "ready", "sampling; 2 of 3")),
        (EngineReport(activity="busy for 40 s"), EngineView("busy", "busy", "busy for 40 s")),
        (EngineReport(outage="vLLM is lost"), EngineView("busy", "partly down", "vLLM is lost")),
        (EngineReport(problem="no word"), EngineView("problem", "not ready", "no word")),
    ],
)
def test_the_engine_in_a_few_words(report: EngineReport, expected: EngineView) -> None:
    visit: Any = SimpleNamespace(context=SimpleNamespace(engine=SimpleNamespace(read_report=lambda: report)))
    state: Any = SimpleNamespace(status="ready", activity="sampling")
    assert describe_engine(visit, state) == expected


def test_who_uses_what() -> None:
    session, model = SessionId("session-12345678"), ModelId("session-12345678:train:0")
    open_now = [OpenGroup("ann", session, "forward_backward", model, None, 2, 5)]
    recent = [
        Total(group=(who,), kind="training", tokens=5, requests=1, device_s=s)
        for who, s in (("ann", 3.0), ("bob", 1.0))
    ]
    found, hidden = make_user_lines(open_now, recent, [*recent, *recent])
    assert hidden == 0 and [line.owner for line in found] == ["ann", "bob"]
    assert found[0].waiting == "2 training passes" and found[0].link == f"/training_runs/{model}"
    assert (found[0].device, found[0].tokens, found[1].what) == ("75%", 10, "")


def test_the_overview_is_read_once_per_second_and_owner(store: Store) -> None:
    first = read_overview(store, "ann", 1000)
    assert read_overview(store, "ann", 1000) is first and first["waiting"] == 0 and first["state"] is None
    assert read_overview(store, "ann", 1001) is not first and read_overview(store, None, 1000) is not first
