"""`make aot`: cells are compiled once, stored one by one, and written into the page."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_aot
from tests.support.client_environments import PreparedEnvironment

PROGRAM = {
    **{"argument_bytes": 3 << 30, "temporary_bytes": 1 << 30, "output_bytes": 0, "planned_bytes": 5 << 30},
    "problem": "",
    "text": {
        "num_steps": 1234,
        "num_open_loops": 2,
        "kernels": {"d_rotate_normed": 56, "mha_d_key": 28, "mha_forward": 28, "rotate_normed": 112},
        "in_layers": {"all-gather": {"calls": 56, "bytes": 8}},
    },
}
COMPILED = {
    "mesh": {"fsdp": 8, "tp": 1, "ep": 1},
    "limits": {"micro_batch_tokens": 4096, "is_rematerialized": True},
    "programs": [PROGRAM, {**PROGRAM, "problem": "RESOURCE_EXHAUSTED"}],
}


def test_a_run_that_was_stopped_goes_on_with_the_next_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, summary, records, asked = tmp_path / "page.md", tmp_path / "summary.md", tmp_path / "aot.json", []
    for path in (page, summary):
        path.write_text(f"before\n{bench_aot.BEGIN}\nold\n{bench_aot.END}\nafter\n")

    def compile_cell(model: str, device: str, packages: Path, timeout_s: float) -> dict:
        asked.append(device)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return COMPILED if device == "h200:8" else {"problem": "does not fit"}

    monkeypatch.setattr(bench_aot, "PAGE", page)
    monkeypatch.setattr(bench_aot, "SUMMARY_PAGE", summary)
    monkeypatch.setattr(bench_aot, "RECORDS", records)
    monkeypatch.setattr(bench_aot, "compile_cell", compile_cell)
    monkeypatch.setattr(PreparedEnvironment, "packages", tmp_path)
    monkeypatch.setattr(bench_aot, "prepare", lambda _: PreparedEnvironment(python=tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench_aot", "--models", "Qwen3-0.6B", "--devices", "h200:8", "v5e:1x1"])

    with pytest.raises(KeyboardInterrupt):
        bench_aot.main()
    assert [record["options"]["device"] for record in json.loads(records.read_text())] == ["h200:8"]

    bench_aot.main()
    assert asked == ["h200:8", "v5e:1x1", "v5e:1x1"]
    assert page.read_text().splitlines() == [
        "before",
        bench_aot.BEGIN,
        *page.read_text().splitlines()[2:4],
        "| Qwen3-0.6B | h200:8 | fsdp=8 | 4,096, rematerialized | 4.0 GiB (1.25) | too much | 1,234 and 2 loops "
        "| rotate_normed, mha | 2 all-gather |",
        "| Qwen3-0.6B | v5e:1x1 | does not fit | | | | | | |",
        bench_aot.END,
        "after",
    ]
    assert "| Qwen3-0.6B | unknown | fsdp=8 | – | unknown | unknown | unknown |" in summary.read_text()


def test_every_model_of_the_table_has_a_config() -> None:
    for model in (*bench_aot.OWN, *bench_aot.FAMILIES):
        assert "architectures" in bench_aot.read_config(model)
