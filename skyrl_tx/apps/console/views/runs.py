"""View models of runs, their steps and their requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_tx.apps.console.format import short_id
from skyrl_tx.apps.console.queries import RequestLine, RunLine
from skyrl_tx.apps.history.curves.series import Step, spark
from skyrl_tx.contract import codec
from skyrl_tx.contract.requests import ModelSpec
from skyrl_tx.contract.results import Failure

_ACTIVE_S = 60.0
_STATES = {"unloaded": "ended", "creating": "loading"}


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as lists and headings show it."""

    line: RunLine
    name: str
    rank: int
    optimizer: str
    state: str
    step: int
    loss: float | None
    loss_spark: str
    reward: float | None
    reward_spark: str
    tokens: int | None


def run_view(
    line: RunLine,
    *,
    steps: Sequence[Step] = (),
    rewards: Sequence[float | None] = (),
    logged_name: str | None = None,
    tokens: int | None = None,
    now: float,
) -> RunView:
    """Describe a run. `steps` are its newest ones, in order."""
    spec = codec.decode(line.spec)
    assert isinstance(spec, ModelSpec)
    losses = [step.values["loss"] for step in steps if "loss" in step.values]
    return RunView(
        line=line,
        name=logged_name or line.display_name or short_id(line.model_id),
        rank=spec.lora.rank,
        optimizer=spec.optimizer,
        state=run_state(line.status, line.last_request_at, now, has_finished=line.finished_at is not None),
        step=max(line.num_steps, max((step.step for step in steps if step.is_applied), default=0)),
        loss=losses[-1] if losses else None,
        loss_spark=spark(losses),
        reward=rewards[-1] if rewards else None,
        reward_spark=spark(rewards),
        tokens=tokens,
    )


def run_state(status: str, last_request_at: float, now: float, *, has_finished: bool = False) -> str:
    """Return what a run does in one word; `has_finished` is whether its session has."""
    if status != "ready":
        return _STATES.get(status, status)
    if has_finished:
        return "ended"
    return "training" if now - last_request_at < _ACTIVE_S else "idle"


def reward_of(values: Mapping[str, float | None]) -> float | None:
    """Return the reward among metrics that a client logged, under any of its usual names; None without one."""
    named = [name for name in values if "reward" in name.lower()]
    exact = [
        name for name in named if name.lower().rpartition("/")[2] in ("reward", "reward_mean", "mean_reward", "total")
    ]
    return values[(exact or named)[0]] if named else None


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as lists show it."""

    line: RequestLine
    problem: str
    category: str
    queue_s: float | None
    run_s: float | None


def request_view(line: RequestLine) -> RequestView:
    """Describe a request, with the error if it failed."""
    problem = category = ""
    if line.status == "failed" and line.result is not None:
        try:
            result = codec.decode(line.result)
        except codec.CodecError:
            problem = "the stored error is damaged"
        else:
            if isinstance(result, Failure):
                problem, category = result.message, result.category
    started = line.started_at
    return RequestView(
        line=line,
        problem=problem,
        category=category,
        queue_s=None if started is None else started - line.created_at,
        run_s=None if started is None or line.completed_at is None else line.completed_at - started,
    )
