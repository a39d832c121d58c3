"""`/metrics` and the history of a server in two processes, with a working, a stopped and a dead engine."""

import json
import os
import re
import signal
import stat
import time
from pathlib import Path

import httpx
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families

from skyrl_tx.process.exposition import get_socket_path
from skyrl_tx.store import engine_state, notices
from skyrl_tx.store.database import Store
from tests.support.live_server import LiveServer
from tests.support.polling import until

TOKENS = list(range(1, 17))
DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
    loss_fn_inputs={
        "target_tokens": tinker.TensorData(data=TOKENS[1:], dtype="int64", shape=[15]),
        "weights": tinker.TensorData(data=[1.0] * 15, dtype="float32", shape=[15]),
    },
)


def scrape(url: str) -> tuple[dict[str, float], float]:
    """Return all series by name and labels, and the duration of the request in seconds."""
    started = time.monotonic()
    answer = httpx.get(f"{url}/metrics", timeout=10)
    seconds = time.monotonic() - started
    assert answer.status_code == 200, answer.text
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families), "no family is in both processes"
    return {
        f"{sample.name}{''.join(f'{{{key}={value}}}' for key, value in sorted(sample.labels.items()))}": sample.value
        for family in families
        for sample in family.samples
    }, seconds


@pytest.mark.slow
def test_metrics_of_both_processes(tmp_path: Path) -> None:
    """Training and sampling are counted.

    A stopped or dead engine delays the page by less than a second.
    """
    data_dir = tmp_path / "data"
    flags = ("--base-model", "fake", "--backend", "fake", "--metrics-owners", "--log-format", "json")

    with LiveServer(data_dir, flags=(*flags, "--backend-config.sample-slots", "8")) as server:
        served = get_socket_path(data_dir)
        assert stat.S_IMODE(served.stat().st_mode) == 0o600
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-local")
        training = service.create_lora_training_client("fake", rank=8).result()
        for _ in range(3):
            training.forward_backward([DATUM, DATUM], "cross_entropy").result()
            training.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        training.forward([DATUM], "cross_entropy").result()
        sampler = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=5, temperature=1.0)
        sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 4, params).result()

        found, _ = scrape(server.url)
        assert found["skyrl_tx_engine_up"] == 1
        assert found["skyrl_tx_training_tokens_total{pass=backward}"] == 3 * 2 * 15
        assert found["skyrl_tx_training_tokens_total{pass=forward}"] == 15
        assert found["skyrl_tx_requests_completed_total{kind=forward_backward}{outcome=ok}"] == 3
        assert found["skyrl_tx_requests_completed_total{kind=optim_step}{outcome=ok}"] == 3
        assert found["skyrl_tx_request_queue_seconds_count{kind=forward_backward}"] == 3
        assert found["skyrl_tx_request_run_seconds_count{kind=sample}"] == 1
        assert found["skyrl_tx_prompt_tokens_total{cached=false}"] == 3

        ended = sum(value for name, value in found.items() if name.startswith("skyrl_tx_samples_finished_total"))
        assert ended == 4
        assert 4 <= found["skyrl_tx_generation_tokens_total"] <= 20
        assert found["skyrl_tx_time_to_first_token_seconds_count"] == 1
        assert found["skyrl_tx_request_queue_seconds_count{kind=sample}"] == 1
        assert found["skyrl_tx_owner_tokens_total{kind=training}{owner=local}"] == 90
        assert found["skyrl_tx_engine_store_write_seconds_count"] > 10
        assert found["skyrl_tx_http_requests_total{code=200}{group=train}"] == 7
        assert found["skyrl_tx_engine_process_resident_memory_bytes"] > 1e6
        assert len(found) < 1200

        def has_measurements() -> bool:
            later, _ = scrape(server.url)
            return (
                later["skyrl_tx_models_resident"] == 1
                and later["skyrl_tx_device_seconds_total{work=train}"] > 0
                and later["skyrl_tx_decode_slots"] == 8
                and later["skyrl_tx_micro_batches_total"] == 7
            )

        until(has_measurements, within_s=10)
        os.kill(server.engine_pid, signal.SIGSTOP)

        try:
            scrapes = [scrape(server.url) for _ in range(3)]
            assert [found["skyrl_tx_engine_up"] for found, _ in scrapes] == [0, 0, 0]
            # The minimum, because a busy machine slows single requests.
            assert min(seconds for _, seconds in scrapes) < 1
            woken = scrapes[-1][0]["skyrl_tx_poll_wakeup_seconds_count"]
            waiting = training.forward([DATUM], "cross_entropy")
            until(lambda: scrape(server.url)[0]["skyrl_tx_polls_waiting"] == 1, within_s=30)
        finally:
            os.kill(server.engine_pid, signal.SIGCONT)

        waiting.result()
        assert scrape(server.url)[0]["skyrl_tx_poll_wakeup_seconds_count"] == woken + 1
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        found, seconds = scrape(server.url)
        assert found["skyrl_tx_engine_up"] == 0 and seconds < 1
        server.wait_for(re.compile(r"(restarting it)"))
        until(lambda: scrape(server.url)[0]["skyrl_tx_engine_up"] == 1, within_s=30)

        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        assert {line["process"] for line in lines} == {"serve", "engine"}
        assert all(line["ts"].endswith("Z") and line["level"] and line["message"] for line in lines)
        store = Store.open(data_dir, role="tool")
        try:
            until(lambda: any("SIGKILL" in entry.text for entry in store.read(notices.list_newest)), within_s=5)
            notice = next(entry for entry in store.read(notices.list_newest) if "SIGKILL" in entry.text)
            assert (notice.process, notice.level) == ("supervisor", "warning")
            until(lambda: (row := store.read(engine_state.get)) is not None and row.meters is not None, within_s=10)
        finally:
            store.close()

    assert not get_socket_path(data_dir).exists()
