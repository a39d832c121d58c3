"""What every benchmark reports: where it ran, and robust figures of what it measured."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile, interpolated between neighbours."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median, 95th percentile and spread (interquartile range)."""
    return {
        "runs": len(values),
        "median": round(statistics.median(values), 4),
        "p95": round(quantile(values, 0.95), 4),
        "spread": round(quantile(values, 0.75) - quantile(values, 0.25), 4),
    }


def quartiles(values: Sequence[float], digits: int = 3) -> dict[str, float | int]:
    """Median and the quartiles around it."""
    return {
        "runs": len(values),
        "q1": round(quantile(values, 0.25), digits),
        "median": round(statistics.median(values), digits),
        "q3": round(quantile(values, 0.75), digits),
    }


def machine(*packages: str) -> dict[str, Any]:
    """Where this ran: commit, processor, cores, Python and the versions that matter."""
    return {
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def report(name: str, machine: dict[str, Any], results: dict[str, Any]) -> None:
    """Print one JSON document to stdout."""
    json.dump(
        {"benchmark": name, "command": " ".join(sys.argv), "machine": machine, "results": results}, sys.stdout, indent=2
    )
    print()


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
