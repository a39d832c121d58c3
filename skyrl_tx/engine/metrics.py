"""The engine's metrics: counted when a result is committed, and measured by the loop once a second.

Names follow Prometheus and vLLM: the prefix `skyrl_tx_`, base units, `_total` for what only grows. No owner, model,
session or path is a label, except the owner in one family, with `--metrics-owners`.
"""

import logging
import math
import os
import socket
import threading
import time
from collections import Counter as Totals
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlmodel import Session

from skyrl_tx.contract.capabilities import Capabilities
from skyrl_tx.contract.meters import Meters
from skyrl_tx.contract.requests import ModelPass, Rejected, Request, Sample
from skyrl_tx.contract.results import Failure, ForwardBackwardOutput, OptimStepOutput, Result, SampleOutput
from skyrl_tx.engine.activity import Watchdog
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.errors import StoreError, StoreUnreachable
from skyrl_tx.store.pauses import Pause
from skyrl_tx.store.tables import EngineStateRow, EngineStatus

_MAX_OWNERS = 50
_OTHERS = "other"
_WAITS_S = (0.01, 0.05, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0, 600.0)
_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_WRITES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)

_PASSES = {"forward": "forward", "forward_backward": "backward"}

Work = Literal["train", "optim", "sample", "state"]
_WORK_BY_CALL: Mapping[str, Work] = {
    **dict.fromkeys(("forward", "forward_backward"), "train"),
    **dict.fromkeys(("optim_step", "gradient_norm", "clear_gradient"), "optim"),
    **dict.fromkeys(("begin_sample", "step_sample", "cancel_sample", "end_sample"), "sample"),
    **dict.fromkeys(("create_model", "restore", "capture", "load_sampler"), "state"),
}
"""The work of each call of the backend, as `LoopActivity` names it; the loop's time in other calls is negligible."""


class _BackendMeters(Collector):
    """The last `Meters` of the backend as metrics. What the backend does not tell has no sample."""

    _GAUGES: Mapping[str, str] = {
        "decode_slots": "Samples that can decode at once.",
        "decode_slots_used": "Samples that decode.",
        "kv_cache_tokens": "Positions of the KV cache.",
        "kv_cache_tokens_used": "Positions of the pages that prompts and samples have, shared ones once.",
        "prefix_cache_tokens": "Positions of the pages of cached prompts, and of their states at their size.",
        "sampler_servers_lost": "Servers that draw samples for the backend and do not respond.",
        "trainer_gap_max_nats": "The largest difference that a comparison of sampler and trainer has found.",
    }
    _COUNTERS: Mapping[str, tuple[str, str]] = {
        "compilations": ("compilations", "Programs that were compiled, or read from a compilation cache."),
        "compile_seconds": ("compile_seconds", "Time of the compiler in seconds."),
        "out_of_memory_retries": (
            "out_of_memory_retries",
            "Passes that started again with smaller micro-batches because a device was out of memory.",
        ),
        "micro_batches": ("micro_batches", "Micro-batches that the device computed for passes."),
        "padding_tokens": ("padding_tokens", "Positions of micro-batches that held no token of a request."),
        "fallback_samples": (
            "fallback_samples",
            "Samples that the trainer drew because all servers of its sampler were lost (--sampler-fallback trainer).",
        ),
        "compared_tokens": (
            "compared_tokens",
            "Sampled tokens whose log-probabilities were compared with the trainer's (--sampler-check-share).",
        ),
        "trainer_gap_nats": (
            "trainer_gap_nats",
            "Sum of the absolute differences of log-probabilities; divided by compared_tokens it is their mean.",
        ),
    }

    def __init__(self) -> None:
        self.last = Meters()
        self.seconds: Mapping[Work, float] = {}

    def collect(self) -> Iterator[Metric]:
        meters = self.last
        for name, text in self._GAUGES.items():
            yield GaugeMetricFamily(f"skyrl_tx_{name}", text, value=getattr(meters, name))
        for name, (family, text) in self._COUNTERS.items():
            yield CounterMetricFamily(f"skyrl_tx_{family}", text, value=getattr(meters, name))
        used = GaugeMetricFamily("skyrl_tx_device_memory_bytes", "Memory of a device in use.", labels=["device"])
        limit = GaugeMetricFamily("skyrl_tx_device_memory_limit_bytes", "Memory of a device.", labels=["device"])
        for number, memory in enumerate(meters.device_memory):
            used.add_metric([str(number)], memory.used_bytes)
            limit.add_metric([str(number)], memory.limit_bytes)
        seconds = CounterMetricFamily(
            "skyrl_tx_device_seconds", "Time of the engine's loop in calls of the backend.", labels=["work"]
        )
        for work, value in self.seconds.items():
            seconds.add_metric([work], value)
        yield from (used, limit, seconds)


