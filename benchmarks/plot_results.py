"""Draws the plots of docs/performance.md and docs/internals/measurements from the latest records.

Each plot answers one question. The colours have enough contrast on a light and on a dark page, and the background is
transparent. Dots and bars are medians, thin lines span the first to the third quartile, and dashed lines are the
targets that the project set.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

RESULTS = Path(__file__).parent / "results"
PLOTS = Path(__file__).parents[1] / "docs" / "images" / "performance"
TEXT, BLUE, ORANGE, GREEN = "#7d8590", "#3b82f6", "#e8833a", "#2f9e6e"
PEFT, GENERATE = "transformers+peft", "transformers"
STYLE: dict[Any, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.axisbelow": True,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "font.size": 10,
    "grid.color": TEXT,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.labelcolor": TEXT,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "skyrl_tx",  # the same ids each time
    "text.color": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def load_records(benchmark: str) -> list[dict[str, Any]]:
    """Return all records of a benchmark, oldest first."""
    return json.loads((RESULTS / f"{benchmark}.json").read_text())


def find_latest(benchmark: str, figure: str, **options: Any) -> dict[str, Any]:
    """Return the results of the newest record that has a figure and these option values."""
    for record in reversed(load_records(benchmark)):
        if figure in record["results"] and record["options"] | options == record["options"]:
            return record["results"]
    raise LookupError(f"{benchmark}: no record with {figure!r} and {options}")


def get_median(figure: Any) -> float:
    """Return the median of a figure, or the figure if it is a number."""
    return figure["median"] if isinstance(figure, Mapping) else figure


def get_quartiles(figure: Any) -> tuple[float, float] | None:
    """Return the first and third quartile of a figure, if it has them."""
    return (figure["q1"], figure["q3"]) if isinstance(figure, Mapping) and "q1" in figure else None


def draw_dots(axes: Axes, rows: Sequence[tuple[str, Any, float | None]], *, unit: str, digits: int = 2) -> None:
    """Draw one row per figure, from the top: median, quartiles, and the target as a dashed mark."""
    widest = max(max(get_median(figure), target or 0) for _, figure, target in rows)

    for y, (_, figure, target) in enumerate(reversed(rows)):
        if quartiles := get_quartiles(figure):
            axes.plot(quartiles, (y, y), color=BLUE, linewidth=2, alpha=0.6, solid_capstyle="butt")
        axes.plot(get_median(figure), y, "o", color=BLUE, markersize=7)
        end = max((get_median(figure), *(get_quartiles(figure) or ())))
        if target is not None and 0 < target - end < 0.1 * widest:
            end = target  # the label must not cover the target
        label = f"{get_median(figure):.{digits}f}"
        axes.annotate(label, (end, y), (7, 0), textcoords="offset points", va="center", fontsize=9)
        if target is not None:
            axes.plot((target, target), (y - 0.35, y + 0.35), color=ORANGE, linewidth=2, linestyle=(0, (2, 1)))

    axes.set_yticks(range(len(rows)), [name for name, _, _ in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.3)
    axes.set_xlim(0, 1.08 * axes.get_xlim()[1])
    axes.grid(axis="x")
    axes.set_xlabel(unit)
    axes.plot([], [], color=ORANGE, linewidth=2, linestyle=(0, (2, 1)), label="target")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98))


def make_figure(height: float) -> tuple[Figure, Axes]:
    """Return an empty figure of the common width."""
    figure = Figure(figsize=(7.6, height), layout="constrained")
    return figure, figure.subplots()


def gpu() -> Figure:
    """Plot tokens per second in training and in decoding on one H200, by model."""
    figure = Figure(figsize=(7.6, 2.2), layout="constrained")
    panels = (("training", "training"), ("decoding-256", "decoding, 256 samples"))
    for axes, (part, title) in zip(figure.subplots(1, 2), panels, strict=True):
        models = ("Qwen3-8B", "Qwen3-4B", "Qwen3-0.6B")
        rates = [get_median(latest_on_h200(part, model)["tokens_per_s"]) for model in models]
        bars = axes.barh(models, rates, 0.6, color=BLUE)
        axes.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=4, color=TEXT)
        axes.set_title(title)
        axes.set_xlabel("tokens per second")
        axes.set_xlim(right=1.25 * max(rates))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(axis="x")
    return figure


def latest_on_h200(part: str, model: str) -> dict[str, Any]:
    """Return the newest results of a part of `bench_gpu` with a whole model and default options."""
    options = {"part": part, "model": model}
    for record in reversed(load_records("gpu")):
        if record["options"] == options and "H200" in record["machine"]["device"]:
            return record["results"]
    raise LookupError(f"gpu: no record of an H200 with {options}")


def speed() -> Figure:
    """Plot throughput relative to transformers."""
    figure, axes = make_figure(3.4)
    train = "{} / " + PEFT + ", tokens per s"
    rows: list[tuple[str, Any, float | None]] = []
    for model, shape, target in (
        ("30M", "8x256", 2.0),
        ("30M", "16x512", 2.0),
        ("150M", "8x256", 2.0),
        ("tiny", "8x256", None),
    ):
        name = train.format(shape)
        rows.append(
            (f"training {model}, {shape}", find_latest("training", name, model=model, shape=shape)[name], target)
        )

    for contestant in ("base model", "one adapter"):
        name = f"{contestant} / {GENERATE}, tokens/s"
        found = find_latest("sampling", name, shape="16x64x4x128")[name]
        rows.append((f"sampling 30M, {contestant}", found, 8.0 if contestant == "base model" else None))

    draw_dots(axes, rows, unit="throughput relative to transformers + peft (training), generate (sampling)")
    axes.axvline(1, color=TEXT, linewidth=1, alpha=0.6)
    return figure


def utilization() -> Figure:
    """Plot the share of the machine's matmul rate or roofline."""
    figure, axes = make_figure(2.8)
    rows: list[tuple[str, Any, float | None]] = []
    for model, shape in (("30M", "8x256"), ("30M", "16x512"), ("150M", "8x256")):
        name = f"{shape} / {PEFT}, tokens per s"
        found = find_latest("training", name, model=model, shape=shape)[shape]["share_of_matmul_rate"]
        rows.append((f"training {model}, {shape}", found, 0.6))
    found = find_latest("sampling", f"base model / {GENERATE}, tokens/s", shape="16x64x4x128")
    for contestant in ("base model", "one adapter"):
        target = 0.6 if contestant == "base model" else None
        rows.append((f"sampling 30M, {contestant}", found[contestant]["share_of_roofline"], target))
    draw_dots(axes, rows, unit="share of the matmul rate (training) or of the roofline (sampling)")
    axes.set_xlim(0, 1)
    return figure


