"""What recovery snapshots cost the training beside which they are taken.

Two engines with the JAX backend, one with the default settings (or those given), one that takes no snapshots, train
the same steps, a segment each in turn, so that both meet the same disturbances. Requests are stored as the API stores
them, and all of a segment are waiting when it begins. Ratios are segment by segment, by the clock and by CPU seconds
of the process, which count the writing too.
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
from common import machine, quartiles, report
from meters import Cost, timed

from skyrl_tx.backends.jax.backend import JaxBackend
from skyrl_tx.backends.jax.config import JaxConfig
from skyrl_tx.contract.ids import ModelId, RequestId
from skyrl_tx.contract.requests import Datum, LoraSpec, ModelPass, ModelSpec, OptimizerParams, OptimStep
from skyrl_tx.engine.settings import EngineSettings
from skyrl_tx.huge_pages import restart_with_huge_pages
from skyrl_tx.store import futures, snapshots
from skyrl_tx.testing.engine_house import House
from skyrl_tx.testing.live_engine import live_engine
from skyrl_tx.testing.tiny_models import PRESETS, write_preset

NEVER: dict[str, Any] = {"snapshot_interval_s": 1e9, "snapshot_effects": 10**9}


@dataclass(slots=True)
class Trainer:
    """One model in training on an engine of its own."""

    house: House
    model_id: ModelId
    data: tuple[Datum, ...]
    num_requests: int = 0
    num_snapshots: int = 0
    """Those that were seen to replace one another."""
    seen: str = ""

    def segment(self, num_steps: int) -> Cost:
        """Take steps; all are stored before the clock begins to count, but for what the engine then does already."""
        return timed(lambda: self._train(num_steps))

    def _train(self, num_steps: int) -> None:
        passed = ModelPass(data=self.data, loss="cross_entropy", loss_config={}, backward=True)
        stepped = OptimStep(params=OptimizerParams(learning_rate=1e-4))
        last: RequestId | None = None
        for _ in range(num_steps):
            for request in (passed, stepped):
                self.num_requests += 1
                last = self.house.submit(request, model_id=self.model_id, seq_id=self.num_requests)
        assert last is not None
        store, wanted = self.house.api, [last]
        while not store.read(lambda tx: futures.statuses(tx, wanted)):
            self._count()
            store.wait(0.05)
        assert store.read(lambda tx: futures.statuses(tx, wanted))[last] == "done", self.house.result(last)

    def _count(self) -> None:
        row = self.house.api.read(lambda tx: snapshots.get(tx, self.model_id))
        if row is not None and row.artifact_id != self.seen:
            self.seen = row.artifact_id
            self.num_snapshots += 1


@contextmanager
def trainer(directory: Path, model: Path, options: argparse.Namespace, limits: dict[str, Any]) -> Iterator[Trainer]:
    """Serve one model until the context is left."""
    rows, length = (int(part) for part in options.shape.split("x"))
    config = JaxConfig(max_lora_adapters=1, sample_slots=1, max_sample_tokens=8192, compile_cache_dir=None)
    backend = JaxBackend(str(model), config)
    house = House(directory)
    house.settings = EngineSettings(data_dir=directory, base_model=str(model), served_model_name="tiny", **limits)
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 512, length + 1).astype(np.int32) for _ in range(rows)]
    data = tuple(Datum(tokens=row[:-1], loss_inputs={"target_tokens": row[1:].astype(np.int64)}) for row in tokens)
    with live_engine(house.settings, backend):
        model_id, _ = house.create(spec=ModelSpec(lora=LoraSpec(rank=options.rank, seed=0)))
        yield Trainer(house, model_id, data)
    house.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=sorted(PRESETS))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--shape", default="4x128", help="rows x tokens of a step")
    parser.add_argument("--segments", type=int, default=9, help="of each engine")
    parser.add_argument("--steps", type=int, default=100, help="in a segment")
    parser.add_argument("--interval-s", type=float, help="instead of the default snapshot_interval_s")
    parser.add_argument("--effects", type=int, help="instead of the default snapshot_effects")
    options = parser.parse_args()
    limits = {"snapshot_interval_s": options.interval_s, "snapshot_effects": options.effects}
    given = {name: value for name, value in limits.items() if value is not None}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model = write_preset(options.model, root / "model")
        with (
            trainer(root / "with", model, options, given) as kept,
            trainer(root / "without", model, options, NEVER) as bare,
        ):
            for each in (kept, bare):
                each.segment(max(2, options.steps // 4))  # compiles
            kept.num_snapshots = 0
            pairs = [(kept.segment(options.steps), bare.segment(options.steps)) for _ in range(options.segments)]
            settings = kept.house.settings
    added_s = statistics.median(with_them.wall_s - without.wall_s for with_them, without in pairs)
    per_segment = kept.num_snapshots / options.segments
    results: dict[str, Any] = {
        "snapshot_interval_s": settings.snapshot_interval_s,
        "snapshot_effects": settings.snapshot_effects,
        "step_s": quartiles([without.wall_s / options.steps for _, without in pairs], 4),
        "snapshots_a_segment": round(per_segment, 2),
        "throughput with / without": quartiles([without.wall_s / with_them.wall_s for with_them, without in pairs]),
        "the same by CPU s": quartiles([without.cpu_s / with_them.cpu_s for with_them, without in pairs]),
        "added_s_a_snapshot": round(added_s / per_segment, 4) if per_segment else None,
    }
    report("snapshots", machine("jax", "jaxlib", "numpy"), results)


if __name__ == "__main__":
    restart_with_huge_pages()  # as the server's engine
    main()
