"""Statistics and the report format that all benchmarks share."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile, interpolated linearly between neighbours."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(values: Sequence[float]) -> dict[str, float | int]:
    """Return number of runs, median, 95th percentile and interquartile range."""
    return {
        "runs": len(values),
        "median": round(statistics.median(values), 4),
        "p95": round(quantile(values, 0.95), 4),
        "iqr": round(quantile(values, 0.75) - quantile(values, 0.25), 4),
    }


def compute_quartiles(values: Sequence[float], digits: int = 3) -> dict[str, float | int]:
    """Return number of runs, median, and first and third quartile."""
    return {
        "runs": len(values),
        "q1": round(quantile(values, 0.25), digits),
        "median": round(statistics.median(values), digits),
        "q3": round(quantile(values, 0.75), digits),
    }


def report(benchmark: str, options: argparse.Namespace, results: dict[str, Any], packages: Sequence[str]) -> None:
    """Print one record of the format that README.md describes, as JSON, to stdout."""
    command = f"python -m benchmarks.{Path(sys.argv[0]).stem} {' '.join(sys.argv[1:])}".rstrip()
    record = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": get_commit(),
        "machine": describe_machine(packages),
        "command": command,
        "options": vars(options),
        "results": results,
    }
    json.dump(record, sys.stdout, indent=2, default=str)
    print()


def describe_machine(packages: Sequence[str]) -> dict[str, Any]:
    """Return the machine of a record, with the versions of these packages."""
    return {
        "processor": _read_processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def get_commit() -> str:
    """Return `git describe` of the working tree, with `-dirty` if more than the results of benchmarks has changed."""
    described = _run_git("describe", "--always")
    changed = _run_git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{described}{'-dirty' if changed else ''}" if described else "unknown"


def _run_git(*arguments: str) -> str:
    """Return the output of git at the root of the repository; nothing where git does not work."""
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return run.stdout.strip()


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
