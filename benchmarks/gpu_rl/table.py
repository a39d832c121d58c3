"""The table that a run prints at its end, for docs/internals/measurements/gpu.md."""

from collections.abc import Callable
from typing import Any

Results = dict[str, Any]
ITERATION_TARGETS_S = {"H200": (60, 40), "H100": (75, 50)}
"""Bar and goal for Qwen3-4B with the shape `fixed-512`, by a part of the device's name."""
TRAINING_RATIO, SAMPLING_RATIO = 1.5, 2.0
"""Targets relative to transformers on the same device."""


def make_table(find: Callable[[str], Results | None], model: str, shape: str, device: str) -> str:
    """Return a Markdown table of the figures that `find` has by phase; `–` where there is none."""
    found = {
        phase: find(phase) or {}
        for phase in ("serve", "iterations", "hand_over", "train_peer", "sample_peer", "warm", "cold")
    }
    iterations = found["iterations"].get("iterations", [])
    first, last = (iterations[0] if iterations else {}), (iterations[-1] if len(iterations) > 1 else {})

    is_target = (model, shape) == ("Qwen3-4B", "fixed-512")
    bars = next((bars for name, bars in ITERATION_TARGETS_S.items() if name in device and is_target), None)

    rows = [
        # The last iteration, and the peers.
        ("iteration, s", _show(last, "iteration_s"), f"at most {bars[0]}; goal {bars[1]}" if bars else "none"),
        (
            "of it sampling; training; save; client, s",
            _show(last, "sampling_s", "training_s", "save_s", "client_s"),
            "none",
        ),
        *_make_comparison("sampling", last.get("sampling_tokens_per_s"), found["sample_peer"], SAMPLING_RATIO),
        *_make_comparison("training", last.get("training_tokens_per_s"), found["train_peer"], TRAINING_RATIO),
        # Sharing, compilation, and the agreement of sampler and trainer.
        (
            "trained tokens; not computed, because a prompt is shared",
            _show(last, "training_tokens", "shared_tokens"),
            "none",
        ),
        ("programs compiled meanwhile; seconds", _show(last, "programs_compiled", "compile_s"), "0"),
        (
            "sampler against trainer, nats: mean; largest",
            _show(last.get("sampler_to_trainer_nats", {}), "mean", "max"),
            "none",
        ),
        # Warm-up, starts and the restart.
        (
            "warm-up iteration, s: all; first result; programs compiled",
            _show(first, "iteration_s", "first_result_s", "programs_compiled"),
            "none",
        ),
        ("cold, s: ready; first sample; first step", _show_start(found["cold"], found["serve"]), "none"),
        ("warm, s: ready; first sample; first step", _show_start(found["warm"], {}), "none"),
        ("greedy samples before and after a restart", _compare_greedy(found["hand_over"], found["warm"]), "equal"),
        # Hand-overs, and sizes of the server.
        *(
            (
                f"save to first sample, {count} tenant{'s' * (count != '1')}, s: p50; p95",
                _show(times, *_P50_P95),
                "none",
            )
            for count, times in found["hand_over"].get("hand_over", {"1": {}, "8": {}}).items()
        ),
        (
            "slots; tokens of the KV cache; of a micro-batch",
            _show(found["iterations"].get("server", {}), "slots", "kv_cache_tokens") + "; " + _format_micro_batch(last),
            "none",
        ),
    ]

    lines = [f"| {model}, {shape}, {device} | Result | Target |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {result} | {target} |" for what, result, target in rows)])


_P50_P95 = ("p50_s", "p95_s")


def _make_comparison(what: str, ours: float | None, peer: Results, target: float) -> list[tuple[str, str, str]]:
    """Return two rows: our throughput next to the peer's, and their ratio."""
    theirs = peer.get("tokens_per_s")
    ratio = f"{ours / theirs:.2f}" if ours and theirs else "–"
    return [
        (f"{what}, tokens/s; of transformers", f"{_format(ours)}; {_format(theirs)}", "none"),
        (f"{what} against transformers", ratio, f"{target}"),
    ]


def _show_start(probe: Results, serve: Results) -> str:
    """Return the figures of a start; without a probe what is known of the server that ran the iterations."""
    return _show({"ready_s": serve.get("ready_s"), **probe}, "ready_s", "first_sample_s", "first_step_s")


def _compare_greedy(before: Results, after: Results) -> str:
    if "greedy" not in before or "greedy" not in after:
        return "–"
    return "equal" if before["greedy"] == after["greedy"] else "different"


def _format_micro_batch(iteration: Results) -> str:
    if not iteration.get("micro_batches"):
        return "–"
    positions = iteration["training_tokens"] - iteration.get("shared_tokens", 0) + iteration.get("padding_tokens", 0)
    return _format(positions / iteration["micro_batches"])


def _show(results: Results, *names: str) -> str:
    return "; ".join(_format(results.get(name)) for name in names)


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
