"""Find problems of a training run, and describe them for people.

Problems of the training are found in the curves of the run. What slows the run down is found in the
time of its iterations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Literal

from sqlmodel import Session

from skyrl_tx.apps.history.breakdown import Breakdown, DeviceUser, find_device_users, read_breakdown
from skyrl_tx.apps.history.curves import OptimizerStep, Value
from skyrl_tx.contract.ids import ModelId, SessionId
from skyrl_tx.store import models, sessions

# Checks of curves
_SHORT_WINDOW, _LONG_WINDOW = 5, 50
"""Checks read the current values of a run from the last 5 steps, and its usual values from the last 50."""
_GRADIENT_FACTOR = 10.0
_MAX_KL = 0.05
_MAX_CLIPPED = 0.4
_MIN_SLOWDOWN = 2.0
_IDLE_S = 1800.0
_MAX_CUT_SHARE = 0.5
_MIN_SURPRISE = 0.1
_MIN_USER_SHARE = 0.2
"""Hints name another user of the device only if it takes at least this share of the device time of all other users."""

# Checks of times
_MIN_SHARE = 0.25
"""A bottleneck takes at least this share of the time."""
MIN_ITERATIONS = 3
"""There is no advice before a run has this many steps."""
_MANY_REQUESTS = 4
_SMALL_PASS = 2.0
"""Passes with at most this many examples are small."""
_LOW_DECODE_FILL = 0.1
_LOW_BATCH_FILL = 0.5

Finding = tuple[float, str, str]
"""The share of time that a bottleneck takes, what was found, and what to change."""


@dataclass(frozen=True, slots=True)
class Hint:
    """A message about something that is wrong with a run or missing from it, with advice. It is shown to people."""

    level: Literal["error", "warning", "note"]
    text: str
    advice: str
    step: int


def read_hints(
    tx: Session,
    model_id: ModelId,
    owner: str,
    steps: Sequence[OptimizerStep],
    now: float,
    may_see: Callable[[str], bool],
    *,
    has_reward: bool,
) -> list[Hint]:
    """Return hints about the steps of a run.

    If the run waits for the device, read who uses the device. `may_see` tells whether the reader may
    see the name of an owner.
    """
    since = find_slow_since(steps)
    users = () if since is None else find_device_users(tx, since, model_id, owner, may_see)
    return find_hints(steps, now, users, has_reward=has_reward)


def find_hints(
    steps: Sequence[OptimizerStep], now: float, other_users: Sequence[DeviceUser] = (), *, has_reward: bool = True
) -> list[Hint]:
    """Return hints about the steps of a run, errors first. `steps` must be in order.

    `other_users` are the other users of the device since the time that `find_slow_since` returns.
    `has_reward` tells whether the client logs a reward.
    """
    if not steps:
        return []

    hints = chain(
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
        _check_idle(steps[-1], now),
        () if has_reward else _check_reward(steps),
    )
    return sorted(hints, key=lambda hint: hint.level != "error")


def _list_values(steps: Sequence[OptimizerStep], name: str) -> list[tuple[int, Value]]:
    return [(step.step, step.values[name]) for step in steps if name in step.values]


def _list_known_values(steps: Sequence[OptimizerStep], name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in _list_values(steps, name) if value is not None]


def _list_newest_values(steps: Sequence[OptimizerStep], name: str) -> tuple[list[int], list[float]]:
    """Return the last steps that have a curve, and its values. Both are empty if there are too few steps."""
    known = _list_known_values(steps, name)[-_SHORT_WINDOW:]
    if len(known) < _SHORT_WINDOW:
        return [], []
    return [step for step, _ in known], [value for _, value in known]


def _format_span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _check_finite(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    for name, label in (("loss_sum", "loss"), ("grad_norm", "gradient norm")):
        last = _list_values(steps, name)[-_LONG_WINDOW:]
        bad = [step for step, value in last if value is None]
        if bad:
            text = f"The {label} was NaN or infinite in {_format_span(bad[0], bad[-1])}."
            advice = "Load the last good checkpoint, and lower the learning rate or set grad_clip_norm."
            yield Hint("error", text, advice, bad[0])
            return  # a loss that is not finite makes the gradient so, too


def _check_advantages(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    zero_steps: list[int] = []
    for step, number in reversed(_list_known_values(steps, "nonzero_advantages")):
        if number:
            break
        zero_steps.append(step)
    if len(zero_steps) >= _SHORT_WINDOW:
        yield Hint(
            "warning",
            f"All advantages were 0 in {_format_span(zero_steps[-1], zero_steps[0])}: all samples of a group got the "
            "same reward, so the model learns nothing.",
            "Choose problems that the model solves sometimes, or use larger groups.",
            zero_steps[-1],
        )


def _check_gradient(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    known = _list_known_values(steps, "grad_norm")[-_LONG_WINDOW:]
    if len(known) < 2 * _SHORT_WINDOW:
        return
    usual = median(value for _, value in known)
    step, greatest = max(known[-_SHORT_WINDOW:], key=lambda pair: pair[1])
    if usual and greatest >= _GRADIENT_FACTOR * usual:
        yield Hint(
            "warning",
            f"The gradient norm was {greatest:.3g} at step {step}, {greatest / usual:.0f} times its median "
            f"{usual:.3g}.",
            "Check the data of this step. grad_clip_norm limits the size of such updates.",
            step,
        )


def _check_kl(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    numbers, values = _list_newest_values(steps, "kl_to_sampler")
    if values and min(values) > _MAX_KL and values[-1] > values[0]:
        yield Hint(
            "warning",
            f"The KL divergence to the sampler is {values[-1]:.3g} and rising.",
            "Sample from newer weights, make fewer updates per batch, or lower the learning rate.",
            numbers[0],
        )


def _check_clipping(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    numbers, values = _list_newest_values(steps, "clip_fraction")
    if values and min(values) > _MAX_CLIPPED:
        yield Hint(
            "warning",
            f"{values[-1]:.0%} of the ratios are clipped. Clipped tokens do not contribute to the gradient.",
            "Make fewer updates per batch, or lower the learning rate.",
            numbers[0],
        )


def _check_learning_rate(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    known = _list_known_values(steps, "learning_rate")[-_SHORT_WINDOW:]
    if known and len(known) >= min(_SHORT_WINDOW, len(steps)) and not any(value for _, value in known):
        yield Hint(
            "warning",
            "The learning rate is 0, so optimizer steps do not change the weights.",
            "Check the learning rate schedule.",
            known[0][0],
        )


def _check_cut_samples(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    numbers, shares = _list_newest_values(steps, "cut_share")
    if shares and (share := fmean(shares)) > _MAX_CUT_SHARE:
        yield Hint(
            "warning",
            f"{share:.0%} of the samples of {_format_span(numbers[0], numbers[-1])} were cut off by max_tokens.",
            "Unfinished answers are being rewarded: raise max_tokens, or reward shorter answers.",
            numbers[0],
        )


def _check_certainty(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    numbers, values = _list_newest_values(steps, "surprise")
    if values and max(values) < _MIN_SURPRISE:
        yield Hint(
            "warning",
            f"The mean -log p of sampled tokens is {values[-1]:.2g}: samples of one prompt are nearly identical.",
            "If this is not intended, go back to an earlier checkpoint, and lower the learning rate or add a KL "
            "penalty.",
            numbers[0],
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


def _check_slowness(steps: Sequence[OptimizerStep], other_users: Sequence[DeviceUser]) -> Iterator[Hint]:
    slow = _measure_slowness(steps)
    if slow is None:
        return
    reason = (
        "they wait for the device" if slow.is_queueing else "the requests take longer, or the client waits between them"
    )
    if slow.is_queueing and (names := _name_main_users(other_users)):
        reason += f", which is used by {names}"
    yield Hint(
        "warning",
        f"Steps take {slow.recent_s:.1f} s, {slow.recent_s / slow.usual_s:.1f} times as long as before: {reason}.",
        "See the overview page for the users of the device.",
        slow.first.step,
    )


def _name_main_users(users: Sequence[DeviceUser]) -> str:
    """Return the names of the users with the most device time.

    Each name is followed by its percentage of the device time of all these users, for example "bob (70%)".
    """
    total = sum(user.device_s for user in users)
    main_users = [user for user in users if user.device_s >= _MIN_USER_SHARE * total][:3]
    return ", ".join(f"{user.name} ({user.device_s / total:.0%})" for user in main_users)


def _check_idle(last: OptimizerStep, now: float) -> Iterator[Hint]:
    if not last.is_applied and last.passes and now - last.at >= _IDLE_S:
        yield Hint(
            "warning",
            f"Step {last.step} has {last.passes} forward_backward requests but no optim_step, and its last request "
            f"ended {(now - last.at) / 60:.0f} minutes ago.",
            "Check whether the client is still running.",
            last.step,
        )


def _check_reward(steps: Sequence[OptimizerStep]) -> Iterator[Hint]:
    if known := _list_known_values(steps, "nonzero_advantages"):
        yield Hint(
            "note",
            "This run has advantages, but no reward is logged to this server.",
            "To see rewards here, send them to this server: in a loop of your own with "
            'training_client.get_telemetry().log("metrics", {"step": step, "reward": reward}), in a recipe of '
            "tinker-cookbook with trackio (set TRACKIO_SERVER_URL to the address of this server with /trackio at its "
            "end, and TRACKIO_WRITE_TOKEN to your API key).",
            known[0][0],
        )


def describe_last_run(tx: Session, owner: str, session_id: SessionId) -> str | None:
    """Return what slowed down the last run of an owner, or None.

    Only the session before the given session counts, so each run is described at most once.
    """
    newest = sessions.list_ids(tx, owner, 2, 0)
    runs = models.list_by_session(tx, newest[1]) if len(newest) == 2 and newest[0] == session_id else []
    if not runs:
        return None
    run = max(runs, key=lambda run: run.last_request_at)
    advice = find_advice(read_breakdown(tx, run, lambda name: name == owner))
    return f"last run {run.model_id}: {advice[0].text} {advice[0].advice}" if advice else None


def find_advice(breakdown: Breakdown) -> list[Hint]:
    """Return what slows a run down, the largest share of time first."""
    if len(breakdown.iterations) < MIN_ITERATIONS:
        return []

    findings = [*_check_shares(breakdown), *_check_sampling(breakdown), *_check_passes(breakdown)]
    first = breakdown.iterations[0].step
    return [
        Hint("note", text, advice, first)
        for share, text, advice in sorted(findings, reverse=True)
        if share >= _MIN_SHARE
    ]


def _check_shares(breakdown: Breakdown) -> Iterator[Finding]:
    """Find parts of the time in which the run neither trained nor sampled."""
    client, queued, compilation, weights = map(breakdown.compute_share, ("client", "queued", "compilation", "weights"))
    yield (
        client,
        f"{client:.0%} of the time no request of this run was open.",
        "Send the next batch before the rewards are done."
        if breakdown.compute_share("sampling") > 0
        else "Prepare the next batch while this one trains, and send forward_backward and optim_step before you wait "
        "for a result.",
    )

    names = _name_main_users(breakdown.other_users)
    yield (
        queued,
        f"{queued:.0%} of the time requests of this run waited for the device"
        + (f", used by {names}." if names else "."),
        "Ask an admin for a larger weight or another engine, or train when the server is less busy.",
    )

    yield (
        compilation,
        f"{compilation:.0%} of the time this run waited for the compiler.",
        "Use similar lengths and the same number of examples in every step. Each program is compiled only once.",
    )
    yield (
        weights,
        f"{weights:.0%} of the time this run saved or loaded weights.",
        "Save checkpoints less often. To sample, call save_weights_and_get_sampling_client.",
    )


def _check_sampling(breakdown: Breakdown) -> Iterator[Finding]:
    """Find why sampling takes long. Only the first cause counts, because it may lead to the next ones."""
    iterations, share = breakdown.iterations, breakdown.compute_share("sampling")
    requests = fmean(iteration.sample_requests for iteration in iterations)
    alone = sum(iteration.alone_s for iteration in iterations) / breakdown.wall_s
    tail = sum(iteration.tail_s for iteration in iterations) / breakdown.wall_s

    # How the requests are sent
    if breakdown.has_single_samples and requests >= _MANY_REQUESTS:
        yield (
            share,
            f"{requests:.0f} sample requests per step with one sample each, and several with the same prompt.",
            f"Ask for all samples of a prompt in one request, for example num_samples={min(requests, 16):.0f}.",
        )
    elif alone >= _MIN_SHARE and requests >= _MANY_REQUESTS:
        yield (
            alone,
            f"The {requests:.0f} sample requests of a step ran one after another, for {alone:.0%} of the time.",
            "Send all of them before you wait for the first result.",
        )

    # How full the decode rows are
    elif tail >= _MIN_SHARE:
        yield (
            tail,
            f"{tail:.0%} of the time only the last few sample requests of a step were running.",
            "Lower max_tokens, or train on complete groups while the longest samples continue.",
        )
    elif breakdown.decode_fill is not None and breakdown.decode_fill < _LOW_DECODE_FILL:
        yield (
            share / 2,
            f"Only {breakdown.decode_fill:.0%} of the decode rows were in use while this run sampled.",
            "Sample more prompts at once, or larger groups.",
        )


def _check_passes(breakdown: Breakdown) -> Iterator[Finding]:
    iterations, share = breakdown.iterations, breakdown.compute_share("training")
    passes = fmean(iteration.passes for iteration in iterations)
    datums = fmean(iteration.datums for iteration in iterations)
    if passes >= _MANY_REQUESTS and datums <= _SMALL_PASS * passes:
        yield (
            share,
            f"{passes:.0f} forward_backward requests per step for {datums:.0f} examples.",
            "Send the examples of a step in one request. The server splits it if it is large.",
        )
    elif breakdown.batch_fill is not None and breakdown.batch_fill < _LOW_BATCH_FILL:
        yield (
            share,
            f"Micro-batches were only {breakdown.batch_fill:.0%} full of tokens.",
            "Send more examples in each forward_backward: a micro-batch holds examples of one request.",
        )
