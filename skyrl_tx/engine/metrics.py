"""The engine's metrics and status.

`EngineMetrics` counts when a result is committed, and the loop updates its gauges once a second.
`StatusPublisher` writes the engine's status to the database, where the API reads it.

Metric names follow the conventions of Prometheus and vLLM: the prefix `skyrl_tx_`, base units, and
`_total` for counters. No label contains an owner, model, session or path. The only exception is
`owner_tokens` with `--metrics-owners`.
"""

import logging
import math
import os
import socket
import threading
import time
from collections import Counter as Totals
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from skyrl_tx.process.progress import get_progress
from skyrl_tx.process.signals import ServiceThread
from skyrl_tx.store import StoreError, StoreUnreachable, engine_state
from skyrl_tx.store.database import Store
from skyrl_tx.store.engine_state import Pause
from skyrl_tx.store.tables import EngineStateRow, EngineStatus

_log = logging.getLogger(__name__)
_STATUS_PERIOD_S = 1.0

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
"""The kind of work of each backend call, by its name in `LoopActivity`.

Other calls take no noticeable time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokenCounts:
    """The tokens of a sample request so far, also of a request that was cancelled."""

    prompt: int
    """Prompt tokens that were computed."""
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    sampled: int


class _BackendMeters(Collector):
    """Exports the last `Meters` of the backend.

    A meter that the backend does not report has no sample.
    """

    _GAUGES: Mapping[str, str] = {
        "decode_slots": "Samples that can decode at the same time.",
        "decode_slots_used": "Samples that are decoding.",
        "kv_cache_tokens": "Size of the KV cache in tokens.",
        "kv_cache_tokens_used": "Tokens of KV cache pages that prompts and samples use. A shared page counts once.",
        "prefix_cache_tokens": "Tokens of KV cache pages that hold cached prompts, including their states.",
        "sampler_servers_lost": "Sampling servers that do not respond.",
        "trainer_gap_max_nats": "Largest difference between sampler and trainer log-probabilities so far.",
    }
    _COUNTERS: Mapping[str, str] = {
        "compilations": "Programs that were compiled, or read from a compilation cache.",
        "compile_seconds": "Seconds spent compiling.",
        "out_of_memory_retries": (
            "Passes that were restarted with smaller micro-batches because a device was out of memory."
        ),
        "micro_batches": "Micro-batches of passes that the device computed.",
        "padding_tokens": "Tokens of micro-batches that were padding.",
        "shared_tokens": "Tokens of passes that were not computed, because another example begins with them.",
        "fallback_samples": (
            "Samples that the trainer drew because all servers of its sampler were lost (--sampler-fallback trainer)."
        ),
        "compared_tokens": (
            "Sampled tokens whose log-probabilities were compared with the trainer's (--sampler-check-share)."
        ),
        "trainer_gap_nats": (
            "Sum of the absolute differences of log-probabilities. Divide by compared_tokens to get the mean."
        ),
    }

    def __init__(self) -> None:
        self.last = Meters()
        self.seconds: Mapping[Work, float] = {}

    def collect(self) -> Iterator[Metric]:
        meters = self.last
        for name, text in self._GAUGES.items():
            yield GaugeMetricFamily(f"skyrl_tx_{name}", text, value=getattr(meters, name))
        for name, text in self._COUNTERS.items():
            yield CounterMetricFamily(f"skyrl_tx_{name}", text, value=getattr(meters, name))

        # Memory of each device.
        used = GaugeMetricFamily("skyrl_tx_device_memory_bytes", "Memory of a device in use.", labels=["device"])
        limit = GaugeMetricFamily("skyrl_tx_device_memory_limit_bytes", "Memory of a device.", labels=["device"])
        for number, memory in enumerate(meters.device_memory):
            used.add_metric([str(number)], memory.used_bytes)
            limit.add_metric([str(number)], memory.limit_bytes)

        # Time by kind of work.
        seconds = CounterMetricFamily(
            "skyrl_tx_device_seconds", "Seconds that the engine's loop spent in backend calls.", labels=["work"]
        )
        for work, value in self.seconds.items():
            seconds.add_metric([work], value)
        yield from (used, limit, seconds)


class _ResidentMemory(Collector):
    """Exports the resident memory of the engine process, as `ProcessCollector` reports it."""

    def __init__(self) -> None:
        self._process = ProcessCollector(namespace="skyrl_tx_engine", registry=None)

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._process.collect() if family.name.endswith("_resident_memory_bytes"))


class EngineMetrics:
    """All metrics of one engine.

    The engine's thread updates them, any thread may read the registry. `totals` holds the counts
    that are published with the engine's status.
    """

    def __init__(self, *, with_owners: bool = False) -> None:
        """`with_owners`: also count tokens by owner."""
        self.registry = CollectorRegistry()
        self.totals: Totals[str] = Totals()
        self._backend = _BackendMeters()
        self._owners: set[str] | None = set() if with_owners else None
        self.registry.register(self._backend)
        self.registry.register(_ResidentMemory())
        counter, gauge, histogram = self._make_counter, self._make_gauge, self._make_histogram

        # Requests. Labels are cached, because looking them up takes longer than counting.
        completed = counter("requests_completed", "Requests with a committed result.", "kind", "outcome")
        queue_s = histogram("request_queue_seconds", "Time from arrival to the start of execution.", _WAITS_S, "kind")
        run_s = histogram("request_run_seconds", "Time from the start of execution to the result.", _WAITS_S, "kind")
        self._completed = cache(completed.labels)
        self._queue_s = cache(queue_s.labels)
        self._run_s = cache(run_s.labels)
        self._queues: Mapping[str, Gauge] = {
            "waiting": gauge("requests_waiting", "Requests that have not started.", "queue"),
            "paused": gauge("requests_paused", "Requests that wait because of a quota.", "queue"),
            "running": gauge("requests_running", "Requests that have started.", "queue"),
            "backlog_bytes": gauge("backlog_bytes", "Memory used by waiting requests.", "queue"),
            "backlog_limit_bytes": gauge("backlog_limit_bytes", "Memory limit for waiting requests.", "queue"),
        }

        # Training.
        tokens = counter("training_tokens", "Tokens of completed passes.", "pass")
        self._tokens = {kind: tokens.labels(label) for kind, label in _PASSES.items()}
        self._nonfinite = counter("nonfinite", "Losses and gradient norms that were NaN or infinite.", "what")

        # Sampling.
        self._samples = counter("samples_finished", "Samples that ended.", "reason")
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of completed and cancelled sample requests.", "cached"
        )
        self._generated = counter("generation_tokens", "Sampled tokens of completed and cancelled requests.")
        self._first_token_s = histogram(
            "time_to_first_token_seconds", "Time from the arrival of a sample request to its first token.", _WAITS_S
        )
        self._inter_token_s = histogram(
            "inter_token_seconds", "Mean time between two tokens of the longest sample of a request.", _TOKENS_S
        )

        # Models and samplers on the device.
        self._places: Mapping[str, Gauge] = {
            "models_resident": gauge("models_resident", "Models in training on the device."),
            "models_places": gauge("models_places", "Maximum number of models in training on the device."),
            "samplers_resident": gauge("samplers_resident", "Samplers on the device."),
            "samplers_places": gauge("samplers_places", "Maximum number of samplers on the device."),
            "effects_since_snapshot": gauge(
                "effects_since_snapshot", "Largest number of requests of one model that a recovery would replay."
            ),
        }
        self.restores = counter("model_restores", "Models that were restored from their snapshot and the log.")
        self.sampler_loads = counter("sampler_loads", "Samplers that were loaded onto the device.")

        # Storage and owners.
        self._snapshots = counter("snapshots", "Recovery snapshots.", "outcome")
        self.store_write_s = histogram("engine_store_write_seconds", "Time of a database commit.", _WRITES_S)
        self._owner_tokens = counter("owner_tokens", "Tokens by owner (--metrics-owners).", "owner", "kind")

        # Create these series now: a rate does not see the first event of a series that starts with
        # it.
        for child in "loss", "gradient":
            self._nonfinite.labels(child)
        for child in "ok", "failed":
            self._snapshots.labels(child)

    def record_completion(
        self, kind: str, owner: str, request: Request | None, result: Result, *, created_at: float, started_at: float
    ) -> None:
        """Count a request that has its result now. Times are seconds since the epoch."""
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
                for sequence in result.sequences:
                    self._samples.labels(sequence.stop_reason).inc()
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

    def count_drawn(self, owner: str, drawn: SampledTokenCounts) -> None:
        """Count the tokens of a sample request that has ended or was cancelled."""
        num_prompt = drawn.prompt + drawn.cached
        self._prompt_tokens.labels("true").inc(drawn.cached)
        self._prompt_tokens.labels("false").inc(drawn.prompt)
        self._generated.inc(drawn.sampled)
        self.totals["prompt_tokens"] += num_prompt
        self.totals["prompt_tokens_cached"] += drawn.cached
        self.totals["generation_tokens"] += drawn.sampled
        self._count_owner(owner, "prefill", num_prompt)
        self._count_owner(owner, "sampled", drawn.sampled)

    def _count_owner(self, owner: str, kind: str, num_tokens: float) -> None:
        owners = self._owners
        if owners is None:
            return
        if owner not in owners and len(owners) < _MAX_OWNERS:
            owners.add(owner)
        self._owner_tokens.labels(owner if owner in owners else _OTHERS, kind).inc(num_tokens)

    def observe_sample_latency(self, *, created_at: float, first_token_at: float, num_steps: int) -> None:
        """Observe the latencies of a sample request whose longest sample has `num_steps` tokens."""
        if created_at:
            self._first_token_s.observe(max(first_token_at - created_at, 0.0))
        if num_steps > 1:
            self._inter_token_s.observe(max(time.time() - first_token_at, 0.0) / (num_steps - 1))

    def count_cancelled(self, num_samples: int) -> None:
        """Count the samples of a request that its client cancelled."""
        self._samples.labels("cancelled").inc(num_samples)

    def count_nonfinite(self, what: Literal["loss", "gradient"]) -> None:
        """Count a loss or a gradient norm that is NaN or infinite."""
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
        """Set the gauges. Returns the JSON values that are published with the status.

        Args:
            backend: The meters of the backend.
            call_seconds: Total seconds in backend calls, by the name of the call.
            queues: For `training` and `sampling`, the number of requests that are `waiting`,
                `paused` and `running`, and `backlog_bytes` and `backlog_limit_bytes`.
            places: Number and maximum number of the models and samplers on the device, and
                `effects_since_snapshot`.
        """
        # The backend's meters, and its time by kind of work.
        seconds: dict[Work, float] = dict.fromkeys(get_args(Work), 0.0)
        for name, value in call_seconds.items():
            if (work := _WORK_BY_CALL.get(name)) is not None:
                seconds[work] += value
        self._backend.last, self._backend.seconds = backend, seconds

        # The queues, and the models and samplers on the device.
        for queue, values in queues.items():
            for name, value in values.items():
                self._queues[name].labels(queue).set(value)
        for name, value in places.items():
            self._places[name].set(value)

        reported = {name: value for name, value in asdict(backend).items() if value is not None}
        return {
            "totals": dict(self.totals),
            "device_seconds": seconds,
            "queues": queues,
            "places": places,
            "backend": reported,
        }

    def _make_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="skyrl_tx", registry=self.registry)

    def _make_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace="skyrl_tx", registry=self.registry)

    def _make_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace="skyrl_tx", registry=self.registry, buckets=buckets)


def _get_kind_label(kind: str, request: Request | None) -> str:
    """Return the `kind` label of a request. A pass is labeled forward or forward_backward."""
    if kind != "model_pass":
        return kind
    is_backward = isinstance(request, ModelPass | Rejected) and request.backward
    return "forward_backward" if is_backward else "forward"


class StatusPublisher:
    """Writes the engine's status to the database: every second, and immediately when it changes."""

    def __init__(self, store: Store, boot_id: str, base_models: list[str], watchdog: Watchdog) -> None:
        self._store = store
        self._watchdog = watchdog
        self._base_models = base_models
        self._boot_id = boot_id
        self._status: EngineStatus = "starting"
        self._capabilities: Mapping[str, object] = {}
        self.sample_load: engine_state.SampleLoad | None = None
        """Part of the next published status, like `meters` and `pauses`."""
        self.meters: Mapping[str, object] | None = None
        self.pauses: Sequence[Pause] = ()
        self._failure: StoreUnreachable | None = None
        self._ended = threading.Event()
        self._thread = ServiceThread("engine-status", self._repeat)

    def start(self) -> None:
        """Publish the status `starting`, and start the thread that publishes every second."""
        self._publish()
        self._thread.start()

    def set_status(self, status: EngineStatus, capabilities: Capabilities) -> None:
        """Change the status and publish it, with the capabilities that clients can see."""
        self._status = status

        self._capabilities = {
            "max_context_length": capabilities.max_context_length,
            "vocab_size": capabilities.vocab_size,
            "max_lora_rank": capabilities.max_lora_rank,
            "max_models": capabilities.max_models,
            "max_samplers": capabilities.max_samplers,
            "devices": list(capabilities.devices),
            "num_parameters": capabilities.num_parameters,
            # What requests may ask for
            "losses": sorted(capabilities.losses),
            "custom_losses": capabilities.offers_custom_losses,
            "eos_token_ids": list(capabilities.eos_token_ids),
            "max_topk_logprobs": capabilities.max_topk_logprobs,
            "sampling_controls": sorted(capabilities.sampling_controls),
            "sampled_logprobs": sorted(capabilities.sampled_logprobs),
            "fingerprint": dict(capabilities.fingerprint),
            "base_model_hash": capabilities.base_model_hash,
        }
        self._publish()

    def close(self) -> None:
        """Stop publishing."""
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raise StoreUnreachable if the database is lost, so that the engine ends."""
        if self._failure is not None:
            raise self._failure

    def _repeat(self) -> None:
        while not self._ended.wait(_STATUS_PERIOD_S):
            try:
                self._publish()
            except StoreUnreachable as error:
                self._failure = error
                self._store.wake()
                return
            except StoreError as error:
                _log.error("cannot write the engine's status; retrying: %s", error)

    def _publish(self) -> None:
        """Write the status to the database."""
        # Read the fields now: the loop may change them before the transaction runs.
        status, capabilities, load, meters = self._status, self._capabilities, self.sample_load, self.meters
        pauses, activity, detail = self.pauses, self._watchdog.describe_activity(), self._watchdog.overdue
        detail = detail or get_progress() or ""

        def work(tx: Session) -> None:
            now = engine_state.get_shared_time(tx)
            row = EngineStateRow(
                # The engine and its process.
                number=self._store.engine_number,
                host=socket.gethostname(),
                boot_id=self._boot_id,
                pid=os.getpid(),
                # Its state.
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
