"""`make gpu-rl` with a tiny model on the CPU, so that it works once a GPU is available."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_gpu_rl import LIMITS_S
from benchmarks.gpu_rl.shapes import SHAPES, count_training_tokens
from tests.support.client_environments import TORCH, ClientEnvironment, PreparedEnvironment
from tests.support.fast_jit import FAST_COMPILE_FLAGS

ROOT = Path(__file__).parents[2]


class Benchmark:
    """Runs of the benchmark program that share their records."""

    def __init__(self, directory: Path, peer_python: Path) -> None:
        self._directory = directory
        self._command = [sys.executable, "-u", "-m", "benchmarks.bench_gpu_rl", "--model", "tiny", "--commit", "test"]
        self._command += ["--records", str(directory / "gpu_rl.json"), "--work", str(directory / "work")]
        self._command += ["--peer-python", str(peer_python), "--flags", "--backend-config.sample-slots 64"]
        for phase in LIMITS_S:
            self._command += ["--limit", f"{phase}=300"]

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        variables = os.environ | {"XLA_FLAGS": FAST_COMPILE_FLAGS, "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            [*self._command, "--budget-s", "900", *flags], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True
        )

    def run(self, *flags: str) -> str:
        """Run the program and return its output."""
        with self.start(*flags) as process:
            printed, _ = process.communicate()
        assert process.returncode == 0
        return printed

    def records(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the results by shape and phase."""
        records = json.loads((self._directory / "gpu_rl.json").read_text())
        return {(record["options"]["shape"], record["options"]["phase"]): record["results"] for record in records}


@pytest.fixture(scope="module")
def benchmark(
    tmp_path_factory: pytest.TempPathFactory,
    client_environment: Callable[[ClientEnvironment], PreparedEnvironment],
) -> Benchmark:
    return Benchmark(tmp_path_factory.mktemp("gpu_rl"), client_environment(TORCH).python)


@pytest.mark.slow
def test_a_run_measures_all_phases_and_continues_after_an_interruption(benchmark: Benchmark) -> None:
    with benchmark.start() as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("serve: done"):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    before = benchmark.records()
    assert ("tiny", "serve") in before and ("tiny", "iterations") not in before

    printed = benchmark.run()
    assert "checkpoint: done" not in printed and "serve: done" not in printed
    found = {phase: results for (shape, phase), results in benchmark.records().items() if shape == "tiny"}
    assert list(found) == list(LIMITS_S)
    assert all("problem" not in results for results in found.values()), found
    assert found["serve"] == before["tiny", "serve"]
    check_figures(found)
    assert "| greedy samples before and after a restart | equal | equal |" in printed
    assert "–" not in printed

    assert "done" not in benchmark.run()


def check_figures(found: dict[str, dict[str, Any]]) -> None:
    """Check that all figures exist and that tokens are counted."""
    shape = SHAPES["tiny"]
    lengths = shape.draw_lengths(1)
    warm_up, timed = found["iterations"]["iterations"]
    assert (warm_up["kind"], timed["kind"]) == ("warm-up", "timed")
    assert timed["new_tokens"] == shape.prompts * shape.samples * shape.tokens
    assert timed["training_tokens"] == count_training_tokens(shape, lengths)
    parts = [timed[name] for name in ("save_s", "sampling_s", "client_s", "training_s")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(timed["iteration_s"], abs=0.01)
    assert timed["sampling_tokens_per_s"] == pytest.approx(timed["new_tokens"] / timed["sampling_s"], rel=0.02)
    assert timed["programs_compiled"] < warm_up["programs_compiled"]
    assert timed["sampler_to_trainer_nats"]["mean"] < 1e-3

    assert found["sample_peer"]["new_tokens"] == sum(lengths)
    assert set(found["train_peer"]["layouts"]) == {"pack", "pad"}
    assert found["train_peer"]["layouts"]["pack"]["tokens"] == count_training_tokens(shape, lengths)
    assert min(found[peer]["tokens_per_s"] for peer in ("sample_peer", "train_peer")) > 0

    assert {count: times["runs"] for count, times in found["hand_over"]["hand_over"].items()} == {"1": 12, "8": 24}
    assert all(0 < times["p50_s"] <= times["p95_s"] for times in found["hand_over"]["hand_over"].values())
    for name in "ready_s", "first_sample_s", "first_step_s":
        assert found["warm"][name] > 0 and found["cold"][name] > 0
    assert found["warm"]["first_sample_s"] < found["cold"]["first_sample_s"]


@pytest.mark.slow
def test_a_phase_past_its_limit_is_cut_and_says_so(benchmark: Benchmark) -> None:
    flags = ("--shape", "tiny-drawn", "--phases", "train_peer")
    assert "train_peer: cut at its limit of 1 s" in benchmark.run(*flags, "--limit", "train_peer=1")
    record = benchmark.records()["tiny-drawn", "train_peer"]
    assert record["problem"] == "cut at its limit of 1 s" and "tokens_per_s" not in record
    assert "train_peer" not in benchmark.run(*flags)
