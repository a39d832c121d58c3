"""`make gpu-rl`: lengths, records and the table.

tests/serve/test_gpu_benchmark.py runs the whole benchmark.
"""

import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.collect_wheels import Wheel, select
from benchmarks.gpu_rl.child import PhaseCut, PhaseFailed, is_alive, kill_group, run_module, start_group
from benchmarks.gpu_rl.records import Records
from benchmarks.gpu_rl.shapes import MODELS, SHAPES
from benchmarks.gpu_rl.table import make_table
from tests.support.polling import until

ITERATION = {
    "kind": "timed",
    "iteration_s": 55.0,
    "sampling_s": 26.0,
    "training_s": 27.0,
    "save_s": 1.5,
    "client_s": 0.5,
    "sampling_tokens_per_s": 20000.0,
    "training_tokens_per_s": 24000.0,
    "training_tokens": 700_000,
    "micro_batches": 100.0,
    "padding_tokens": 100_000.0,
    "shared_tokens": 200_000.0,
}
RESULTS: dict[str, dict[str, Any]] = {
    "serve": {"ready_s": 40.0},
    "iterations": {"iterations": [{"kind": "warm-up"}, ITERATION]},
    "sample_peer": {"tokens_per_s": 8000.0},
    "train_peer": {"tokens_per_s": 12000.0},
}


def test_drawn_lengths_have_the_median_of_solutions_and_no_one_exceeds_the_limit() -> None:
    shape = SHAPES["gsm8k"]
    lengths = shape.draw_lengths(0)
    assert len(lengths) == shape.num_samples == 1024
    assert 155 < statistics.median(lengths) < 185
    assert min(lengths) >= 16 and max(lengths) == shape.tokens == 512
    assert lengths == shape.draw_lengths(0) != shape.draw_lengths(1)
    assert set(SHAPES["fixed-512"].draw_lengths(0)) == {512}


def test_prompts_have_ids_of_the_vocabulary() -> None:
    for name in "tiny", "Qwen3-4B", "Qwen3.5-4B":
        vocab_size = MODELS[name]["vocab_size"]
        prompts = SHAPES["tiny"].draw_prompts(vocab_size, 0)
        assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)


def open_records(path: Path, commit: str = "one", device: str = "NVIDIA H200", flags: str = "") -> Records:
    return Records.open([path], commit, {"device": device}, {"model": "tiny", "shape": "tiny", "flags": flags})


def test_a_record_is_found_by_commit_device_and_options_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gpu_rl.json"
    open_records(path).put("serve", {"ready_s": 1.0})
    open_records(path).put("serve", {"ready_s": 2.0})
    assert open_records(path).find("serve") == {"ready_s": 2.0}
    assert open_records(path).find("warm") is None
    assert open_records(path, commit="two").find("serve") is None
    assert open_records(path, device="NVIDIA H100").find("serve") is None
    assert open_records(path, flags="--backend-config.sample-slots 512").find("serve") is None


def test_records_of_several_files_are_joined(tmp_path: Path) -> None:
    first, second = tmp_path / "one.json", tmp_path / "two" / "gpu_rl.json"
    open_records(first).put("serve", {"ready_s": 1.0})
    both = Records.open([first, second], "one", {"device": "NVIDIA H200"}, open_records(first).options)
    both.put("warm", {"ready_s": 2.0})
    assert open_records(first).find("warm") == open_records(second).find("warm") == {"ready_s": 2.0}
    assert open_records(second).find("serve") == {"ready_s": 1.0}


def test_the_table_compares_with_transformers_and_the_targets() -> None:
    rows = make_table(RESULTS.get, "Qwen3-4B", "fixed-512", "NVIDIA H200").splitlines()
    assert "| iteration, s | 55 | at most 60; goal 40 |" in rows
    assert "| sampling against transformers | 2.50 | 2.0 |" in rows
    assert "| training against transformers | 2.00 | 1.5 |" in rows
    assert "| cold, s: ready; first sample; first step | 40; –; – | none |" in rows
    assert "| trained tokens; not computed, because a prompt is shared | 700,000; 200,000 | none |" in rows
    assert rows[-1].endswith("–; –; 6,000 | none |")


@pytest.mark.parametrize(
    ("model", "shape", "device"),
    [("Qwen3.5-4B", "fixed-512", "NVIDIA H200"), ("Qwen3-4B", "gsm8k", "NVIDIA H200"), ("tiny", "tiny", "cpu")],
)
def test_other_models_shapes_and_devices_have_no_target_for_an_iteration(model: str, shape: str, device: str) -> None:
    assert "| iteration, s | 55 | none |" in make_table(RESULTS.get, model, shape, device)


def test_wheels_of_packages_that_the_host_has_are_left_out() -> None:
    report = {
        "install": [
            {
                "metadata": {"name": name, "version": "1.0"},
                "download_info": {"archive_info": {"hashes": {"sha256": "ab"}}},
            }
            for name in ("tinker", "jaxlib", "ml_dtypes", "Pydantic_Core")
        ]
    }
    assert select(report) == [Wheel("pydantic-core", "1.0", "ab"), Wheel("tinker", "1.0", "ab")]
    assert select(report)[1].requirement == "tinker==1.0 --hash=sha256:ab"


def test_a_process_is_cut_at_its_limit_and_a_failure_has_its_log(tmp_path: Path) -> None:
    with pytest.raises(PhaseCut):
        run_module("iterate", {}, tmp_path / "log", limit_s=0.1)
    with pytest.raises(PhaseFailed, match=r"(?s)iterate ended with 1: .*TypeError: main\(\) missing"):
        run_module("iterate", {}, tmp_path / "log", limit_s=60.0)


def test_a_group_ends_with_all_its_processes(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = start_group(["sh", "-c", "sleep 100 & echo started; wait"], os.environ, log)
        while not (tmp_path / "log").read_text():
            assert process.poll() is None
        kill_group(process)
    assert process.returncode == -signal.SIGKILL


def test_sigterm_ends_a_run_and_its_groups(tmp_path: Path) -> None:
    code = f"""
from benchmarks.gpu_rl.child import exit_on_sigterm, start_group
exit_on_sigterm()
with open({str(tmp_path / "log")!r}, "wb") as log:
    process = start_group(["cat"], {{}}, log)
    print(process.pid, flush=True)
    process.wait(100)
"""
    root = Path(__file__).parents[3]

    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None
        group = int(run.stdout.readline())
        run.terminate()
        assert run.wait(10) == 128 + signal.SIGTERM

    until(lambda: not is_alive(group))