class _ResidentMemory(Collector):
    """The memory of the engine's process: one of the families that a `ProcessCollector` has."""

    def __init__(self) -> None:
        self._process = ProcessCollector(namespace="skyrl_tx_engine", registry=None)

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._process.collect() if family.name.endswith("_resident_memory_bytes"))


class EngineMetrics:
    """All metrics of one engine.

    Written by the engine's thread; the registry is read by any thread. `totals` has the counts that are published with
    the engine's status.
    """

    def __init__(self, *, with_owners: bool = False) -> None:
        """`with_owners`: count tokens by owner too."""
        self.registry = CollectorRegistry()
        self.totals: Totals[str] = Totals()
        self._backend = _BackendMeters()
        self._owners: set[str] | None = set() if with_owners else None
        self.registry.register(self._backend)
        self.registry.register(_ResidentMemory())
        counter, gauge, histogram = self._make_counter, self._make_gauge, self._make_histogram
        completed = counter("requests_completed", "Requests with a committed result.", "kind", "outcome")
        queue_s = histogram("request_queue_seconds", "From arrival to the first start.", _WAITS_S, "kind")
        run_s = histogram("request_run_seconds", "From the last start to the result.", _WAITS_S, "kind")
        # Labels are looked up once, because that takes longer than counting.
        self._completed = cache(completed.labels)
        self._queue_s = cache(queue_s.labels)
        self._run_s = cache(run_s.labels)
        self._waiting = gauge("requests_waiting", "Requests that have not started.", "queue")
        self._paused = gauge("requests_paused", "Requests that wait because of a quota.", "queue")
        self._running = gauge("requests_running", "Requests that have started.", "queue")
        self._backlog = gauge("backlog_bytes", "Memory of waiting requests.", "queue")
        self._backlog_limit = gauge("backlog_limit_bytes", "Memory for waiting requests.", "queue")
        tokens = counter("training_tokens", "Tokens of completed passes.", "pass")
        self._tokens = {kind: tokens.labels(label) for kind, label in _PASSES.items()}
        self._nonfinite = counter("nonfinite", "Losses and gradient norms that were NaN or infinite.", "what")
        self._samples = counter("samples_finished", "Samples that ended.", "reason")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of completed sample requests.", "cached")
        self._generated = counter("generation_tokens", "Sampled tokens of completed requests.")
        self._first_token_s = histogram(
            "time_to_first_token_seconds", "From a sample request's arrival to its first token.", _WAITS_S
        )
        self._inter_token_s = histogram(
            "inter_token_seconds", "Mean time between two tokens of a sample request's longest sample.", _TOKENS_S
        )
        self._places: Mapping[str, Gauge] = {
            "models_resident": gauge("models_resident", "Models in training on the device."),
            "models_places": gauge("models_places", "The most models in training on the device at once."),
            "samplers_resident": gauge("samplers_resident", "Samplers on the device."),
            "samplers_places": gauge("samplers_places", "The most samplers on the device at once."),
            "effects_since_snapshot": gauge(
                "effects_since_snapshot", "The most requests of one model that a recovery would replay."
            ),
        }
        self.restores = counter("model_restores", "Models that were restored from their snapshot and log.")
        self.sampler_loads = counter("sampler_loads", "Samplers that were loaded to the device.")
        self._snapshots = counter("snapshots", "Recovery snapshots.", "outcome")
        self.store_write_s = histogram("engine_store_write_seconds", "Commits of the engine to the store.", _WRITES_S)
        self._owner_tokens = counter("owner_tokens", "Tokens by owner (--metrics-owners).", "owner", "kind")

        # A rate cannot see the first event of a series that begins with it.
        for child in "loss", "gradient":
            self._nonfinite.labels(child)
        for child in "ok", "failed":
            self._snapshots.labels(child)

    def record_completion(
        self, kind: str, owner: str, request: Request | None, result: Result, *, created_at: float, started_at: float
    ) -> None:
        """Count a request that gets its result now. Times are seconds since the epoch."""
        now = time.time()
        kind, failure = _get_kind_label(kind, request), isinstance(result, Failure)
        outcome = f"{result.category}_error" if isinstance(result, Failure) else "ok"
        self._completed(kind, outcome).inc()
        self.totals["requests_failed" if failure else "requests_completed"] += 1
        if started_at >= created_at > 0:
            self._queue_s(kind).observe(started_at - created_at)
            self._run_s(kind).observe(max(now - started_at, 0.0))
        match result:
            case ForwardBackwardOutput():
                self._count_pass(kind, owner, result)
            case OptimStepOutput():
                self.totals["optim_steps"] += 1
            case SampleOutput() if isinstance(request, Sample):
                self._count_sample(owner, request, result)
            case Failure() if isinstance(request, Sample):
                self._samples.labels("error").inc(request.num_samples)
            case _:
                pass

    def _count_pass(self, kind: str, owner: str, result: ForwardBackwardOutput) -> None:
        num_tokens = result.metrics.get("num_tokens:sum", 0.0)
        self._tokens[kind].inc(num_tokens)
        self.totals["training_tokens"] += int(num_tokens)
        self._count_owner(owner, "training" if kind == "forward_backward" else kind, num_tokens)
        if not math.isfinite(result.metrics.get("loss:sum", 0.0)):
            self.count_nonfinite("loss")

    def _count_sample(self, owner: str, request: Sample, result: SampleOutput) -> None:
        cached = result.prompt.cache_hit_tokens
        num_tokens = sum(sequence.tokens.size for sequence in result.sequences)
        self._prompt_tokens.labels("true").inc(cached)
        self._prompt_tokens.labels("false").inc(max(request.prompt.size - cached, 0))
        self._generated.inc(num_tokens)
        self.totals["prompt_tokens"] += request.prompt.size
        self.totals["prompt_tokens_cached"] += cached
        self.totals["generation_tokens"] += num_tokens
        self._count_owner(owner, "prefill", request.prompt.size)
        self._count_owner(owner, "sampled", num_tokens)
        for sequence in result.sequences:
            self._samples.labels(sequence.stop_reason).inc()

    def _count_owner(self, owner: str, kind: str, num_tokens: float) -> None:
        owners = self._owners
        if owners is None:
            return
        if owner not in owners and len(owners) < _MAX_OWNERS:
            owners.add(owner)
        self._owner_tokens.labels(owner if owner in owners else _OTHERS, kind).inc(num_tokens)

    def observe_sample_latency(self, *, created_at: float, first_token_at: float, num_steps: int) -> None:
        """Observe the pace of a completed sample request, whose longest sample has `num_steps` tokens."""
        if created_at:
            self._first_token_s.observe(max(first_token_at - created_at, 0.0))
        if num_steps > 1:
            self._inter_token_s.observe(max(time.time() - first_token_at, 0.0) / (num_steps - 1))

    def count_cancelled(self, num_samples: int) -> None:
        """Count the samples of a request that its client cancelled."""
        self._samples.labels("cancelled").inc(num_samples)

    def count_nonfinite(self, what: Literal["loss", "gradient"]) -> None:
        """Count a loss, or the norm of a gradient, that is NaN or infinite."""
        self._nonfinite.labels(what).inc()
        self.totals["nonfinite"] += 1

    def count_snapshot(self, *, failed: bool) -> None:
        """Count a recovery snapshot."""
        self._snapshots.labels("failed" if failed else "ok").inc()

    def update_gauges(
        self,
        backend: Meters,
        call_seconds: Mapping[str, float],
        queues: Mapping[str, Mapping[str, int]],
        places: Mapping[str, int],
    ) -> Mapping[str, Any]:
        """Set the gauges; return all that is published with the status, as JSON.

        Args:
            backend: The state of the backend.
            call_seconds: The seconds so far in calls of the backend, by the name of the call.
            queues: For each queue the requests `waiting`, `paused` and `running`, `backlog_bytes` and
                `backlog_limit_bytes`.
            places: The models and samplers on the device, their places, and `effects_since_snapshot`.
        """
        seconds: dict[Work, float] = dict.fromkeys(get_args(Work), 0.0)
        for name, value in call_seconds.items():
            if (work := _WORK_BY_CALL.get(name)) is not None:
                seconds[work] += value
        self._backend.last, self._backend.seconds = backend, seconds
        for queue, values in queues.items():
            self._waiting.labels(queue).set(values["waiting"])
            self._paused.labels(queue).set(values["paused"])
            self._running.labels(queue).set(values["running"])
            self._backlog.labels(queue).set(values["backlog_bytes"])
            self._backlog_limit.labels(queue).set(values["backlog_limit_bytes"])
        for name, value in places.items():
            self._places[name].set(value)
        known = {name: value for name, value in asdict(backend).items() if value is not None}
        return {
            "totals": dict(self.totals),
            "device_seconds": seconds,
            "queues": queues,
            "places": places,
            "backend": known,
        }

    def _make_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="skyrl_tx", registry=self.registry)

    def _make_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace="skyrl_tx", registry=self.registry)

    def _make_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace="skyrl_tx", registry=self.registry, buckets=buckets)


