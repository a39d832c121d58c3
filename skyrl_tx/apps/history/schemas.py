"""Schemas of metrics: those that clients log, and the series of a run."""

import math
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from skyrl_tx.server.schemas.base import Name, Response, WireModel

MAX_METRICS = 256
"""Names in one point."""
MAX_NAME_LENGTH = 200
"""Characters of a metric's name, a run's name and a project's."""
MAX_STEP = 2**53
"""Beyond, JSON readers round."""

Values = dict[str, float | None]


def _check_metric_count(value: object) -> object:
    """Refuse an object with many names, before its values are validated. Raises ValueError."""
    if isinstance(value, dict) and len(cast(dict[str, object], value)) > MAX_METRICS:
        raise ValueError(f"must have at most {MAX_METRICS} names")
    return cast(object, value)


def _replace_non_finite(values: Values) -> Values:
    return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}


MetricName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
_Number = Annotated[float, Field(allow_inf_nan=True)]


class LogMetricsRequest(WireModel):
    """Metrics of one step. NaN and infinity are stored as null."""

    step: Annotated[int, Field(ge=-MAX_STEP, le=MAX_STEP)]
    metrics: Annotated[
        dict[MetricName, _Number | None], BeforeValidator(_check_metric_count), AfterValidator(_replace_non_finite)
    ]
    log_id: Annotated[Name, Field(min_length=1)] | None = None
    """Equal in all retries; default: the `X-Idempotency-Key` header, or a random one."""


class JoinRunRequest(WireModel):
    """The training run that a logged run belongs to; null separates them."""

    training_run_id: Name | None


class RunPoint(Response):
    """One completed request of a run: its metrics, and when and for how long it ran."""

    kind: Literal["train", "forward", "step"]
    step: int
    created_at: float
    started_at: float
    at: float
    device_s: float
    tokens: int
    datums: int
    metrics: Values


class LoggedMetrics(Response):
    """Metrics that a client logged for one step."""

    project: str
    run: str
    step: int
    at: float
    metrics: Values


class MetricsResponse(Response):
    """A page of a run's points, each list in order of arrival. `cursor` continues after it; times are Unix seconds."""

    training_run_id: str
    points: list[RunPoint]
    logged: list[LoggedMetrics]
    cursor: str
    has_more: bool


class LoggedMetricsResponse(Response):
    """A page of a logged run's points."""

    logged: list[LoggedMetrics]
    cursor: int
    has_more: bool


class LoggedRunResponse(Response):
    """A run as a client's logger names it, and the training run that it belongs to, if that is known."""

    logged_run_id: int
    project: str
    name: str
    owner: str
    training_run_id: str | None
    config: dict[str, object]
    num_points: int
    created_at: float
    last_at: float


class LoggedRunsResponse(Response):
    """A page of logged runs, the most recently written first."""

    logged_runs: list[LoggedRunResponse]
