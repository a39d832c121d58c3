"""The pages on performance, the benchmarks and their recorded results name each other."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench_aot
from benchmarks.plot_results import PLOTS, QUESTIONS, RESULTS

ROOT = Path(__file__).parents[2]
SUMMARY = (ROOT / "docs" / "performance.md").read_text()
MEASUREMENTS = [path.read_text() for path in sorted((ROOT / "docs" / "internals" / "measurements").glob("*.md"))]
BENCHMARKS = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
MAX_LINES = 120


def read_records() -> list[tuple[str, dict[str, Any]]]:
    """Return all records with the name of their file, oldest first in each file."""
    return [(path.stem, record) for path in sorted(RESULTS.glob("*.json")) for record in json.loads(path.read_text())]


def test_the_measurements_and_the_readme_name_every_benchmark() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert set(re.findall(r"`(bench_\w+)", "\n".join(MEASUREMENTS))) == BENCHMARKS
    assert set(re.findall(r"^\| `(bench_\w+)`", readme, flags=re.MULTILINE)) == BENCHMARKS


def test_every_plot_is_shown_once() -> None:
    shown = re.findall(r"\]\([./]*images/performance/(\w+)\.svg\)", "\n".join([SUMMARY, *MEASUREMENTS]))
    assert sorted(shown) == sorted(QUESTIONS)
    assert {path.stem for path in PLOTS.glob("*.svg")} == set(QUESTIONS)


def test_the_summary_is_short() -> None:
    assert len(SUMMARY.splitlines()) <= MAX_LINES


def test_the_tables_of_compiled_programs_are_those_of_the_records() -> None:
    records = bench_aot.load(bench_aot.RECORDS)
    for path, lines in (
        (bench_aot.PAGE, bench_aot.make_table(records)),
        (bench_aot.SUMMARY_PAGE, bench_aot.summarize(records)),
    ):
        assert "\n".join([bench_aot.BEGIN, *lines, bench_aot.END]) in path.read_text()


def test_every_result_names_its_benchmark_commit_and_machine() -> None:
    for path in RESULTS.glob("*.json"):
        records = json.loads(path.read_text())
        assert [record["date"] for record in records] == sorted(record["date"] for record in records)
    for name, record in read_records():
        assert record["machine"]["processor"] and record["conditions"] and "commit" in record
        if name == "experiments":
            assert record["question"] and record["method"] and record["figures"]
        else:
            assert record["benchmark"] == name and f"bench_{name}" in BENCHMARKS
            assert record["results"] and (record.get("command") or record["method"])


def test_records_of_commits_outside_the_history_say_so() -> None:
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if known.stdout.strip() != "false":
        pytest.skip("the history of the repository is not here")

    history = subprocess.run([*git, "log", "--format=%h", "--abbrev=7", "HEAD"], capture_output=True, text=True).stdout
    commits = {line[:7] for line in history.split()}
    for name, record in read_records():
        if record["commit"] is not None and record["commit"][:7] not in commits:
            assert "is not in the history" in record.get("note", ""), f"{name}: {record['commit']}"
    for page in [SUMMARY, *MEASUREMENTS]:
        for commit, remark in re.findall(r"`([0-9a-f]{7})`(, older history)?", page):
            assert commit in commits or remark, f"`{commit}` is not in the history and not marked as older history"


def test_every_plot_can_be_drawn_from_the_latest_results() -> None:
    for plot in QUESTIONS.values():
        assert plot().axes
