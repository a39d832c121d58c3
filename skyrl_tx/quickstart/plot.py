"""The curves of a run as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from skyrl_tx.quickstart.rl import RlStep
from skyrl_tx.quickstart.sft import SftStep


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A figure on held-out questions, before and after training."""

    before: float
    after: float


def draw_curves(path: Path, sft: Sequence[SftStep], nll: HeldOut, rl: Sequence[RlStep], reward: HeldOut) -> None:
    """Write a PNG of the loss of supervised training beside the reward of reinforcement learning."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw(left, [row.nll for row in sft], nll, title="Supervised: cross_entropy", unit="nats per answer token")
    left.set_ylim(bottom=0)
    _draw(right, [row.reward for row in rl], reward, title="Reinforcement: importance_sampling", unit="mean reward")
    right.set_ylim(0, 1)
    figure.savefig(path, dpi=110)


def _draw(axes: Axes, values: Sequence[float], held_out: HeldOut, *, title: str, unit: str) -> None:
    axes.plot(range(len(values)), values, color="tab:blue", label="training batch")
    ends = (held_out.before, held_out.after)
    axes.plot([0, len(values)], ends, "o", color="tab:orange", label="held out, before and after")
    axes.set(title=title, xlabel="step", ylabel=unit)
    axes.grid(alpha=0.3)
    axes.legend()
