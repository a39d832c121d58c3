"""`make chaos`: hundreds of kills while clients train, and what came of it as a table.

Each run makes a server that dies by a schedule, lets one client or two train on it, and compares all that they saw, the
weights that they saved and the log on disk with those of the same clients on a server that nobody disturbed.
"""

import argparse
import hashlib
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_tx.testing.chaos_client import Transcript, run_tenants
from skyrl_tx.testing.chaos_halves import Halves, Kill, Victim, random_kills
from skyrl_tx.testing.database_look import rows
from skyrl_tx.testing.tiny_models import write_model

KILLS_A_RUN = 12
_TRIES = "1000"  # a run kills one request more often than a server would bear with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What the clients train on."""

    name: str
    base_model: str
    api_flags: Sequence[str] = ()
    engine_flags: Sequence[str] = ()
    database_url: str | None = None
    """A database of PostgreSQL, with empty tables; None: a file in the data directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All that a run left behind."""

    transcripts: list[Transcript]
    kinds: Counter[str]
    """Requests on disk, by kind and whether they succeeded."""
    weights: list[str]
    """Hashes of the weights, moments and gradients saved by name, in order of their names."""
    num_open: int
    num_repeated: int
    """Effects that have another's number, or that the model's count does not know."""
    changed_answers: int = 0
    done: Counter[tuple[Victim, str]] = field(default_factory=Counter[tuple[Victim, str]])


def fake_server(database_url: str | None = None) -> Server:
    """The fake backend, a little slowed, so that instants fall into its work."""
    common = ("--base-model", "fake", "--backend", "fake")
    slowed = ("--backend-config.step-delay-s", "0.01", "--backend-config.slice-tokens", "4")
    often = (
        "--snapshot-effects",
        "5",
        "--snapshot-interval-s",
        "0.5",
        "--snapshot-max-share",
        "1",
        "--max-attempts",
        _TRIES,
    )
    flags = (*common, *slowed, *often)
    name = "fake" if database_url is None else "fake, PostgreSQL"
    return Server(name=name, base_model="fake", api_flags=common, engine_flags=flags, database_url=database_url)


def jax_server(directory: Path, dtype: str = "float32") -> Server:
    """The JAX backend on a model of a layer; compiled programs are kept from run to run."""
    model = str(write_model(directory / "model", vocab_size=256, num_layers=1, max_context_length=64))
    common = ("--base-model", model, "--served-model-name", "small")
    sizes = {
        "compile-cache-dir": str(directory / "cache"),
        "dtype": dtype,
        "max-lora-adapters": "2",
        "max-lora-rank": "4",
        "max-sampler-adapters": "2",
        "micro-batch-tokens": "64",
        "sample-slots": "8",  # a tile for each of two tenants: where two share one, another program decodes
        "max-sample-tokens": "512",
    }
    flags = [word for name, value in sizes.items() for word in (f"--backend-config.{name}", value)]
    often = (
        "--snapshot-effects",
        "5",
        "--snapshot-interval-s",
        "0.5",
        "--snapshot-max-share",
        "1",
        "--max-attempts",
        _TRIES,
    )
    return Server(name=f"jax {dtype}", base_model="small", api_flags=common, engine_flags=(*common, *flags, *often))


Line = Callable[[str], AbstractContextManager[str]]
"""What stands between clients and a server: given its URL, it gives theirs."""


