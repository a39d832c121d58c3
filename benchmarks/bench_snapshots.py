"""Cost of recovery snapshots for the training that runs at the same time.

Two engines with the JAX backend train the same steps: one with the default snapshot settings (or those given by flags),
one without snapshots. They alternate by segments of steps, so that both meet the same load of the machine. Requests
are stored as the API stores them, and all requests of a segment are queued when it starts. Ratios compare segments, by
wall time and by CPU seconds of the process, which include writing the snapshots.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import compute_quartiles, report
from benchmarks.meters import Cost, measure_cost
from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Datum, LoraSpec, ModelPass, ModelSpec, OptimizerParams, OptimStep
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.process.setup import restart_with_huge_pages
from skyrl_tx.store import futures, models
from skyrl_tx.testing.tiny_models import PRESETS, write_preset
from tests.support.engine_harness import EngineHarness
from tests.support.live_engine import live_engine

NEVER: dict[str, Any] = {"snapshot_interval_s": 1e9, "snapshot_interval_requests": 10**9}


@dataclass(slots=True)
class Trainer:
    """Trains one model on a separate engine."""

    harness: EngineHarness
    model_id: ModelId
    data: tuple[Datum, ...]
    num_requests: int = 0
    num_snapshots: int = 0
    """The number of observed replacements of the model's snapshot."""
    last_snapshot: str = ""

    def run_segment(self, num_steps: int) -> Cost:
        """Submit the steps of a segment, wait for the last one, and return the cost."""
        return measure_cost(lambda: self._train(num_steps))

    def _train(self, num_steps: int) -> None:
        passed = ModelPass(data=self.data, loss="cross_entropy", loss_config={}, backward=True)
        stepped = OptimStep(params=OptimizerParams(learning_rate=1e-4))
        last: RequestId | None = None
        for _ in range(num_steps):
            for request in (passed, stepped):
                self.num_requests += 1
                last = self.harness.submit(request, model_id=self.model_id, seq_id=self.num_requests)
        assert last is not None
        store, wanted = self.harness.api, [last]
        while not store.read(lambda tx: futures.get_outcomes(tx, wanted)):
            self._count_snapshot()
            store.wait(0.05)
        assert store.read(lambda tx: futures.get_outcomes(tx, wanted))[last] == "done", self.harness.result(last)

    def _count_snapshot(self) -> None:
        row = self.harness.api.read(lambda tx: models.get_snapshot(tx, self.model_id))
        if row is not None and row.artifact_id != self.last_snapshot:
            self.last_snapshot = row.artifact_id
            self.num_snapshots += 1


@contextmanager
def run_trainer(directory: Path, model: Path, options: argparse.Namespace, limits: dict[str, Any]) -> Iterator[Trainer]:
    """Run an engine with one model for the duration of the context."""
    rows, length = (int(part) for part in options.shape.split("x"))
    config = JaxConfig(max_lora_adapters=1, sample_slots=1, max_sample_tokens=8192, compile_cache_dir=None)
    backend = JaxBackend(str(model), config)
    harness = EngineHarness(directory)
    harness.settings = EngineSettings(data_dir=directory, base_model=str(model), served_model_name="tiny", **limits)
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 512, length + 1).astype(np.int32) for _ in range(rows)]
    data = tuple(Datum(tokens=row[:-1], loss_inputs={"target_tokens": row[1:].astype(np.int64)}) for row in tokens)
    with live_engine(harness.settings, backend):
        model_id, _ = harness.create(spec=ModelSpec(lora=LoraSpec(rank=options.rank, seed=0)))
        yield Trainer(harness, model_id, data)
    harness.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=sorted(PRESETS), help="preset of the model")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank")
    parser.add_argument("--shape", default="4x128", help="sequences x tokens of a step")
    parser.add_argument("--segments", type=int, default=9, help="segments of each engine")
    parser.add_argument("--steps", type=int, default=100, help="steps of a segment")
    parser.add_argument("--interval-s", type=float, help="snapshot_interval_s, if not the default")
    parser.add_argument("--requests", type=int, help="snapshot_interval_requests, if not the default")
    options = parser.parse_args()

    limits = {"snapshot_interval_s": options.interval_s, "snapshot_interval_requests": options.requests}
    given = {name: value for name, value in limits.items() if value is not None}

    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = write_preset(options.model, root / "model")
        with (
            run_trainer(root / "with", model, options, given) as kept,
            run_trainer(root / "without", model, options, NEVER) as bare,
        ):
            for trainer in (kept, bare):
                trainer.run_segment(max(2, options.steps // 4))  # compiles the programs

            kept.num_snapshots = 0
            pairs = [
                (kept.run_segment(options.steps), bare.run_segment(options.steps)) for _ in range(options.segments)
            ]
            settings = kept.harness.settings

    added_s = statistics.median(with_them.wall_s - without.wall_s for with_them, without in pairs)
    per_segment = kept.num_snapshots / options.segments
    results: dict[str, Any] = {
        "snapshot_interval_s": settings.snapshot_interval_s,
        "snapshot_interval_requests": settings.snapshot_interval_requests,
        "step_s": compute_quartiles([without.wall_s / options.steps for _, without in pairs], 4),
        "snapshots_per_segment": round(per_segment, 2),
        "throughput with / without": compute_quartiles(
            [without.wall_s / with_them.wall_s for with_them, without in pairs]
        ),
        "throughput with / without, by CPU s": compute_quartiles(
            [without.cpu_s / with_them.cpu_s for with_them, without in pairs]
        ),
        "added_s_per_snapshot": round(added_s / per_segment, 4) if per_segment else None,
    }

    report("snapshots", options, results, ("jax", "jaxlib", "numpy"))


if __name__ == "__main__":
    restart_with_huge_pages()  # as the engine process does
    main()