def overhead() -> Figure:
    """Plot the throughput that remains with each feature."""
    figure, axes = make_figure(4.4)

    def training(name: str, **options: Any) -> Any:
        return find_latest("training", name, **options)[name]

    many = "32 tenants, ranks mixed / 1 tenant, "
    adapters = find_latest("sampling", "64 adapters / base model, tokens/s")
    staggered = find_latest("sampling", "throughput staggered / at once", memory_fraction=1.0)
    snapshots = find_latest("snapshots", "throughput with / without")

    rows: list[tuple[str, Any, float | None]] = [
        ("random sequence lengths", training("length 20 to 700 / length 384, tokens per s", datums=256), 0.85),
        ("64 adapter slots instead of 2", training("64 slots / 2 slots, tokens per s"), 0.97),
        ("32 tenants, against one with 32 requests", training(f"{many}32 requests, tokens per s"), 0.9),
        ("32 tenants, against one large request", training(f"{many}1 request, tokens per s", tenant_length=64), 0.9),
        ("recovery snapshots", snapshots["throughput with / without"], None),
        ("sampling with one adapter", adapters["1 adapters / base model, tokens/s"], None),
        ("sampling with 8 adapters", adapters["8 adapters / base model, tokens/s"], None),
        ("sampling with 64 adapters", adapters["64 adapters / base model, tokens/s"], None),
        ("staggered arrival of samples", staggered["throughput staggered / at once"], 0.9),
    ]

    draw_dots(axes, rows, unit="throughput relative to the same work without the feature")
    axes.axvline(1, color=TEXT, linewidth=1, alpha=0.6)
    return figure