def run(server: Server, num_tenants: int, kills: Sequence[Kill], line: Line = nullcontext) -> Outcome:
    """Let clients train while a server dies as told, and their line to it is as it is."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        halves = Halves(directory, kills, server.api_flags, server.engine_flags, server.database_url)
        try:
            with halves, line(halves.url) as url:
                transcripts = run_tenants(url, server.base_model, num_tenants)
        except BaseException as error:
            error.add_note(f"{kills}\n{halves.log_path.read_text()[-8000:]}")
            raise
        return _outcome(halves, transcripts)


def _outcome(halves: Halves, transcripts: list[Transcript]) -> Outcome:
    def found(query: str) -> Sequence[tuple[Any, ...]]:
        return rows(halves.data_dir, halves.database_url, query)

    by_kind = found("SELECT kind, status, count(*) FROM requests GROUP BY kind, status")
    ((num_open,),) = found("SELECT count(*) FROM requests WHERE status = 'open'")
    per_model = found(
        "SELECT m.effect_order, count(r.effect_order), count(DISTINCT r.effect_order), max(r.effect_order)"
        " FROM models m JOIN requests r ON r.model_id = m.model_id GROUP BY m.model_id"
    )
    saved = found("SELECT name, artifact_id FROM checkpoints")
    weights = sorted(f"{name} {_hash(halves.data_dir / 'artifacts' / str(artifact))}" for name, artifact in saved)
    return Outcome(
        transcripts=transcripts,
        kinds=Counter({f"{kind} {status}": number for kind, status, number in by_kind}),
        weights=weights,
        num_open=num_open,
        num_repeated=sum(len(set(counts)) != 1 for counts in per_model),
        changed_answers=halves.changed_answers,
        done=halves.done,
    )


def _hash(artifact: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(artifact.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def differences(found: Outcome, calm: Outcome) -> list[str]:
    """What is not as it was on an undisturbed server; none is the promise."""
    said: list[str] = []
    for tenant, (one, other) in enumerate(zip(found.transcripts, calm.transcripts, strict=True)):
        said += [
            f"tenant {tenant}, line {line}: {a} is not {b}"
            for line, (a, b) in enumerate(zip(one, other, strict=True))
            if a != b
        ]
    if found.kinds != calm.kinds:
        said.append(f"requests {found.kinds} are not {calm.kinds}")
    if found.weights != calm.weights:
        said.append(f"saved weights {found.weights} are not {calm.weights}")
    if found.num_open or found.num_repeated or found.changed_answers:
        said.append(
            f"{found.num_open} futures open, {found.num_repeated} models with repeated effects, "
            f"{found.changed_answers} answers changed"
        )
    return said


def main() -> None:
    """Kill until the number is reached; print each run, then the table."""
    parser = argparse.ArgumentParser(description="Kill API and engine while clients train, and compare bit by bit.")
    parser.add_argument("--kills", type=int, default=200, help="on the fake backend")
    parser.add_argument("--jax-kills", type=int, default=20, help="on the JAX backend, float32")
    parser.add_argument("--bf16-kills", type=int, default=0, help="on the JAX backend, bfloat16: reported only")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each next one's is one more")
    told = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    logging.disable()  # the SDK tells at length of servers that are gone
    with tempfile.TemporaryDirectory(prefix="chaos-jax-") as name:
        total: Counter[tuple[str, Victim, str]] = Counter()
        bad = _kill(fake_server(), told.kills, told.seed, total) if told.kills else 0
        if told.jax_kills:
            bad += _kill(jax_server(Path(name)), told.jax_kills, told.seed, total)
        if told.bf16_kills:
            _kill(jax_server(Path(name, "bf16"), "bfloat16"), told.bf16_kills, told.seed, total)
    print("\n| backend | killed | where | kills |\n|---|---|---|---|")
    for (backend, victim, place), number in sorted(total.items()):
        print(f"| {backend} | {victim} | {place} | {number} |")
    print(f"| | | **all** | **{total.total()}** |")
    raise SystemExit(1 if bad else 0)


def _kill(server: Server, num_kills: int, seed: int, total: Counter[tuple[str, Victim, str]]) -> int:
    """Run until there were so many kills; return how many runs were not as undisturbed."""
    calm = {num_tenants: run(server, num_tenants, []) for num_tenants in (1, 2)}
    lost = repeated = unequal = num_runs = num_done = num_compared = 0
    while num_done < num_kills:
        num_tenants, started = 1 + num_runs % 2, time.monotonic()
        found = run(server, num_tenants, random_kills(seed, KILLS_A_RUN))
        said = differences(found, calm[num_tenants])
        here = found.done.total()
        num_done, num_runs = num_done + here, num_runs + 1
        lost, repeated = lost + found.num_open, repeated + found.num_repeated
        unequal += bool(said)
        num_compared += sum(map(len, found.transcripts)) + len(found.weights)
        total.update({(server.name, *what): number for what, number in found.done.items()})
        elapsed = time.monotonic() - started
        print(
            f"{server.name}, seed {seed}, {num_tenants} tenants: {here} kills, {elapsed:.0f} s", *said[:5], sep="\n  "
        )
        seed += 1
    print(
        f"{server.name}: {num_runs} runs, {num_done} kills, {lost} futures lost, {repeated} models with repeated "
        f"effects, {num_compared} results and saved weights compared, {unequal} runs not bit-equal",
        flush=True,
    )
    return unequal


if __name__ == "__main__":
    main()
