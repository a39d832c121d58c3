"""A run: a server that dies by a schedule, and one client or two that train on it.

All that they saw, the weights that they saved and the log on disk are compared with those of the same clients on a
server that nobody disturbed.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_tx.testing.chaos.client import Transcript, run_tenants
from skyrl_tx.testing.chaos.halves import Halves, Kill, Victim
from skyrl_tx.testing.database_look import rows
from skyrl_tx.testing.tiny_models import write_model

_OFTEN = (
    "--snapshot-effects",
    "5",
    "--snapshot-interval-s",
    "0.5",
    "--snapshot-max-share",
    "1",
    "--max-attempts",
    "1000",
)
"""Snapshots, and tries of one request, which a run kills more often than a server would bear with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What the clients train on."""

    name: str
    base_model: str
    api_flags: Sequence[str] = ()
    engine_flags: Sequence[str] = ()
    database_url: str | None = None
    """A database of PostgreSQL, with empty tables; None: a file in the data directory."""
    slowness: float = 1.0
    """How long it takes to start and to do its work, compared with the fake backend."""


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
    flags = (*common, *slowed, *_OFTEN)
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
    return Server(
        name=f"jax {dtype}",
        base_model="small",
        api_flags=common,
        engine_flags=(*common, *flags, *_OFTEN),
        slowness=4.0,
    )


Line = Callable[[str], AbstractContextManager[str]]
"""What stands between clients and a server: given its URL, it gives theirs."""


def run(server: Server, num_tenants: int, kills: Sequence[Kill], line: Line = nullcontext) -> Outcome:
    """Let clients train while a server dies as told, and their line to it is as it is."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        halves = Halves(directory, kills, server.api_flags, server.engine_flags, server.database_url, server.slowness)
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