def drawing() -> Figure:
    """Plot milliseconds per token draw of 64 rows."""
    figure, axes = make_figure(3.2)
    found = find_latest("sampling", "vocabulary 151936, flat", scenario="drawing")
    names = list(found["vocabulary 151936, flat"])

    for offset, color, vocabulary in ((-0.2, BLUE, "151936"), (0.2, GREEN, "16384")):
        values = found[f"vocabulary {vocabulary}, flat"]
        known = [(y, get_median(values[name])) for y, name in enumerate(names) if name in values]
        axes.barh(
            [y + offset for y, _ in known],
            [x for _, x in known],
            0.38,
            color=color,
            label=f"vocabulary {int(vocabulary):,}",
        )

    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per decode step of 64 samples, flat logits")
    axes.grid(axis="x")
    axes.legend(loc="center right")
    return figure


def api() -> Figure:
    """Plot the latency that the server adds to one SDK call."""
    figure, axes = make_figure(1.7)
    added = find_latest("api", "latency")["latency"]["added_ms"]
    rows = [("median", added["median"], 10.0), ("95th percentile", added["p95"], 30.0)]
    draw_dots(axes, rows, unit="milliseconds added to forward(...).result()", digits=1)
    return figure


def memory() -> Figure:
    """Plot the memory of a training step with one long datum."""
    figure, axes = make_figure(1.9)
    found = find_latest("memory", "step_mib")
    rows = (
        ("logits [T, V], not allocated", "logits_mib"),
        ("estimate of the backend", "estimate_mib"),
        ("step", "step_mib"),
    )
    bars = axes.barh([name for name, _ in rows], [found[key] for _, key in rows], 0.6, color=(TEXT, GREEN, BLUE))
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, color=TEXT)
    axes.set_xlabel("MiB for one datum of 8,192 tokens and a vocabulary of 151,936")
    axes.set_xlim(right=1.12 * found["logits_mib"])
    axes.grid(axis="x")
    return figure


def agreement() -> Figure:
    """Plot the distance between sampled and training log-probabilities."""
    figure, axes = make_figure(1.9)
    rows = list(find_latest("agreement", "float32").items())
    for y, (dtype, found) in enumerate(rows):
        distance = found["trainer and sampler"]
        axes.plot((distance["median"], distance["largest"]), (y, y), color=BLUE, linewidth=2, alpha=0.6)
        for marker, name in (("o", "median"), ("|", "p99"), (">", "largest")):
            axes.plot(distance[name], y, marker, color=BLUE, markersize=8, label=name if dtype == "float32" else None)
    axes.set_yticks(range(len(rows)), [dtype for dtype, _ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xscale("log")
    axes.set_xlabel("distance of log-probabilities, trainer and sampler")
    axes.grid(axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 0.98), ncols=3)
    return figure


def commits() -> Figure:
    """Plot stored requests per second by number of threads."""
    figure, axes = make_figure(2.6)
    found = find_latest("commits", "64 threads")
    for offset, color, mode in ((-0.2, BLUE, "FULL"), (0.2, GREEN, "NORMAL")):
        rates = [get_median(row[mode]["requests_per_s"]) for row in found.values()]
        bars = axes.bar([x + offset for x in range(len(rates))], rates, 0.38, color=color, label=f"synchronous={mode}")
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, color=TEXT)
    axes.set_xticks(range(len(found)), [name.replace("1 threads", "1 thread") for name in found])
    axes.set_ylabel("requests per second")
    axes.set_ylim(0, 3100)
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=2)
    return figure


def database() -> Figure:
    """Plot the size of the database by completed requests."""
    figure, axes = make_figure(2.8)
    for keep_all, color, label in ((False, BLUE, "requests pruned"), (True, ORANGE, "nothing pruned")):
        table = find_latest("database", "table", keep_all=keep_all)["table"]
        axes.plot(
            [row["requests"] / 1000 for row in table],
            [row["database_kib"] / 1024 for row in table],
            "o-",
            color=color,
            label=label,
        )

    axes.set_xlabel("thousand completed requests")
    axes.set_ylabel("database, MiB")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid()
    axes.legend(loc="upper right")
    return figure


QUESTIONS: dict[str, Callable[[], Figure]] = {
    plot.__name__: plot
    for plot in (gpu, speed, utilization, overhead, drawing, api, memory, agreement, commits, database)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PLOTS, help="directory of the SVG files")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, plot in QUESTIONS.items():
            path = options.output / f"{name}.svg"
            plot().savefig(path, metadata={"Date": None})
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


if __name__ == "__main__":
    main()
