"""`make gpu`: a run does the parts that have no record for its commit and can end in time."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_gpu

MODEL = "Qwen3-0.6B"
RATE = {"tokens_per_s": {"median": 1.0}}


def run(monkeypatch: pytest.MonkeyPatch, records: Path, *flags: str) -> list[str]:
    """Run the program with parts that take no time, and return the parts that ran."""
    done: list[str] = []

    def figures(task: str, model: str, options: object) -> dict[str, Any]:
        done.append(f"{task} {model}".strip())
        return {"problem": "out of memory"} if task == "decoding-256" else RATE

    monkeypatch.setattr(bench_gpu, "measure_in_child", figures)
    monkeypatch.setattr(bench_gpu, "_read_device", lambda: "gpu NVIDIA H200")
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--models", MODEL, "--records", str(records), *flags])
    bench_gpu.main()
    return done


def test_a_run_does_what_has_no_record_of_this_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, measured = (
        tmp_path / "gpu.json",
        [f"{task} {MODEL}" for task in ("training", "decoding-64", "decoding-256")],
    )
    monkeypatch.setattr(bench_gpu, "get_commit", lambda: "one")

    assert run(monkeypatch, records, "--skip-tests") == measured
    assert run(monkeypatch, records) == ["parity", "suites"]
    assert run(monkeypatch, records) == []
    assert run(monkeypatch, records, "--again", "--skip-tests") == measured

    monkeypatch.setattr(bench_gpu, "get_commit", lambda: "two")
    assert run(monkeypatch, records) == ["parity", "suites", *measured]

    last = json.loads(records.read_text())[-1]
    assert last["options"] == {"part": "decoding-256", "model": MODEL} and last["commit"] == "two"
    assert last["results"] == {"problem": "out of memory"} and last["machine"]["device"] == "gpu NVIDIA H200"


def test_a_run_starts_nothing_that_may_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path / "gpu.json", "--minutes", "2", "--skip-tests")
    assert run(monkeypatch, tmp_path / "gpu.json", "--minutes", "0.5") == []
    assert "2 parts remain; run the same command again" in capsys.readouterr().out


def test_without_a_gpu_only_the_tiny_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "_read_device", lambda: "cpu cpu")
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--records", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit, match="no GPU: the first device of JAX is cpu"):
        bench_gpu.main()


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("cpu", None),
    ],
)
def test_the_data_sheet_of_a_device_is_found_by_its_name(device: str, kind: str | None) -> None:
    found = bench_gpu.find_kind(device)
    assert (found and found.name) == kind
