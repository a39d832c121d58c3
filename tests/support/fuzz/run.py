"""Fuzz tests (`make fuzz`): hundreds of thousands of inputs for all routes and decoders, with a table of results.

Each target runs in its own process, so that crashes are counted. Findings are printed with their seeds.
"""

import argparse
import logging
import multiprocessing
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from hypothesis import given, seed
from hypothesis import strategies as st

from tests.support.fuzz.decoders import DECODERS, check_decoder
from tests.support.fuzz.reports import ExcessiveMemory, Finding, Hang, ServerError, Tally, examples, mutations, tracing
from tests.support.fuzz.routes import attempts, call, create_ids, list_routes
from tests.support.live_api import Server, adapters_in_process
from tests.support.live_stack import live_stack

T = TypeVar("T")
ROUTES = "all routes"
_MUTATIONS = 19
_EXAMPLES_PER_ROUND = 100
_CALLS_PER_ROUND = 20
_ROUNDS_PER_SERVER = 5
_MAX_FINDINGS = 30
"""Number of findings after which a target is abandoned."""
_COLUMNS: dict[type[Finding], str] = {
    ServerError: "5xx",
    Hang: "hangs",
    ExcessiveMemory: "too much memory",
    Finding: "other",
}


@dataclass(slots=True)
class Row:
    """The results of one target."""

    tally: Tally = field(default_factory=Tally)
    found: Counter[str] = field(default_factory=Counter[str])
    peak_rss_bytes: int = 0

    def fuzz(self, turn: int, inputs: st.SearchStrategy[T], test: Callable[[T], None], number: int) -> None:
        """Test `number` inputs and count findings; `turn` is the seed."""

        def check(value: T) -> None:
            test(value)

        try:
            seed(turn)(examples(number, is_random=True)(given(inputs)(check)))()
        except Finding as error:
            self._note(_COLUMNS[type(error)], f"seed {turn}: {error}")
        except Exception as error:
            self._note("crashes", f"seed {turn}: {error!r}")

    def _note(self, kind: str, message: str) -> None:
        self.found[kind] += 1
        print(message, flush=True)
        if self.found.total() >= _MAX_FINDINGS:
            raise SystemExit("too many findings")


def fuzz_decoder(name: str, number: int, first_seed: int, row: Row) -> None:
    """Test a decoder with at least `number` inputs."""
    decoder, turn = DECODERS[name], first_seed
    with tracing():
        while row.tally.num_inputs < number:

            def read(whole: bytes) -> None:
                for raw in mutations(whole, _MUTATIONS):
                    check_decoder(row.tally, decoder.read, raw)

            row.fuzz(turn, decoder.inputs, read, _EXAMPLES_PER_ROUND)
            turn += 1


def fuzz_routes(number: int, first_seed: int, row: Row) -> None:
    """Call all routes in turn, `number` calls in total; server and engine are replaced regularly."""
    turn = first_seed
    while row.tally.num_inputs < number:
        with _stack() as server:
            for route in list_routes(server) * _ROUNDS_PER_SERVER:
                inputs = attempts(route, create_ids(server))
                row.fuzz(turn, inputs, partial(call, server, row.tally, route), _CALLS_PER_ROUND)
                turn += 1
                if row.tally.num_inputs >= number:
                    break


@contextmanager
def _stack() -> Generator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as name,
        adapters_in_process(),
        live_stack("fake", Path(name), retrieve_hold_s=0.01) as stack,
    ):
        yield stack.server


def _fuzz(name: str, number: int, first_seed: int, report: Connection) -> None:
    """Fuzz one target; the entry point of its process."""
    logging.disable()  # every refusal is logged
    row = Row()
    if name == ROUTES:
        fuzz_routes(number, first_seed, row)
    else:
        fuzz_decoder(name, number, first_seed, row)
    row.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.send(row)


def main() -> None:
    """Fuzz all targets in turn and print a table row for each."""
    parser = argparse.ArgumentParser(description="Send valid, nearly valid and malformed input to routes and decoders.")
    parser.add_argument("--route-inputs", type=int, default=60_000, help="number of calls of routes")
    parser.add_argument("--decoder-inputs", type=int, default=60_000, help="number of inputs per decoder")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| target | inputs | 5xx | crashes | hangs | other | peak memory | slowest | minutes |")
    print("|---|---|---|---|---|---|---|---|---|")
    num_found = 0

    for name in (ROUTES, *DECODERS):
        number = arguments.route_inputs if name == ROUTES else arguments.decoder_inputs
        if not number:
            continue
        started = time.monotonic()
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=_fuzz, args=(name, number, arguments.seed, writing))
        process.start()
        writing.close()
        try:
            row: Row = reading.recv()
        except EOFError:  # the process crashed
            row = Row(found=Counter(crashes=1))
        process.join()
        num_found += row.found.total()
        print(_line(name, row, (time.monotonic() - started) / 60), flush=True)

    raise SystemExit(1 if num_found else 0)


def _line(name: str, row: Row, minutes: float) -> str:
    found, tally = row.found, row.tally
    other = found["other"] + found["too much memory"]
    peak = f"{tally.peak_bytes / 2**20:.1f} MiB" if tally.peak_bytes else f"{row.peak_rss_bytes >> 20} MiB RSS"
    numbers = (found[column] for column in ("5xx", "crashes", "hangs"))
    counts = " | ".join(map(str, numbers))
    return f"| {name} | {tally.num_inputs:,} | {counts} | {other} | {peak} | {tally.longest_s:.2f} s | {minutes:.1f} |"
