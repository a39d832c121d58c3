"""The Prometheus metrics of one API process.

Requests only update counters and `HttpGroup`, which takes about a microsecond each. `ServerMonitor`
sets the gauges, so that a scrape reads neither the database nor the disk.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from skyrl_tx import __version__
from skyrl_tx.server.errors import Refusal
from skyrl_tx.server.identity.scopes import API_PREFIX

_AUTH_REASONS = "missing_key", "wrong_key", "ended_key", "throttled", "scope"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 15.0, 45.0)
_WAKEUPS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_WRITES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)

_PATHS: Mapping[str, tuple[str, ...]] = {
    "poll": ("retrieve_future", "retrieve_futures"),
    "train": ("forward", "forward_backward", "optim_step"),
    "sample": ("asample", "create_sampling_session", "join_sampling_session", "cancel_future"),
    "weights": ("save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights", "copy_weights"),
    "session": (
        "create_session",
        "session_heartbeat",
        "create_model",
        "unload_model",
        "auth/token",
        "telemetry",
        "create_custom_loss",
    ),
}
"""The paths of each group of routes, without the prefix of the API."""
_FIRST_PARTS: Mapping[str, str] = {
    "api": "manage",
    "metrics": "metrics",
    **dict.fromkeys(("oai", "v1", "anthropic"), "chat"),
}
"""The groups of other paths by their first part.

All remaining paths, such as pages and unknown paths, belong to the group `other`.
"""


class HttpGroup:
    """The metrics of one group of routes."""

    def __init__(self, name: str, requests: Counter, seconds: Histogram) -> None:
        # Look up the labels only once, because the look-up takes longer than counting.
        self.observe_seconds: Callable[[float], None] = seconds.labels(name).observe
        self.get_counter = cache(partial(requests.labels, name))


class HttpGroups:
    """Maps each path to its group.

    Paths are not used as labels, because clients can make up any number.
    """

    def __init__(self, make: Callable[[str], HttpGroup]) -> None:
        names = dict.fromkeys([*_PATHS, *_FIRST_PARTS.values(), "other"])
        groups = {name: make(name) for name in names}
        self.known = {f"{API_PREFIX}/{path}": groups[name] for name, paths in _PATHS.items() for path in paths}
        self._by_first_part = {part: groups[name] for part, name in _FIRST_PARTS.items()}
        self._other = groups["other"]

    def get_by_first_part(self, path: str) -> HttpGroup:
        """Return the group of a path that is not in `known`."""
        return self._by_first_part.get(path[1:].partition("/")[0], self._other)


class ApiMetrics:
    """All metrics of one API process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        counter, gauge, histogram = self._make_counter, self._make_gauge, self._make_histogram

        # Requests by group of routes
        http_requests = counter("http_requests", "HTTP responses, by group of routes and status.", "group", "code")
        http_seconds = histogram(
            "http_request_duration_seconds", "From head to end of the response.", _SECONDS, "group"
        )
        self.http = HttpGroups(lambda name: HttpGroup(name, http_requests, http_seconds))

        # Long polls, refusals and commits
        self.polls_waiting = gauge("polls_waiting", "Open long polls.")
        self.poll_wakeup_s = histogram(
            "poll_wakeup_seconds", "From a result's commit to the wake-up of its long poll.", _WAKEUPS_S
        )
        self._backpressure = counter(
            "backpressure", "Requests that were refused and should be sent again later.", "reason"
        )
        self._auth_failures = counter("auth_failures", "Calls that were refused because of their API key.", "reason")
        self.store_write_s = histogram("store_write_seconds", "Commits of the API to the store.", _WRITES_S)
        for reason in _AUTH_REASONS:
            self._auth_failures.labels(reason)
        for reason in ("queue_full", "bodies_full", "calls_full", "quota"):
            self._backpressure.labels(reason)

        # Set by ServerMonitor
        self.oldest_request_s = gauge(
            "oldest_request_seconds", "Age of the oldest request that has no result and is not waiting for a quota."
        )
        self.sessions_active = gauge("sessions_active", "Sessions with a heartbeat in the last minute.")
        self.store_bytes = gauge("store_bytes", "Size of the SQLite database and of its log.", "part")
        self.disk_free = gauge("disk_free_bytes", "Free space of the disk of the data directory.")
        self.engine_up = gauge("engine_up", "Whether the engine sent its metrics within a second.")
        self.engine_ready = gauge("engine_ready", "Whether the engine executes requests, by its published status.")
        self.engine_starts = counter("engine_starts", "Starts of the engine that this process noticed.")

        self._build = Info("build", "The release.", namespace="skyrl_tx", registry=self.registry)
        self._build.info({"version": __version__})

    def count_refusal(self, reason: Refusal | None) -> None:
        """Count a refused request, if its refusal has a reason."""
        if reason in _AUTH_REASONS:
            self._auth_failures.labels(reason).inc()
        elif reason is not None:
            self._backpressure.labels(reason).inc()

    def _make_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace="skyrl_tx", registry=self.registry)

    def _make_gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace="skyrl_tx", registry=self.registry)

    def _make_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, text, labels, namespace="skyrl_tx", registry=self.registry, buckets=buckets)
