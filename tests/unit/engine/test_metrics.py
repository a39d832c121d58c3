"""Engine metrics: work per result and owner, and backends that report nothing or fail."""

import math
import time
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyrl_tx.contract.errors import ErrorCategory
from skyrl_tx.contract.meters import DeviceMemory, Meters
from skyrl_tx.contract.requests import Rejected
from skyrl_tx.contract.results import Failure, ForwardBackwardOutput
from skyrl_tx.engine.metrics import EngineMetrics
from skyrl_tx.process.exposition import render

QUEUES = {"training": {"waiting": 2, "paused": 1, "running": 1, "backlog_bytes": 10, "backlog_limit_bytes": 20}}


def series(meters: EngineMetrics) -> dict[str, float]:
    text = render(meters.registry, is_openmetrics=False).decode()
    return {
        sample.name.removeprefix("skyrl_tx_") + str(sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def complete(meters: EngineMetrics, result: Any, *, owner: str = "ann", backward: bool = True) -> None:
    request = Rejected(kind="model_pass", message="", backward=backward)
    now = time.time()
    meters.record_completion("model_pass", owner, request, result, created_at=now - 3, started_at=now - 1)


def output(loss: float, num_tokens: float = 8.0) -> ForwardBackwardOutput:
    metrics = {"loss:sum": loss, "num_tokens:sum": num_tokens, "num_datums:sum": 2.0}
    return ForwardBackwardOutput(logprobs=(np.zeros(3, np.float32),), metrics=metrics)


def test_passes_are_counted_by_direction_and_outcome() -> None:
    meters = EngineMetrics()
    complete(meters, output(1.0))
    complete(meters, output(1.0), backward=False)
    complete(meters, Failure(message="no", category=ErrorCategory.USER))
    found = series(meters)
    assert found["requests_completed_total['forward_backward', 'ok']"] == 1
    assert found["requests_completed_total['forward_backward', 'user_error']"] == 1
    assert found["training_tokens_total['backward']"] == found["training_tokens_total['forward']"] == 8
    assert found["request_queue_seconds_sum['forward_backward']"] == pytest.approx(4, abs=0.1)
    assert found["request_run_seconds_sum['forward']"] == pytest.approx(1, abs=0.1)
    assert meters.totals["requests_failed"] == 1 and meters.totals["training_tokens"] == 16


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_counted(loss: float) -> None:
    meters = EngineMetrics()
    complete(meters, output(loss))
    assert series(meters)["nonfinite_total['loss']"] == 1


def test_owners_are_labels_only_when_asked_for_and_at_most_fifty() -> None:
    plain, with_owners = EngineMetrics(), EngineMetrics(with_owners=True)
    for meters in (plain, with_owners):
        for number in range(60):
            complete(meters, output(1.0), owner=f"owner-{number}")
    assert not any("owner-" in name for name in series(plain))
    found = {name: value for name, value in series(with_owners).items() if name.startswith("owner_tokens")}
    assert len(found) == 51 and found["owner_tokens_total['other', 'training']"] == 80


def test_the_backend_tells_what_it_knows() -> None:
    meters = EngineMetrics()
    known = Meters(decode_slots=8, decode_slots_used=3, device_memory=(DeviceMemory(used_bytes=5, limit_bytes=9),))
    published = meters.update_gauges(
        known, {"forward": 1.5, "step_sample": 2.0, "text_of": 9.0}, QUEUES, {"models_places": 4}
    )
    found = series(meters)
    assert found["decode_slots_used[]"] == 3 and found["device_memory_bytes['0']"] == 5
    assert found["device_seconds_total['train']"] == 1.5 and found["device_seconds_total['sample']"] == 2.0
    assert found["requests_paused['training']"] == 1
    assert found["requests_waiting['training']"] == 2 and found["models_places[]"] == 4
    assert not any(name.startswith("kv_cache_tokens") for name in found)
    assert published["device_seconds"] == {"train": 1.5, "optim": 0.0, "sample": 2.0, "state": 0.0}
    assert "kv_cache_tokens" not in published["backend"]
