"""Writes the Grafana dashboards and the alert rules beside this file: `python deploy/monitoring/build.py`.

Needs the standard library alone. JSON is YAML, so Prometheus reads the rules as they are.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = "https://github.com/skyrl-tx/skyrl_tx/blob/main/docs/guides/alerts.md"
_WIDTH, _HEIGHT = 8, 7
_COLUMNS = 3
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_JOB = 'instance=~"$instance"'

Panel = tuple[str, str, Sequence[tuple[str, str]]]
"""Title, unit, and for each query its expression and legend. `%` in an expression stands for the selected servers."""


def rate(metric: str, labels: str = "") -> str:
    """Return an expression of a counter's growth a second."""
    return f"rate(skyrl_tx_{metric}{{%{labels}}}[$__rate_interval])"


def total(metric: str, by: str = "", labels: str = "") -> str:
    """Return an expression of the sum of a counter's growth a second, by some labels."""
    return f"sum by ({by}) ({rate(metric, labels)})" if by else f"sum({rate(metric, labels)})"


def quantiles(metric: str, by: str = "", only: str = "") -> list[tuple[str, str]]:
    """Return queries of the median and the 95th percentile of a histogram."""
    labels, legend = (f"le, {by}", f" {{{{{by}}}}}") if by else ("le", "")
    inner = f"sum by ({labels}) ({rate(f'{metric}_bucket', only)})"
    return [(f"histogram_quantile({q}, {inner})", f"{name}{legend}") for q, name in ((0.5, "median"), (0.95, "p95"))]


def gauge(metric: str, legend: str) -> tuple[str, str]:
    """Return a query of a gauge."""
    return f"skyrl_tx_{metric}{{%}}", legend


