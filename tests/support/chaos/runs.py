"""A run of one or two training clients on a server whose processes are killed by a schedule.

Results, saved weights and the log on disk must equal a run of the same clients on an undisturbed
server.
"""

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_tx.testing.tiny_models import write_model
from tests.support.chaos.client import Transcript, run_tenants
from tests.support.chaos.processes import Kill, ServerProcesses, Victim
from tests.support.database_rows import rows
from tests.support.with_constants import constants

_ENGINE_FLAGS = constants(
    "engine",
    snapshot_interval_requests=5,
    snapshot_interval_s=0.5,
    snapshot_max_share=1,
    result_retention_s=86400,  # a run may take longer than ten minutes, and a result that is gone counts as changed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server that the clients train on."""

    name: str
    base_model: str
    api_flags: Sequence[str] = ()
    engine_flags: Sequence[str] = ()
    database_url: str | None = None
    """URL of an empty PostgreSQL database; None selects SQLite."""
    slowness: float = 1.0
    """Duration of start and work relative to the fake backend."""
    num_engines: int = 1
    """Engines that share the database, which is PostgreSQL if there are several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a run and the state on disk after it."""

    transcripts: list[Transcript]
    kinds: Counter[str]
    """Number of stored requests by kind and status."""
    weights: list[str]
    """Hashes of all named checkpoints (weights, moments, gradients), sorted by name."""
    num_open: int
    num_repeated: int
    """Number of models with duplicate or missing log sequence numbers."""
    changed_results: int = 0
    num_given: int = 0
    """Number of times that an engine gave samples to another one."""
    history: Counter[str] = field(default_factory=Counter[str])
    """The history that people read, without times: points, usage, samples, steps, checkpoints and the audit log."""
    done: Counter[tuple[Victim, str]] = field(default_factory=Counter[tuple[Victim, str]])


def fake_server(database_url: str | None = None, **config: float) -> Server:
    """Return a server with the fake backend, slowed so that random kills hit its work. `config` is of the backend."""
    common = ("--base-model", "fake", "--backend", "fake")
    slowed: list[str] = []
    for name, value in {"step_delay_s": 0.01, "slice_tokens": 4, **config}.items():
        slowed += [f"--backend-config.{name.replace('_', '-')}", str(value)]
    flags = (*common, *slowed, *_ENGINE_FLAGS)
    name = "fake" if database_url is None else "fake, PostgreSQL"
    return Server(name=name, base_model="fake", api_flags=common, engine_flags=flags, database_url=database_url)


def jax_server(directory: Path, dtype: str = "float32") -> Server:
    """Return a server with the JAX backend, a model of one layer, and a shared compile cache."""
    model = str(write_model(directory / "model", vocab_size=256, num_layers=1, max_context_length=64))
    common = ("--base-model", model, "--served-model-name", "small")
    sizes = {
        "compile-cache-dir": str(directory / "cache"),
        "dtype": dtype,
        "max-lora-adapters": "2",
        "max-lora-rank": "4",
        "max-sampler-adapters": "2",
        "micro-batch-tokens": "64",
        "sample-slots": "8",  # one tile per tenant: a shared tile uses another decode program
        "max-sample-tokens": "512",
    }
    flags = [argument for name, value in sizes.items() for argument in (f"--backend-config.{name}", value)]
    return Server(
        name=f"jax {dtype}",
        base_model="small",
        api_flags=common,
        engine_flags=(*common, *flags, *_ENGINE_FLAGS),
        slowness=4.0,
    )


Network = Callable[[str], AbstractContextManager[str]]
"""Returns a context that puts a proxy in front of a server URL and gives the URL for clients."""


def run(server: Server, num_tenants: int, kills: Sequence[Kill], network: Network = nullcontext) -> Outcome:
    """Train while the processes of a server are killed, through `network`; return results and state."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        processes = ServerProcesses(
            directory,
            kills,
            server.api_flags,
            server.engine_flags,
            server.database_url,
            server.slowness,
            server.num_engines,
        )

        try:
            with processes, network(processes.url) as url:
                transcripts = run_tenants(url, server.base_model, num_tenants)
        except BaseException as error:
            error.add_note(f"{kills}\n{processes.log_path.read_text()[-8000:]}")
            raise

        return _read_outcome(processes, transcripts)


def _read_outcome(processes: ServerProcesses, transcripts: list[Transcript]) -> Outcome:
    def read_rows(query: str) -> Sequence[tuple[Any, ...]]:
        return rows(processes.data_dir, processes.database_url, query)

    by_kind = read_rows("SELECT kind, status, count(*) FROM requests GROUP BY kind, status")
    ((num_open,),) = read_rows("SELECT count(*) FROM requests WHERE status = 'open'")
    per_model = read_rows(
        "SELECT m.effect_order, count(r.effect_order), count(DISTINCT r.effect_order), max(r.effect_order)"
        " FROM models m JOIN requests r ON r.model_id = m.model_id GROUP BY m.model_id"
    )
    saved = read_rows("SELECT name, artifact_id FROM checkpoints")
    weights = sorted(f"{name} {_hash(processes.data_dir / 'artifacts' / str(artifact))}" for name, artifact in saved)
    return Outcome(
        transcripts=transcripts,
        kinds=Counter({f"{kind} {status}": number for kind, status, number in by_kind}),
        weights=weights,
        num_open=num_open,
        num_repeated=sum(len(set(counts)) != 1 for counts in per_model),
        changed_results=processes.changed_results,
        num_given=len(re.findall(r"gave \d+ samples to engine", processes.log_path.read_text())),
        history=_read_history(read_rows),
        done=processes.done,
    )


_HISTORY = {
    "point": 'SELECT model_id, kind, step, tokens, datums, "values" FROM run_points',
    # A prefix cache is empty after a kill, so cached tokens count like other prefill tokens.
    "usage": "SELECT model_id, REPLACE(kind, '_cached', '') AS work, CAST(SUM(tokens) AS BIGINT),"
    " CAST(SUM(CASE WHEN kind = 'prefill_cached' THEN 0 ELSE requests END) AS BIGINT)"  # PostgreSQL sums to a decimal
    " FROM usage GROUP BY session_id, owner, model_id, work",
    "kept": "SELECT model_id, step, sample_index, prompt, tokens, stop_reason FROM kept_samples",
    "sampled": "SELECT model_id, step, samples, cut, tokens, scored_tokens FROM sampled_steps",
    "steps": "SELECT model_id, num_steps FROM models",
    "saved": "SELECT model_id, kind, name, step FROM checkpoints",
    "audit": "SELECT REPLACE(path, 'tinker://', ''), event, actor FROM audit WHERE path IS NOT NULL",
}
"""Queries whose first column is a model, which is random except for its number in its session."""


def _read_history(found: Callable[[str], Sequence[tuple[Any, ...]]]) -> Counter[str]:
    return Counter(
        f"{name} {str(model_id).partition(':')[2]} {columns}"
        for name, query in _HISTORY.items()
        for model_id, *columns in found(query)
    )


def _hash(artifact: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(artifact.rglob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_differences(found: Outcome, undisturbed: Outcome) -> list[str]:
    """Return all differences between a run and the undisturbed one; the guarantee is that there are none."""
    differing: list[str] = []

    for tenant, (one, other) in enumerate(zip(found.transcripts, undisturbed.transcripts, strict=True)):
        differing += [
            f"tenant {tenant}, line {line}: {a} is not {b}"
            for line, (a, b) in enumerate(zip(one, other, strict=True))
            if a != b
        ]

    if found.kinds != undisturbed.kinds:
        differing.append(f"requests {found.kinds} are not {undisturbed.kinds}")
    if found.weights != undisturbed.weights:
        differing.append(f"saved weights {found.weights} are not {undisturbed.weights}")
    for row in sorted((found.history - undisturbed.history) + (undisturbed.history - found.history)):
        differing.append(f"history: {found.history[row]} times, not {undisturbed.history[row]}: {row}")
    if found.num_open or found.num_repeated or found.changed_results:
        differing.append(
            f"{found.num_open} futures open, {found.num_repeated} models with repeated effects, "
            f"{found.changed_results} results changed"
        )
    return differing
