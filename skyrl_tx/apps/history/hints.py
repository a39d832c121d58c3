"""Find problems of a training run in its curves, and describe them for people."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from sqlmodel import Session

from skyrl_tx.apps.history.curves import OptimizerStep, Value
from skyrl_tx.apps.teams import usage
from skyrl_tx.apps.teams.usage import Total
from skyrl_tx.contract.ids import ModelId

_OTHERS = "other owners"
_SHORT_WINDOW, _LONG_WINDOW = 5, 50
"""Checks read the current values of a run from the last 5 steps, and its usual values from the last 50."""
_GRADIENT_FACTOR = 10.0
_MAX_KL = 0.05
_MAX_CLIPPED = 0.4
_MIN_SLOWDOWN = 2.0
_IDLE_S = 1800.0
_MAX_CUT_SHARE = 0.5
_MIN_SURPRISE = 0.1
_MIN_SHARE = 0.2
"""Hints name another user of the device only if it takes at least this share of the device time of all other users."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A message about something that is wrong with a run or missing from it, with advice. It is shown to people."""

    level: Literal["error", "warning", "note"]
    text: str
    advice: str
    step: int


@dataclass(frozen=True, slots=True)
class DeviceUser:
    """Another user of the device beside a given run, and its device time.

    This is another owner with all their runs, another run of the same owner, or the same owner's samples of the base
    model.
    """

    name: str
    """A name that the reader of the hint is allowed to see."""
    device_s: float


def find_hints(
    steps: Sequence[OptimizerStep], now: float, other_users: Sequence[DeviceUser] = (), *, has_reward: bool = True
) -> list[Hint]:
    """Return hints about the steps of a run, errors first. `steps` must be in order.

    `other_users` are the other users of the device since the time that `find_slow_since` returns.
    `has_reward` tells whether the client logs a reward.
    """
    if not steps:
        return []

    hints = [
        hint
        for hint in (
            # The training itself
            _check_finite(steps),
            _check_advantages(steps),
            _check_gradient(steps),
            _check_kl(steps),
            _check_clipping(steps),
            _check_learning_rate(steps),
            # Samples
            _check_cut_samples(steps),
            _check_certainty(steps),
            # Speed
            _check_slowness(steps, other_users),
            _check_idle(steps, now),
            None if has_reward else _check_reward(steps),
        )
        if hint is not None
    ]
    return sorted(hints, key=lambda hint: hint.level != "error")


def _list_values(steps: Sequence[OptimizerStep], name: str) -> list[tuple[int, Value]]:
    return [(step.step, step.values[name]) for step in steps if name in step.values]


def _list_known_values(steps: Sequence[OptimizerStep], name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in _list_values(steps, name) if value is not None]


def _format_span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _check_finite(steps: Sequence[OptimizerStep]) -> Hint | None:
    for name, label in (("loss_sum", "loss"), ("grad_norm", "gradient norm")):
        last = _list_values(steps, name)[-_LONG_WINDOW:]
        bad = [step for step, value in last if value is None]
        if bad:
            text = f"The {label} was NaN or infinite in {_format_span(bad[0], bad[-1])}."
            advice = "Load the last good checkpoint, and lower the learning rate or set grad_clip_norm."
            return Hint("error", text, advice, bad[0])
    return None


def _check_advantages(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "nonzero_advantages")
    zero_steps: list[int] = []
    for step, number in reversed(known):
        if number:
            break
        zero_steps.append(step)
    if len(zero_steps) < _SHORT_WINDOW:
        return None
    span = _format_span(zero_steps[-1], zero_steps[0])
    return Hint(
        "warning",
        f"All advantages were 0 in {span}: all samples of a group got the same reward, so the model learns nothing.",
        "Choose problems that the model solves sometimes, or use larger groups.",
        zero_steps[-1],
    )


def _check_gradient(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "grad_norm")[-_LONG_WINDOW:]
    if len(known) < 2 * _SHORT_WINDOW:
        return None
    usual = median(value for _, value in known)
    step, greatest = max(known[-_SHORT_WINDOW:], key=lambda pair: pair[1])
    if not usual or greatest < _GRADIENT_FACTOR * usual:
        return None
    return Hint(
        "warning",
        f"The gradient norm was {greatest:.3g} at step {step}, {greatest / usual:.0f} times its median {usual:.3g}.",
        "Check the data of this step. grad_clip_norm limits the size of such updates.",
        step,
    )


def _check_kl(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "kl_to_sampler")[-_SHORT_WINDOW:]
    if len(known) < _SHORT_WINDOW or min(value for _, value in known) <= _MAX_KL or known[-1][1] <= known[0][1]:
        return None
    return Hint(
        "warning",
        f"The KL divergence to the sampler is {known[-1][1]:.3g} and rising.",
        "Sample from newer weights, make fewer updates per batch, or lower the learning rate.",
        known[0][0],
    )


def _check_clipping(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "clip_fraction")[-_SHORT_WINDOW:]
    if len(known) < _SHORT_WINDOW or min(value for _, value in known) <= _MAX_CLIPPED:
        return None
    return Hint(
        "warning",
        f"{known[-1][1]:.0%} of the ratios are clipped. Clipped tokens do not contribute to the gradient.",
        "Make fewer updates per batch, or lower the learning rate.",
        known[0][0],
    )


def _check_learning_rate(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "learning_rate")[-_SHORT_WINDOW:]
    if len(known) < min(_SHORT_WINDOW, len(steps)) or not known or any(value for _, value in known):
        return None
    return Hint(
        "warning",
        "The learning rate is 0, so optimizer steps do not change the weights.",
        "Check the learning rate schedule.",
        known[0][0],
    )


