"""Kill until the numbers asked for are reached; print each run, then what came of them all as tables.

A main module of this name is not imported again by the processes that are killed, and so neither is the SDK.
"""

import argparse
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from skyrl_tx.testing.chaos.halves import Victim, random_kills
from skyrl_tx.testing.chaos.runs import Server, differences, fake_server, jax_server, run
from skyrl_tx.testing.postgresql_server import PostgresqlServer

KILLS_A_RUN = 12
Databases = Callable[[], str | None]
"""Gives the URL of a new database with each call; None: a file."""


@dataclass(slots=True)
class Tally:
    """What the runs on one kind of server came to."""

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


def kill(server: Server, num_kills: int, seed: int, databases: Databases, where: str) -> Tally:
    """Run until there were so many kills; `where` says in the table what `databases` are."""
    calm = {num_tenants: run(server, num_tenants, []) for num_tenants in (1, 2)}
    tally = Tally(server.name + where)
    while tally.kills.total() < num_kills:
        num_tenants, started = 1 + tally.num_runs % 2, time.monotonic()
        found = run(replace(server, database_url=databases()), num_tenants, random_kills(seed, KILLS_A_RUN))
        said = differences(found, calm[num_tenants])
        tally.num_runs += 1
        tally.num_lost += found.num_open
        tally.num_repeated += found.num_repeated
        tally.num_compared += sum(map(len, found.transcripts)) + len(found.weights)
        tally.num_unequal += bool(said)
        tally.kills.update(found.done)
        about = f"{tally.name}, seed {seed}, {num_tenants} tenants: {found.done.total()} kills"
        print(f"{about}, {time.monotonic() - started:.0f} s", *said[:5], sep="\n  ", flush=True)
        seed += 1
    return tally


def show(tallies: list[Tally]) -> None:
    """Print what came of the kills, and where they were."""
    print("\n| backend | runs | kills | futures lost | effects repeated | results and saved weights compared", end="")
    print(" | runs not bit-equal |\n|---|---|---|---|---|---|---|", *tallies, sep="\n")
    print(f"\n| killed | where | {' | '.join(tally.name for tally in tallies)} |\n|---|---|{'---|' * len(tallies)}")
    for victim, place in sorted(set().union(*(tally.kills for tally in tallies))):
        counts = " | ".join(str(tally.kills[victim, place]) for tally in tallies)
        print(f"| {victim} | {place} | {counts} |")


def main() -> None:
    """Kill as told; the exit status says whether a run was not as undisturbed ones are."""
    parser = argparse.ArgumentParser(description="Kill API and engine while clients train, and compare bit by bit.")
    parser.add_argument("--kills", type=int, default=200, help="on the fake backend")
    parser.add_argument("--jax-kills", type=int, default=20, help="on the JAX backend, float32")
    parser.add_argument("--bf16-kills", type=int, default=0, help="on the JAX backend, bfloat16: reported only")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each next one's is one more")
    parser.add_argument(
        "--postgresql", action="store_true", help="keep requests there; undisturbed runs keep to a file"
    )
    told = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    logging.disable()  # the SDK tells at length of servers that are gone
    with ExitStack() as stack:
        databases = stack.enter_context(PostgresqlServer()).new_database if told.postgresql else lambda: None
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-jax-")))
        where = ", PostgreSQL" if told.postgresql else ""
        asked = [
            (told.kills, fake_server),
            (told.jax_kills, lambda: jax_server(directory)),
            (told.bf16_kills, lambda: jax_server(directory / "bf16", "bfloat16")),
        ]
        tallies = [kill(server(), number, told.seed, databases, where) for number, server in asked if number]
    show(tallies)
    raise SystemExit(1 if any(tally.num_unequal and "bfloat16" not in tally.name for tally in tallies) else 0)


if __name__ == "__main__":
    main()
