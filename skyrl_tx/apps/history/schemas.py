"""Request and response schemas of the endpoints for metrics."""

import math
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field

from skyrl_tx.server.schemas.base import Name, Response, WireModel

MAX_METRICS = 256
"""Limit on the metrics in one point."""
MAX_NAME_LENGTH = 200
"""Limit on the characters in the name of a metric, run or project."""
MAX_STEP = 2**53
"""Limit on steps. Larger integers are rounded by JSON readers that use floats."""

Values = dict[str, float | None]


def _check_metric_count(value: object) -> object:
    """Raise ValueError if an object has too many names.

    Runs before its values are validated, to save time.
    """
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
    """The same in all retries of a request.

    Default: the `X-Idempotency-Key` header, or a random id.
    """


class JoinRunRequest(WireModel):
    """The training run that a logged run belongs to, or null for none."""

    training_run_id: Name | None


class RunPoint(Response):
    """One completed request of a run, with its metrics and times. Times are Unix seconds."""

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
    """A page of a run's points, in order of arrival. Pass `cursor` to get the next page.

    Times are Unix seconds.
    """

    training_run_id: str
    points: list[RunPoint]
    logged: list[LoggedMetrics]
    cursor: str
    has_more: bool


class LoggedMetricsResponse(Response):
    """A page of a logged run's points, in order of arrival. Pass `cursor` to get the next page."""

    logged: list[LoggedMetrics]
    cursor: int
    has_more: bool


class LoggedRunResponse(Response):
    """A run of a client's logger, and the training run that it belongs to, if known."""

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
    """A page of logged runs, most recently written first."""

    logged_runs: list[LoggedRunResponse]
