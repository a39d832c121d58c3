"""Run histories in child processes, which import this module because they cannot import `__main__`."""

import atexit
import logging
import os
from pathlib import Path

from tests.support.simulation.history import Outcome, Simulator

_simulators: list[Simulator] = []


def prepare(is_plain: bool = False) -> None:
    """Prepare a process: one processor, so that passing a turn is short; no log."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {_processor()})
    logging.getLogger("skyrl_tx").setLevel(logging.CRITICAL + 1)
    _simulators.append(Simulator(is_plain=is_plain))
    atexit.register(_simulators[0].close)


def _processor() -> int:
    """Return the processor on which this process runs: another process that is busy runs on another one."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[36])  # field 39, see proc(5)


def run_batch(batch: tuple[range, tuple[str, ...]]) -> list[Outcome]:
    """Run the histories of some seeds with some kinds of faults."""
    seeds, kinds = batch
    return [_simulators[0].run(seed, kinds) for seed in seeds]
