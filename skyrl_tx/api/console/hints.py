"""Warnings about a run, as far as its own numbers tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from skyrl_tx.api.console.series import Step, Value

_FEW, _MANY = 5, 50
_GRADIENT_FACTOR = 10.0
_MAX_KL = 0.05
_MAX_CLIPPED = 0.4
_SLOWER = 2.0
_IDLE_S = 1800.0


@dataclass(frozen=True, slots=True)
class Hint:
    """Something that a person should know about a run."""

    level: Literal["error", "warning"]
    text: str
    advice: str
    step: int


def hints(steps: Sequence[Step], now: float) -> list[Hint]:
    """Return what the steps of a run, in order, say about it at a time; errors first."""
    if not steps:
        return []
    found = [
        hint
        for hint in (
            _not_finite(steps),
            _no_advantages(steps),
            _large_gradient(steps),
            _far_from_sampler(steps),
            _much_clipped(steps),
            _no_learning_rate(steps),
            _slow(steps),
            _no_step(steps, now),
        )
        if hint is not None
    ]
    return sorted(found, key=lambda hint: hint.level != "error")


def _values(steps: Sequence[Step], name: str) -> list[tuple[int, Value]]:
    return [(step.step, step.values[name]) for step in steps if name in step.values]


def _known(steps: Sequence[Step], name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in _values(steps, name) if value is not None]


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _not_finite(steps: Sequence[Step]) -> Hint | None:
    for name, what in (("loss_sum", "loss"), ("grad_norm", "gradient norm")):
        last = _values(steps, name)[-_MANY:]
        bad = [step for step, value in last if value is None]
        if bad:
            text = f"The {what} was NaN or infinite in {_span(bad[0], bad[-1])}."
            advice = "Load the last good checkpoint and lower the learning rate, or clip the gradient."
            return Hint("error", text, advice, bad[0])
    return None


def _no_advantages(steps: Sequence[Step]) -> Hint | None:
    known = _known(steps, "advantages")
    run: list[int] = []
    for step, number in reversed(known):
        if number:
            break
        run.append(step)
    if len(run) < _FEW:
        return None
    return Hint(
        "warning",
        f"All advantages were 0 in {_span(run[-1], run[0])}: every group got one reward, so nothing is learned.",
        "Choose problems that are neither solved always nor never, or use larger groups.",
        run[-1],
    )


def _large_gradient(steps: Sequence[Step]) -> Hint | None:
    known = _known(steps, "grad_norm")[-_MANY:]
    if len(known) < 2 * _FEW:
        return None
    usual = median(value for _, value in known)
    step, greatest = max(known[-_FEW:], key=lambda found: found[1])
    if not usual or greatest < _GRADIENT_FACTOR * usual:
        return None
    return Hint(
        "warning",
        f"The gradient norm was {greatest:.3g} at step {step}, {greatest / usual:.0f} times its median {usual:.3g}.",
        "Look at the data of this step; grad_clip_norm bounds the update.",
        step,
    )


def _far_from_sampler(steps: Sequence[Step]) -> Hint | None:
    known = _known(steps, "kl_to_sampler")[-_FEW:]
    if len(known) < _FEW or min(value for _, value in known) <= _MAX_KL or known[-1][1] <= known[0][1]:
        return None
    return Hint(
        "warning",
        f"The KL divergence to the sampler is {known[-1][1]:.3g} and rises.",
        "Sample from newer weights, make fewer updates on one batch, or lower the learning rate.",
        known[0][0],
    )


def _much_clipped(steps: Sequence[Step]) -> Hint | None:
    known = _known(steps, "clip_fraction")[-_FEW:]
    if len(known) < _FEW or min(value for _, value in known) <= _MAX_CLIPPED:
        return None
    return Hint(
        "warning",
        f"{known[-1][1]:.0%} of the ratios are clipped: most tokens no longer contribute to the gradient.",
        "Make fewer updates on one batch, or lower the learning rate.",
        known[0][0],
    )


def _no_learning_rate(steps: Sequence[Step]) -> Hint | None:
    known = _known(steps, "learning_rate")[-_FEW:]
    if len(known) < min(_FEW, len(steps)) or not known or any(value for _, value in known):
        return None
    return Hint("warning", "The learning rate is 0: steps change nothing.", "Look at the schedule.", known[0][0])


def _slow(steps: Sequence[Step]) -> Hint | None:
    done = [step for step in steps if step.is_applied and step.passes][-_MANY:]
    if len(done) < 4 * _FEW:
        return None
    usual = median(step.wall_s for step in done[:-_FEW])
    recent = median(step.wall_s for step in done[-_FEW:])
    if not usual or recent < _SLOWER * usual or recent < 1.0:
        return None
    waits = median(step.queue_s for step in done[-_FEW:]) - median(step.queue_s for step in done[:-_FEW])
    reason = "they wait for the device" if waits > (recent - usual) / 2 else "their own passes take longer"
    return Hint(
        "warning",
        f"Steps take {recent:.1f} s, {recent / usual:.1f} times as long as before: {reason}.",
        "The overview shows who uses the device.",
        done[-_FEW].step,
    )


def _no_step(steps: Sequence[Step], now: float) -> Hint | None:
    last = steps[-1]
    if last.is_applied or not last.passes or now - last.at < _IDLE_S:
        return None
    return Hint(
        "warning",
        f"Step {last.step} has {last.passes} passes but no optimizer step for {(now - last.at) / 60:.0f} minutes.",
        "Is the client still running?",
        last.step,
    )
