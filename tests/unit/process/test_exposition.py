"""The metrics of multiple engines are merged into one valid text."""

import asyncio
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from skyrl_tx.process import exposition
from skyrl_tx.process.exposition import MetricsSocket, get_socket_path, join_texts, read_metrics, render, serve_http
from tests.support.free_ports import free_ports


def registry(value: float) -> CollectorRegistry:
    found = CollectorRegistry()
    Counter("tokens", "Tokens.", ["owner"], registry=found).labels("ann {}").inc(value)
    Gauge("queue", "A queue.", registry=found).set(value)
    return found


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_series_of_several_engines_have_the_engine_as_label(is_openmetrics: bool) -> None:
    texts = {str(number): render(registry(number), is_openmetrics=is_openmetrics) for number in (1, 2)}
    text = join_texts(texts).decode()
    families = list(parse_openmetrics(text + exposition.END.decode()) if is_openmetrics else parse_text(text))
    assert [family.name for family in families] == ["tokens", "queue"]
    series = [(sample.labels, sample.value) for family in families for sample in family.samples]
    assert series == [
        ({"engine": "1", "owner": "ann {}"}, 1.0),
        ({"engine": "2", "owner": "ann {}"}, 2.0),
        ({"engine": "1"}, 1.0),
        ({"engine": "2"}, 2.0),
    ]


def test_an_engine_alone_serves_its_metrics_at_a_port() -> None:
    port = free_ports(1)
    with serve_http("127.0.0.1", port, registry(3.0)):
        answer = httpx.get(f"http://127.0.0.1:{port}/metrics")
        assert {family.name for family in parse_text(answer.text)} == {"tokens", "queue"}
        with pytest.raises(OSError), serve_http("127.0.0.1", port, registry(1.0)):
            pass
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")


def test_each_engine_of_a_data_directory_has_a_socket(tmp_path: Path) -> None:
    def read() -> bytes | None:
        return asyncio.run(read_metrics(tmp_path, is_openmetrics=False, timeout_s=10.0))

    assert read() is None
    gauges = [CollectorRegistry(), CollectorRegistry()]
    for number, gauge in enumerate(gauges, start=1):
        Gauge("a", "A.", registry=gauge).set(number)
    first = MetricsSocket(get_socket_path(tmp_path), gauges[0])
    assert read() == b"# HELP a A.\n# TYPE a gauge\na 1.0\n", "one engine needs no label"
    second = MetricsSocket(get_socket_path(tmp_path, 2), gauges[1])
    assert read() == b'# HELP a A.\n# TYPE a gauge\na{engine="1"} 1.0\na{engine="2"} 2.0\n'
    first.close()
    second.close()