def _check_cut_samples(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "cut_share")[-_SHORT_WINDOW:]
    if len(known) < _SHORT_WINDOW or (share := sum(value for _, value in known) / len(known)) <= _MAX_CUT_SHARE:
        return None
    return Hint(
        "warning",
        f"{share:.0%} of the samples of {_format_span(known[0][0], known[-1][0])} were cut off by max_tokens.",
        "Unfinished answers are being rewarded: raise max_tokens, or reward shorter answers.",
        known[0][0],
    )


def _check_certainty(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "surprise")[-_SHORT_WINDOW:]
    if len(known) < _SHORT_WINDOW or max(value for _, value in known) >= _MIN_SURPRISE:
        return None
    return Hint(
        "warning",
        f"The mean -log p of sampled tokens is {known[-1][1]:.2g}: samples of one prompt are nearly identical.",
        "If this is not intended, go back to an earlier checkpoint, and lower the learning rate or add a KL penalty.",
        known[0][0],
    )


@dataclass(frozen=True, slots=True)
class _Slowness:
    """How much longer the newest steps take than the steps before them."""

    usual_s: float
    recent_s: float
    is_queueing: bool
    """Whether more than half of the additional time per step is time in the queue for the device."""
    first: OptimizerStep
    """The first of the newest steps."""


def _measure_slowness(steps: Sequence[OptimizerStep]) -> _Slowness | None:
    """Compare the newest steps with the steps before. Returns None if they are not much slower."""
    done = [step for step in steps[-2 * _LONG_WINDOW :] if step.is_applied and step.passes][-_LONG_WINDOW:]
    if len(done) < 4 * _SHORT_WINDOW:
        return None
    before, newest = done[:-_SHORT_WINDOW], done[-_SHORT_WINDOW:]
    usual, recent = median(step.wall_s for step in before), median(step.wall_s for step in newest)
    if not usual or recent < _MIN_SLOWDOWN * usual or recent < 1.0:
        return None
    waited = median(step.queue_s for step in newest) - median(step.queue_s for step in before)
    return _Slowness(usual, recent, waited > (recent - usual) / 2, newest[0])


def find_slow_since(steps: Sequence[OptimizerStep]) -> float | None:
    """Return the time since which steps wait longer for the device than before, or None."""
    slow = _measure_slowness(steps)
    return slow.first.began_at if slow is not None and slow.is_queueing else None


def _check_slowness(steps: Sequence[OptimizerStep], other_users: Sequence[DeviceUser]) -> Hint | None:
    slow = _measure_slowness(steps)
    if slow is None:
        return None
    reason = (
        "they wait for the device" if slow.is_queueing else "the requests take longer, or the client waits between them"
    )
    if slow.is_queueing and (names := name_main_users(other_users)):
        reason += f", which is used by {names}"
    return Hint(
        "warning",
        f"Steps take {slow.recent_s:.1f} s, {slow.recent_s / slow.usual_s:.1f} times as long as before: {reason}.",
        "See the overview page for the users of the device.",
        slow.first.step,
    )


def name_main_users(users: Sequence[DeviceUser]) -> str:
    """Return the names of the users with the most device time.

    Each name is followed by its percentage of the device time of all these users, for example "bob (70%)".
    """
    total = sum(user.device_s for user in users)
    main_users = [user for user in users if user.device_s >= _MIN_SHARE * total][:3]
    return ", ".join(f"{user.name} ({user.device_s / total:.0%})" for user in main_users)


def _check_idle(steps: Sequence[OptimizerStep], now: float) -> Hint | None:
    last = steps[-1]
    if last.is_applied or not last.passes or now - last.at < _IDLE_S:
        return None
    minutes = (now - last.at) / 60
    return Hint(
        "warning",
        f"Step {last.step} has {last.passes} forward_backward requests but no optim_step, and its last request ended "
        f"{minutes:.0f} minutes ago.",
        "Check whether the client is still running.",
        last.step,
    )


def _check_reward(steps: Sequence[OptimizerStep]) -> Hint | None:
    known = _list_known_values(steps, "nonzero_advantages")
    if not known:
        return None
    return Hint(
        "note",
        "This run has advantages, but no reward is logged to this server.",
        "To see rewards here, send them to this server: in a loop of your own with "
        'training_client.get_telemetry().log("metrics", {"step": step, "reward": reward}), in a recipe of '
        "tinker-cookbook with trackio (set TRACKIO_SERVER_URL to the address of this server with /trackio at its end, "
        "and TRACKIO_WRITE_TOKEN to your API key).",
        known[0][0],
    )


def find_device_users(
    tx: Session,
    since: float,
    model_id: ModelId,
    owner: str,
    may_see: Callable[[str], bool],
    until: float | None = None,
) -> Sequence[DeviceUser]:
    """Return the users of the device since a time, except for the given run, heaviest user first.

    `may_see` tells whether the reader may see the name of an owner.
    """
    totals = usage.read_totals(tx, None, since, ("owner", "model_id"), until=until)
    return sum_device_users(totals, model_id, owner, may_see)


def sum_device_users(
    totals: Sequence[Total], model_id: str, owner: str, may_see: Callable[[str], bool]
) -> list[DeviceUser]:
    """Add up device seconds by user (see `DeviceUser`), without the given run.

    All owners whose names the reader may not see count as one user, "other owners".
    """
    seconds: dict[str, float] = {}
    for total in totals:
        user, model = total.group
        if user == owner and model == model_id:
            continue
        if user != owner:
            name = str(user) if may_see(user) else _OTHERS
        else:
            name = f"{owner}'s run {model}" if model else f"{owner}'s samples of base weights"
        seconds[name] = seconds.get(name, 0.0) + total.device_s
    users = [DeviceUser(name, device_s) for name, device_s in seconds.items() if device_s > 0]
    return sorted(users, key=lambda user: (-user.device_s, user.name))
