"""Run until the requested number of kills is reached; print each run, then tables of all results.

The killed processes do not import a main module named `__main__.py`, and so do not import the SDK.
"""

import argparse
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.chaos.processes import Victim, random_kills
from tests.support.chaos.runs import Server, fake_server, find_differences, jax_server, run
from tests.support.postgresql_server import PostgresqlServer

KILLS_A_RUN = 12
Databases = Callable[[], str | None]
"""Returns the URL of a new database with each call; None selects SQLite."""


@dataclass(slots=True)
class Tally:
    """The results of all runs on one kind of server."""

    name: str
    num_runs: int = 0
    num_lost: int = 0
    num_repeated: int = 0
    num_compared: int = 0
    num_unequal: int = 0
    kills: Counter[tuple[Victim, str]] = field(default_factory=Counter[tuple[Victim, str]])

    def __str__(self) -> str:
        counts = (self.num_runs, self.kills.total(), self.num_lost, self.num_repeated, self.num_compared)
        return f"| {self.name} | {' | '.join(f'{count:,}' for count in counts)} | {self.num_unequal} |"


def kill(
    server: Server, num_kills: int, seed: int, databases: Databases, where: str, tenants: Sequence[int] = (1, 2)
) -> Tally:
    """Run until `num_kills` kills have happened; `where` names the database in the table.

    The runs have `tenants` in turn. Undisturbed runs have one engine.
    """
    undisturbed = {num_tenants: run(replace(server, num_engines=1), num_tenants, []) for num_tenants in tenants}
    tally = Tally(server.name + where)

    while tally.kills.total() < num_kills:
        num_tenants, started = tenants[tally.num_runs % len(tenants)], time.monotonic()
        kills = random_kills(seed, KILLS_A_RUN * server.num_engines)
        found = run(replace(server, database_url=databases()), num_tenants, kills)
        differing = find_differences(found, undisturbed[num_tenants])
        tally.num_runs += 1
        tally.num_lost += found.num_open
        tally.num_repeated += found.num_repeated
        tally.num_compared += sum(map(len, found.transcripts)) + len(found.weights)
        tally.num_unequal += bool(differing)
        tally.kills.update(found.done)
        about = f"{tally.name}, seed {seed}, {num_tenants} tenants: {found.done.total()} kills"
        print(f"{about}, {time.monotonic() - started:.0f} s", *differing[:5], sep="\n  ", flush=True)
        seed += 1

    return tally


def show(tallies: list[Tally]) -> None:
    """Print the tables of results and of kills by crash point."""
    print("\n| backend | runs | kills | futures lost | effects repeated | results and saved weights compared", end="")
    print(" | runs not bit-equal |\n|---|---|---|---|---|---|---|", *tallies, sep="\n")
    print(
        f"\n| process | crash point | {' | '.join(tally.name for tally in tallies)} |\n|---|---|{'---|' * len(tallies)}"
    )
    for victim, point in sorted(set().union(*(tally.kills for tally in tallies))):
        counts = " | ".join(str(tally.kills[victim, point]) for tally in tallies)
        print(f"| {victim} | {point} | {counts} |")


def main() -> None:
    """Run the kill tests; the exit status is 1 if a float32 run differs from an undisturbed one."""
    parser = argparse.ArgumentParser(description="Kill API and engine while clients train, and compare bit by bit.")
    parser.add_argument("--kills", type=int, default=200, help="number of kills on the fake backend")
    parser.add_argument("--jax-kills", type=int, default=20, help="number of kills on the JAX backend, float32")
    parser.add_argument(
        "--bf16-kills",
        type=int,
        default=0,
        help="number of kills on the JAX backend, bfloat16; differences do not fail the run",
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the first run; later runs count up")
    parser.add_argument("--engines", type=int, default=1, help="number of engines on one PostgreSQL database")
    parser.add_argument("--tenants", type=int, default=None, help="number of tenants; default: 1 and 2 in turn")
    parser.add_argument("--postgresql", action="store_true", help="use PostgreSQL; undisturbed runs use SQLite")
    arguments = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    logging.disable()  # the SDK logs every lost connection

    with ExitStack() as stack:
        is_postgresql = arguments.postgresql or arguments.engines > 1
        databases = stack.enter_context(PostgresqlServer()).new_database if is_postgresql else lambda: None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-jax-")))
        where = ", PostgreSQL" if is_postgresql else ""
        where += f", {arguments.engines} engines" if arguments.engines > 1 else ""
        tenants = (1, 2) if arguments.tenants is None else (arguments.tenants,)
        requested = [
            (arguments.kills, fake_server),
            (arguments.jax_kills, lambda: jax_server(directory)),
            (arguments.bf16_kills, lambda: jax_server(directory / "bf16", "bfloat16")),
        ]
        tallies = [
            kill(replace(server(), num_engines=arguments.engines), number, arguments.seed, databases, where, tenants)
            for number, server in requested
            if number
        ]

    show(tallies)
    raise SystemExit(1 if any(tally.num_unequal and "bfloat16" not in tally.name for tally in tallies) else 0)


if __name__ == "__main__":
    main()