def _get_kind_label(kind: str, request: Request | None) -> str:
    """Return the kind of a request for people: a pass is named by what it computes."""
    if kind != "model_pass":
        return kind
    is_backward = isinstance(request, ModelPass | Rejected) and request.backward
    return "forward_backward" if is_backward else "forward"


_log = logging.getLogger(__name__)
_PERIOD_S = 1.0


class StatusPublisher:
    """Writes the engine's current status to the database: at once when it changes, and every second."""

    def __init__(self, store: Store, boot_id: str, base_models: list[str], watchdog: Watchdog) -> None:
        self._store = store
        self._watchdog = watchdog
        self._base_models = base_models
        self._boot_id = boot_id
        self._status: EngineStatus = "starting"
        self._capabilities: Mapping[str, object] = {}
        self.sample_load: engine_state.SampleLoad | None = None
        """Published with the next status."""
        self.meters: Mapping[str, object] | None = None
        """Published with the next status."""
        self.pauses: Sequence[Pause] = ()
        """Published with the next status."""
        self._failure: StoreUnreachable | None = None
        self._ended = threading.Event()
        self._thread = ServiceThread("engine-status", self._repeat)

    def start(self) -> None:
        """Publish "starting", and go on publishing."""
        self._publish()
        self._thread.start()

    def set_status(self, status: EngineStatus, capabilities: Capabilities) -> None:
        """Change the status and publish it at once, with the capabilities that clients and operators see."""
        self._status = status
        self._capabilities = {
            "max_context_length": capabilities.max_context_length,
            "vocab_size": capabilities.vocab_size,
            "max_lora_rank": capabilities.max_lora_rank,
            "max_models": capabilities.max_models,
            "devices": list(capabilities.devices),
            "num_parameters": capabilities.num_parameters,
            "losses": sorted(capabilities.losses),
            "custom_losses": capabilities.offers_custom_losses,
            "eos_token_ids": list(capabilities.eos_token_ids),
            "max_topk_logprobs": capabilities.max_topk_logprobs,
            "fingerprint": dict(capabilities.fingerprint),
            "base_model_hash": capabilities.base_model_hash,
        }
        self._publish()

    def close(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise StoreUnreachable if the database was lost: this process cannot write any more."""
        if self._failure is not None:
            raise self._failure

    def _repeat(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            try:
                self._publish()
            except StoreUnreachable as error:
                self._failure = error
                self._store.wake()
                return
            except StoreError as error:
                _log.error("cannot write the engine's status; retrying: %s", error)

    def _publish(self) -> None:
        status, capabilities, load, meters = self._status, self._capabilities, self.sample_load, self.meters
        pauses, activity, detail = self.pauses, self._watchdog.describe_activity(), self._watchdog.overdue

        def work(tx: Session) -> None:
            now = engine_state.get_shared_time(tx)
            row = EngineStateRow(
                number=self._store.engine_number,
                host=socket.gethostname(),
                boot_id=self._boot_id,
                pid=os.getpid(),
                status=status,
                capabilities=capabilities,
                base_models=self._base_models,
                load=None if load is None else asdict(load),
                meters=meters,
                pauses=[asdict(pause) for pause in pauses] or None,
                detail=detail,
                activity="" if activity is None else activity[0],
                activity_since=None if activity is None else now - activity[1],
                updated_at=now,
            )
            engine_state.publish(tx, row)

        self._store.write(work)
