"""Draws what bench_real measured: agreement with transformers, losses, rewards, and a crash."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.plot_results import BLUE, GREEN, ORANGE, STYLE, make_figure
from benchmarks.real.train_sft import EVALUATE_EVERY

COLOURS = (BLUE, ORANGE, GREEN)
Find = Callable[[str], dict[str, Any] | None]


def draw_pictures(find: Find, directory: Path) -> None:
    """Draw the pictures of all phases that are recorded."""
    drawings = {"logprobs": draw_logprobs, "sft": draw_sft, "rl": draw_rl, "kill": draw_kill}
    with mpl.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = draw(find)
            if figure is not None:
                figure.savefig(directory / f"{name}.png", dpi=110)


def draw_logprobs(find: Find) -> Figure | None:
    record = find("compare")
    if record is None or "problem" in record:
        return None
    figure, axes = make_figure(2.8)
    models = [(name, found) for name, found in record.items() if isinstance(found, dict) and "logprobs" in found]
    for (name, found), colour in zip(models, COLOURS, strict=False):
        for key, line, title in (("logprobs", "-", "sampler"), ("forward_logprobs", ":", "training")):
            gaps = np.maximum(found[key]["gaps"], 1e-8)
            axes.plot(gaps, np.arange(101), line, color=colour, label=f"{name}, {title}")
    axes.set_xscale("log")
    return finish(figure, axes, "difference of a token's log-probability to transformers (nats)", "% of tokens")


def draw_sft(find: Find) -> Figure | None:
    ours, theirs = find("sft"), find("peft")
    if ours is None or theirs is None or "seeds" not in theirs:
        return None
    figure, axes = make_figure(3.0)
    for (seed, record), colour in zip(ours["seeds"].items(), COLOURS, strict=False):
        other = theirs["seeds"][seed]["held_out"]
        steps = EVALUATE_EVERY * np.arange(len(record["held_out"]))
        axes.plot(steps, record["held_out"], color=colour, linewidth=4, alpha=0.4, label=f"server, seed {seed}")
        axes.plot(steps[: len(other)], other, "--", color=colour, label=f"transformers + peft, seed {seed}")
    return finish(figure, axes, "step", "held-out loss (nats per token)")


def draw_rl(find: Find) -> Figure | None:
    record = find("rl")
    if record is None or not record.get("iterations"):
        return None
    figure, axes = make_figure(2.8)
    rewards = [iteration["reward"] for iteration in record["iterations"]]
    steps = np.arange(1, len(rewards) + 1)
    axes.plot(steps, rewards, "o", color=BLUE, alpha=0.5, label="mean reward of an iteration")
    means = [float(np.mean(rewards[max(0, step - 5) : step])) for step in steps]
    axes.plot(steps, means, color=BLUE, label="mean of the last five")
    held_out = record["held_out_right"]
    where = [0.5] * ("before" in held_out) + [len(rewards) + 0.5] * ("after" in held_out)
    axes.plot(where, list(held_out.values()), "D", color=ORANGE, label="share of right answers, held-out sums")
    axes.set_ylim(0, 1)
    return finish(figure, axes, "iteration", "reward")


def draw_kill(find: Find) -> Figure | None:
    ours, killed = find("sft"), find("kill")
    if ours is None or killed is None or "difference" not in killed:
        return None
    figure, axes = make_figure(2.6)
    axes.plot(ours["seeds"]["0"]["losses"], color=BLUE, linewidth=4, alpha=0.4, label="without a crash")
    axes.plot(killed["losses"], "--", color=ORANGE, label="engine killed with SIGKILL")
    axes.axvline(killed["kill_at"], color=ORANGE, linewidth=1)
    return finish(figure, axes, "step", "loss (nats per token)")


def finish(figure: Figure, axes: Axes, x: str, y: str) -> Figure:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()
    axes.legend(fontsize=8)
    return figure
