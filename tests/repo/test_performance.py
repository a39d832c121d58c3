"""The page on performance, the benchmarks and their recorded results name each other."""

import json
import re
from pathlib import Path

from benchmarks.plot_results import PLOTS, QUESTIONS, RESULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text()
BENCHMARKS = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}


def test_the_page_and_the_readme_show_every_benchmark() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert set(re.findall(r"`(bench_\w+)", PAGE)) == BENCHMARKS
    assert set(re.findall(r"^\| `(bench_\w+)`", readme, flags=re.MULTILINE)) == BENCHMARKS


def test_the_page_shows_every_plot() -> None:
    shown = re.findall(r"\]\(images/performance/(\w+)\.svg\)", PAGE)
    assert sorted(shown) == sorted(QUESTIONS)
    assert {path.stem for path in PLOTS.glob("*.svg")} == set(QUESTIONS)


def test_every_result_names_its_benchmark_commit_and_machine() -> None:
    for path in RESULTS.glob("*.json"):
        records = json.loads(path.read_text())
        assert [record["date"] for record in records] == sorted(record["date"] for record in records)
        for record in records:
            assert record["machine"]["processor"] and record["conditions"] and "commit" in record
            if path.stem == "experiments":
                assert record["question"] and record["method"] and record["figures"]
            else:
                assert record["benchmark"] == path.stem and f"bench_{path.stem}" in BENCHMARKS
                assert record["results"] and (record.get("command") or record["method"])


def test_every_plot_can_be_drawn_from_the_latest_results() -> None:
    for plot in QUESTIONS.values():
        assert plot().axes
