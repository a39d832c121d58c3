"""The kernels of some work and their time on a GPU, by the profiler of JAX."""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax


def profile(work: Callable[[], object], most: int = 16) -> dict[str, Any]:
    """Run `work`, which must wait for its own results, and return the times of its kernels. Empty without a GPU.

    `span_ms` is the time from the start of the first kernel to the end of the last, `busy_ms` the sum of all kernels.
    `kernels` lists the kernels that took the most time: name, milliseconds and calls. Kernels whose names differ only
    in the numbers at the end count together. For a loop inside a CUDA graph, only the kernels of one iteration are
    seen.
    """
    with TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            work()
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
        events = [event for line in lines if line.name.startswith("Stream") for event in line.events]
        spans = [(event.name, event.start_ns, event.duration_ns) for event in events]
    if not spans:
        return {}

    # Add up the kernels of each name.
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for name, _, duration in spans:
        entry = found[re.sub(r"[._]\d+$", "", name)]
        entry[0] += duration / 1e6
        entry[1] += 1

    slowest = sorted(found.items(), key=lambda item: -item[1][0])[:most]
    first, last = min(start for _, start, _ in spans), max(start + length for _, start, length in spans)
    return {
        "span_ms": round((last - first) / 1e6, 3),
        "busy_ms": round(sum(length for *_, length in spans) / 1e6, 3),
        "kernels": [[name, round(total, 3), calls] for name, (total, calls) in slowest],
    }
