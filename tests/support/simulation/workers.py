"""Histories in a process of their own. Child processes import this module, because they cannot import `__main__`."""

import atexit
import logging
import os

from tests.support.simulation.history import Outcome, Simulator

_simulators: list[Simulator] = []


def prepare() -> None:
    """Prepare a process: one processor, so that passing a turn is short; no log."""
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[os.getpid() % len(allowed)]})
    logging.getLogger("skyrl_tx").setLevel(logging.CRITICAL + 1)
    _simulators.append(Simulator())
    atexit.register(_simulators[0].close)


def run_batch(batch: tuple[range, tuple[str, ...]]) -> list[Outcome]:
    """Run the histories of some seeds with some kinds of faults."""
    seeds, kinds = batch
    return [_simulators[0].run(seed, kinds) for seed in seeds]