BOARDS: Mapping[str, Sequence[Panel]] = {
    "server": (
        ("Engine", "short", [gauge("engine_up", "up"), gauge("engine_ready", "ready")]),
        ("Tokens a second", "short", [
            (total("training_tokens_total"), "training"), (total("generation_tokens_total"), "sampled"),
            (total("prompt_tokens_total"), "prompts")]),
        ("Device time by work", "percentunit", [(total("device_seconds_total", "work"), "{{work}}")]),
        ("Requests waiting", "short", [
            gauge("requests_waiting", "{{queue}}"), gauge("requests_paused", "{{queue}}, by quotas")]),
        ("Requests running", "short", [gauge("requests_running", "{{queue}}")]),
        ("Oldest request", "s", [gauge("oldest_request_seconds", "age")]),
        ("Completed requests a second", "short", [(total("requests_completed_total", "kind"), "{{kind}}")]),
        ("Failed requests a second", "short", [
            (total("requests_completed_total", "kind, outcome", ', outcome!="ok"'), "{{kind}} {{outcome}}")]),
        ("Wait in the queue", "s", quantiles("request_queue_seconds", "kind")),
        ("HTTP responses a second", "short", [(total("http_requests_total", "group, code"), "{{group}} {{code}}")]),
        ("HTTP duration", "s", quantiles("http_request_duration_seconds", "group")),
        ("Poll wake-up", "s", quantiles("poll_wakeup_seconds")),
        ("Open polls, sessions", "short", [
            gauge("polls_waiting", "polls"), gauge("sessions_active", "sessions")]),
        ("Refused calls a second", "short", [
            (total("backpressure_total", "reason"), "{{reason}}"),
            (total("auth_failures_total", "reason"), "{{reason}}")]),
        ("Commits, 95th percentile", "s", [
            (quantiles("store_write_seconds")[1][0], "API"),
            (quantiles("engine_store_write_seconds")[1][0], "engine")]),
        ("Device memory", "bytes", [
            gauge("device_memory_bytes", "used {{device}}"), gauge("device_memory_limit_bytes", "limit {{device}}")]),
        ("Disk", "bytes", [gauge("disk_free_bytes", "free"), gauge("store_bytes", "database {{part}}")]),
        ("Process memory", "bytes", [
            ("process_resident_memory_bytes{%}", "API"), gauge("engine_process_resident_memory_bytes", "engine")]),
    ),
    "training": (
        ("Training tokens a second", "short", [(total("training_tokens_total", "pass"), "{{pass}}")]),
        ("Optimizer steps a second", "short", [
            (total("requests_completed_total", labels=', kind="optim_step", outcome="ok"'), "steps")]),
        ("Run time of a request", "s", quantiles("request_run_seconds", "kind")),
        ("Micro-batches a second", "short", [(total("micro_batches_total"), "micro-batches")]),
        ("Padding of micro-batches", "percentunit", [
            (f"{total('padding_tokens_total')} / clamp_min({total('padding_tokens_total')} + "
             f"{total('training_tokens_total')}, 1)", "share")]),
        ("Models on the device", "short", [gauge("models_resident", "resident"), gauge("models_places", "places")]),
        ("Restores of models a second", "short", [(total("model_restores_total"), "restores")]),
        ("Not finite, a second", "short", [(total("nonfinite_total", "what"), "{{what}}")]),
        ("Snapshots a second", "short", [(total("snapshots_total", "outcome"), "{{outcome}}")]),
        ("Requests since the snapshot", "short", [gauge("effects_since_snapshot", "most of a model")]),
        ("Compilations a second", "short", [(total("compilations_total"), "programs")]),
        ("Compiler", "percentunit", [(total("compile_seconds_total"), "share of time")]),
        ("Out of memory, retries a second", "short", [(total("out_of_memory_retries_total"), "passes")]),
    ),
    "sampling": (
        ("Sampled tokens a second", "short", [(total("generation_tokens_total"), "tokens")]),
        ("Prompt tokens a second", "short", [(total("prompt_tokens_total", "cached"), "cached: {{cached}}")]),
        ("Ended samples a second", "short", [(total("samples_finished_total", "reason"), "{{reason}}")]),
        ("Time to the first token", "s", quantiles("time_to_first_token_seconds")),
        ("Time between two tokens", "s", quantiles("inter_token_seconds")),
        ("Run time of a sample request", "s", quantiles("request_run_seconds", only=', kind="sample"')),
        ("Decode slots", "short", [gauge("decode_slots_used", "used"), gauge("decode_slots", "all")]),
        ("KV cache", "short", [gauge("kv_cache_tokens_used", "used"), gauge("kv_cache_tokens", "all"),
                               gauge("prefix_cache_tokens", "cached prompts")]),
        ("Samplers on the device", "short", [
            gauge("samplers_resident", "resident"), gauge("samplers_places", "places")]),
        ("Loads of samplers a second", "short", [(total("sampler_loads_total"), "loads")]),
        ("Memory of waiting samples", "bytes", [
            ('skyrl_tx_backlog_bytes{%, queue="sampling"}', "used"),
            ('skyrl_tx_backlog_limit_bytes{%, queue="sampling"}', "limit")]),
        ("Back-pressure a second", "short", [(total("backpressure_total", "reason"), "{{reason}}")]),
        ("Gap to the trainer, nats", "short", [
            (f"{total('trainer_gap_nats_total')} / clamp_min({total('compared_tokens_total')}, 1e-9)", "mean"),
            gauge("trainer_gap_max_nats", "largest")]),
        ("Lost servers that draw samples", "short", [
            gauge("sampler_servers_lost", "lost"),
            (total("fallback_samples_total"), "samples of the trainer, a second")]),
    ),
}  # fmt: skip

