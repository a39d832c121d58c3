"""Run histories: `python -m tests.support.simulation --histories 2000 --seed 1`, or replay one with `--replay SEED`."""

import argparse
import contextlib
import logging
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.support.simulation import workers
from tests.support.simulation.faults import KINDS
from tests.support.simulation.history import Outcome, Simulator
from tests.support.simulation.mutations import MUTATIONS, take_out

_BATCH = 50


def main() -> int:
    """Run histories; return 1 if one violates a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation", description=__doc__)
    parser.add_argument("--histories", type=int, default=2000, help="number of histories")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first history; the next ones count up")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run histories at once")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"kinds of faults, of {', '.join(KINDS)}")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one history and print its trace")
    parser.add_argument("--plain", action="store_true", help="execute each statement through SQLAlchemy; slower")
    parser.add_argument("--verbose", action="store_true", help="with --replay: print the product's log, too")
    parser.add_argument("--most-violations", type=int, default=5, help="stop after this number of histories that fail")
    parser.add_argument("--without", choices=MUTATIONS, help="take a guarantee out of the product first")
    options = parser.parse_args()
    if options.without is not None:
        take_out(options.without)
    kinds = tuple(kind for kind in options.kinds.split(",") if kind)
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}")
    if options.replay is not None:
        return _replay(options.replay, kinds, is_verbose=options.verbose, is_plain=options.plain)
    return _run_all(options, kinds)


def _replay(seed: int, kinds: tuple[str, ...], *, is_verbose: bool, is_plain: bool) -> int:
    logging.getLogger("skyrl_tx").setLevel(logging.DEBUG if is_verbose else logging.CRITICAL + 1)
    logging.basicConfig(format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    simulator = Simulator(is_plain=is_plain)
    try:
        outcome = simulator.run(seed, kinds, is_traced=True)
    finally:
        simulator.close()
    print(*outcome.lines, sep="\n")
    _print_outcome(outcome)
    print(f"{outcome.num_requests} requests, {outcome.virtual_s:.1f} virtual seconds, trace {outcome.trace_hash}")
    return 1 if outcome.violations else 0


def _run_all(options: argparse.Namespace, kinds: tuple[str, ...]) -> int:
    started, cpu = time.perf_counter(), time.process_time()
    seeds = range(options.seed, options.seed + options.histories)
    batches = [(seeds[start : start + _BATCH], kinds) for start in range(0, len(seeds), _BATCH)]
    num_run = num_requests = num_faults = num_engines = num_violating = 0
    digest = 0

    with contextlib.ExitStack() as stack:
        if options.jobs == 1:
            workers.prepare(options.plain)
            found = (workers.run_batch((range(seed, seed + 1), kinds)) for seed in seeds)
        else:
            spawn = get_context("spawn")
            pool = stack.enter_context(
                ProcessPoolExecutor(
                    options.jobs, mp_context=spawn, initializer=workers.prepare, initargs=(options.plain,)
                )
            )
            stack.callback(pool.shutdown, cancel_futures=True)
            found = pool.map(workers.run_batch, batches)

        for outcomes in found:
            for outcome in outcomes:
                num_run += 1
                num_requests += outcome.num_requests
                num_faults += outcome.num_faults
                num_engines += outcome.num_engines
                digest = hash((digest, int(outcome.trace_hash, 16)))
                if outcome.violations:
                    num_violating += 1
                    _print_outcome(outcome)
                    joined = ",".join(kinds)
                    print(
                        f"  replay: python -m tests.support.simulation --replay {outcome.seed} --kinds {joined}\n",
                        flush=True,
                    )
            if num_violating >= options.most_violations:
                break

    seconds = time.perf_counter() - started
    print(
        f"{num_run} histories, {num_requests} requests, {num_faults} faults, {num_engines} engines, "
        f"{num_violating} with violations, {seconds:.1f} s, "
        f"{time.process_time() - cpu:.1f} CPU seconds here, digest {digest & 0xFFFFFFFFFFFFFFFF:016x}"
    )
    return 1 if num_violating else 0


def _print_outcome(outcome: Outcome) -> None:
    if outcome.violations:
        print(f"seed {outcome.seed}: {outcome.plan}")
        print(*(f"  VIOLATION {violation}" for violation in outcome.violations), sep="\n")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a history
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.support.simulation", *sys.argv[1:]])
    sys.exit(main())
