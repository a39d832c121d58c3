"""`make fuzz`: hundreds of thousands of inputs for every route and every decoder, and what came of them as a table.

Each row is fuzzed by a process of its own, so that a crash is a number in it. What is found is printed, with the seed.
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

from skyrl_tx.testing.fuzz_decoders import DECODERS, survives
from skyrl_tx.testing.fuzz_routes import attempts, call, known_ids, routes
from skyrl_tx.testing.fuzzing import Found, Hang, Hunger, ServerError, Tally, examples, mutations, tracing
from skyrl_tx.testing.live_api import Server
from skyrl_tx.testing.live_house import live_house

T = TypeVar("T")
ROUTES = "all routes"
_MUTATIONS = 19
_EXAMPLES_A_ROUND = 100
_CALLS_A_ROUND = 20
_ROUNDS_A_HOUSE = 5
_ENOUGH = 30
"""As many finds end the fuzzing of a target."""
_COLUMNS: dict[type[Found], str] = {ServerError: "5xx", Hang: "hangs", Hunger: "too much memory", Found: "other"}


@dataclass(slots=True)
class Row:
    """What came of one target."""

    tally: Tally = field(default_factory=Tally)
    found: Counter[str] = field(default_factory=Counter[str])
    peak_rss_bytes: int = 0

    def fuzz(self, turn: int, inputs: st.SearchStrategy[T], test: Callable[[T], None], number: int) -> None:
        """Test so many inputs, and count what is found; `turn` is the seed."""

        def check(value: T) -> None:
            test(value)

        try:
            seed(turn)(examples(number, is_random=True)(given(inputs)(check)))()
        except Found as error:
            self._note(_COLUMNS[type(error)], f"seed {turn}: {error}")
        except Exception as error:
            self._note("crashes", f"seed {turn}: {error!r}")

    def _note(self, kind: str, said: str) -> None:
        self.found[kind] += 1
        print(said, flush=True)
        if self.found.total() >= _ENOUGH:
            raise SystemExit("too much is found to go on")


def fuzz_decoder(name: str, number: int, first_seed: int, row: Row) -> None:
    """Read inputs until there were so many."""
    decoder, turn = DECODERS[name], first_seed
    with tracing():
        while row.tally.num_inputs < number:

            def read(whole: bytes) -> None:
                for raw in mutations(whole, _MUTATIONS):
                    survives(row.tally, decoder.read, raw)

            row.fuzz(turn, decoder.inputs, read, _EXAMPLES_A_ROUND)
            turn += 1


def fuzz_routes(number: int, first_seed: int, row: Row) -> None:
    """Call routes in turn until there were so many calls; the server and its engine are new ones now and then."""
    turn = first_seed
    while row.tally.num_inputs < number:
        with _house() as server:
            for route in routes(server) * _ROUNDS_A_HOUSE:
                inputs = attempts(route, known_ids(server))
                row.fuzz(turn, inputs, partial(call, server, row.tally, route), _CALLS_A_ROUND)
                turn += 1
                if row.tally.num_inputs >= number:
                    break


@contextmanager
def _house() -> Generator[Server]:
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as name,
        live_house("fake", Path(name), retrieve_hold_s=0.01) as house,
    ):
        yield house.server


def _fuzz(name: str, number: int, first_seed: int, report: Connection) -> None:
    """Fuzz one target; the first function of its process."""
    logging.disable()  # refusals are logged at length
    row = Row()
    if name == ROUTES:
        fuzz_routes(number, first_seed, row)
    else:
        fuzz_decoder(name, number, first_seed, row)
    row.peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    report.send(row)


def main() -> None:
    """Fuzz one target after the other; print what each gave, then the table."""
    parser = argparse.ArgumentParser(description="Send what fits, nearly fits or does not to routes and decoders.")
    parser.add_argument("--route-inputs", type=int, default=60_000, help="calls of routes, an engine behind them")
    parser.add_argument("--decoder-inputs", type=int, default=60_000, help="inputs of each decoder")
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print("| target | inputs | 5xx | crashes | hangs | other | peak memory | longest | minutes |")
    print("|---|---|---|---|---|---|---|---|---|")
    num_found = 0
    for name in (ROUTES, *DECODERS):
        number = told.route_inputs if name == ROUTES else told.decoder_inputs
        if not number:
            continue
        started = time.monotonic()
        reading, writing = context.Pipe(duplex=False)
        process = context.Process(target=_fuzz, args=(name, number, told.seed, writing))
        process.start()
        writing.close()
        try:
            row: Row = reading.recv()
        except EOFError:  # the process is gone
            row = Row(found=Counter(crashes=1))
        process.join()
        num_found += row.found.total()
        print(_line(name, row, (time.monotonic() - started) / 60), flush=True)
    raise SystemExit(1 if num_found else 0)


def _line(name: str, row: Row, minutes: float) -> str:
    found, tally = row.found, row.tally
    other = found["other"] + found["too much memory"]
    peak = f"{tally.peak_bytes / 2**20:.1f} MiB an input" if tally.peak_bytes else f"{row.peak_rss_bytes >> 20} MiB RSS"
    numbers = (found[column] for column in ("5xx", "crashes", "hangs"))
    counts = " | ".join(map(str, numbers))
    return f"| {name} | {tally.num_inputs:,} | {counts} | {other} | {peak} | {tally.longest_s:.2f} s | {minutes:.1f} |"


if __name__ == "__main__":
    main()