ALERTS: Sequence[tuple[str, str, str, str, str]] = (
    ("EngineDown", "2m", "critical", "skyrl_tx_engine_up == 0", "the engine does not respond"),
    (
        "EngineRestarts", "0m", "critical", "increase(skyrl_tx_engine_starts_total[1h]) > 3",
        "the engine started {{ $value | humanize }} times within an hour",
    ),
    (
        "RequestsStuck", "1m", "critical", "skyrl_tx_oldest_request_seconds > 600 and skyrl_tx_engine_up == 1",
        "the oldest request has waited for {{ $value | humanizeDuration }} while the engine is up",
    ),
    (
        "ServerErrors", "5m", "warning",
        'sum by (instance) (rate(skyrl_tx_requests_completed_total{outcome="server_error"}[5m])) > 0.01 or '
        'sum by (instance) (rate(skyrl_tx_http_requests_total{code=~"5.."}[5m])) > 0.01',
        "{{ $value | humanize }} requests a second fail because of the server",
    ),
    (
        "DiskFull", "10m", "warning", "predict_linear(skyrl_tx_disk_free_bytes[6h], 24 * 3600) < 0",
        "the disk of the data directory will be full within 24 hours",
    ),
    (
        "NonFinite", "0m", "warning", "increase(skyrl_tx_nonfinite_total[10m]) > 0",
        "{{ $labels.what }}: NaN or infinite numbers in training",
    ),
    (
        "SnapshotLag", "10m", "warning", "skyrl_tx_effects_since_snapshot > 1000",
        "a recovery would replay {{ $value }} requests of one model",
    ),
    (
        "SlowCommits", "5m", "warning",
        "histogram_quantile(0.95, sum by (le, instance) (rate(skyrl_tx_store_write_seconds_bucket[5m]))) > 0.5 or "
        "histogram_quantile(0.95, sum by (le, instance) (rate(skyrl_tx_engine_store_write_seconds_bucket[5m]))) > 0.5",
        "the 95th percentile of a commit is {{ $value | humanizeDuration }}",
    ),
    (
        "BackpressureHeld", "15m", "warning", "sum by (instance) (rate(skyrl_tx_backpressure_total[5m])) > 0",
        "requests have been told to come later for 15 minutes",
    ),
    (
        "MemoryTight", "15m", "warning", "skyrl_tx_device_memory_bytes / skyrl_tx_device_memory_limit_bytes > 0.95",
        "device {{ $labels.device }} uses {{ $value | humanizePercentage }} of its memory",
    ),
    (
        "SamplerLost", "2m", "critical", "skyrl_tx_sampler_servers_lost > 0",
        "{{ $value }} servers that draw samples do not respond",
    ),
    (
        "SamplerGap", "0m", "critical",
        "sum by (instance) (rate(skyrl_tx_trainer_gap_nats_total[10m])) / "
        "sum by (instance) (rate(skyrl_tx_compared_tokens_total[10m])) > 0.25",
        "log-probabilities of sampler and trainer differ by {{ $value | humanize }} nats",
    ),
)  # fmt: skip
"""Alerts: name, how long the expression must hold, severity, expression and summary."""


def board(name: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    return {
        "uid": f"skyrl-tx-{name}",
        "title": f"skyrl_tx: {name}",
        "tags": ["skyrl_tx"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource(), _instances()]},
        "panels": [_panel(number, *panel) for number, panel in enumerate(panels)],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "type": "query",
        "label": "Server",
        "datasource": _SOURCE,
        "query": "label_values(skyrl_tx_build_info, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(number: int, title: str, unit: str, queries: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {
            "x": number % _COLUMNS * _WIDTH,
            "y": number // _COLUMNS * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 10}}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression.replace("%", _JOB), "legendFormat": legend}
            for index, (expression, legend) in enumerate(queries)
        ],
    }


def rules() -> dict[str, Any]:
    """Return the alert rules as Prometheus reads them."""
    return {
        "groups": [
            {
                "name": "skyrl_tx",
                "rules": [
                    {
                        "alert": f"SkyrlTx{name}",
                        "expr": expression,
                        "for": held,
                        "labels": {"severity": severity},
                        "annotations": {"summary": summary, "runbook_url": f"{DOCS}#{name.lower()}"},
                    }
                    for name, held, severity, expression, summary in ALERTS
                ],
            }
        ]
    }


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    contents = {f"{name}.json": board(name, panels) for name, panels in BOARDS.items()} | {"alerts.json": rules()}
    return {name: json.dumps(content, indent=1, ensure_ascii=False) + "\n" for name, content in contents.items()}


if __name__ == "__main__":
    for file_name, text in files().items():
        (HERE / file_name).write_text(text)
