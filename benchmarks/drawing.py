"""Time to draw tokens from logits, with and without top-k and top-p, compared with the product that computes them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.common import compute_quartiles
from benchmarks.meters import CompileCounter, measure_cost
from skyrl_tx.backends.jax.sample import draw as drawing

ROWS = 64
VOCABS = (16384, 151936)
SHARPNESS = {"flat": 1.0, "peaked": 8.0}  # factors applied to roughly standard normal logits


@dataclass(frozen=True, slots=True)
class Filter:
    """Top-k and top-p of the first `rows` rows. The remaining rows are not filtered."""

    name: str
    rows: int
    top_k: int = 0
    top_p: float = 1.0

    def params(self) -> drawing.DrawParams:
        return drawing.DrawParams(
            seed_S2=jnp.ones((ROWS, 2), jnp.uint32),
            index_S=jnp.arange(ROWS, dtype=jnp.uint32),
            temperature_S=jnp.ones(ROWS),
            top_k_S=jnp.zeros(ROWS, jnp.int32).at[: self.rows].set(self.top_k),
            top_p_S=jnp.ones(ROWS).at[: self.rows].set(self.top_p),
            min_p_S=jnp.zeros(ROWS),
            raw_S=jnp.zeros(ROWS, bool),
        )


FILTERS = (
    Filter("plain", 0),
    Filter("one row top-p 0.9", 1, top_p=0.9),
    Filter("one row top-k 50", 1, top_k=50),
    Filter("one row top-k 500", 1, top_k=500),
    Filter("all rows top-p 0.95", ROWS, top_p=0.95),
    Filter("all rows top-k 20", ROWS, top_k=20),
    Filter("all rows top-k 20 and top-p 0.95", ROWS, top_k=20, top_p=0.95),
)


def measure_draws(hidden_size: int, repeats: int, compiles: CompileCounter) -> dict[str, Any]:
    """Return milliseconds per draw of each filter and of the product; the contestants alternate."""
    results: dict[str, Any] = {}
    product = jax.jit(lambda x, w, turn: x @ w.T)
    draw = jax.jit(lambda logits, params, turn: drawing.draw(logits, params, turn, wants_topk=jnp.bool_(False)))
    for vocab in VOCABS:
        x, w = (jax.random.normal(jax.random.key(n), (rows, hidden_size)) for n, rows in enumerate((ROWS, vocab)))
        for shape, factor in SHARPNESS.items():
            logits = factor * hidden_size**-0.5 * product(x, w, None)
            kinds = {case.name: partial(draw, logits, case.params()) for case in FILTERS}
            times = _alternate({**kinds, "logits' product": partial(product, x, w)}, repeats, compiles)
            likeliest = jax.nn.softmax(logits).max(axis=-1).mean()
            results[f"vocabulary {vocab}, {shape}"] = {"weight of the likeliest": round(float(likeliest), 3), **times}
    return results


def _alternate(
    kinds: dict[str, Callable[[jax.Array], object]], repeats: int, compiles: CompileCounter
) -> dict[str, Any]:
    """Time each kind right after an untimed run of the same kind, so that all find their data in the caches."""

    def run(work: Callable[[jax.Array], object], turn: int) -> object:
        return jax.block_until_ready(work(jnp.full(ROWS, turn, jnp.int32)))

    for work in kinds.values():
        run(work, 0)
    compiles.take()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(1, 1 + repeats):
        for name, work in kinds.items():
            run(work, turn)
            times[name].append(1e3 * measure_cost(partial(run, work, turn)).wall_s)
    return {
        "compiles_after_warm_up": compiles.take()["compiles"],
        **{name: compute_quartiles(values, 2) for name, values in times.items()},
    }
