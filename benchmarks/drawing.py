"""What it costs to draw tokens from logits, with filters and without, beside the product that makes those logits."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from common import quartiles
from meters import CompileWatch, timed

from skyrl_tx.backends.jax import sampling

ROWS = 64
VOCABS = (16384, 151936)
SHARPNESS = {"flat": 1.0, "peaked": 8.0}  # factors on logits that are about standard normal


@dataclass(frozen=True, slots=True)
class Asked:
    """A filter of the first so many rows."""

    name: str
    rows: int
    top_k: int = 0
    top_p: float = 1.0

    def params(self) -> sampling.DrawParams:
        return sampling.DrawParams(
            seed_S2=jnp.ones((ROWS, 2), jnp.uint32),
            index_S=jnp.arange(ROWS, dtype=jnp.uint32),
            temperature_S=jnp.ones(ROWS),
            top_k_S=jnp.zeros(ROWS, jnp.int32).at[: self.rows].set(self.top_k),
            top_p_S=jnp.ones(ROWS).at[: self.rows].set(self.top_p),
        )


ASKED = (
    Asked("plain", 0),
    Asked("one row top-p 0.9", 1, top_p=0.9),
    Asked("one row top-k 50", 1, top_k=50),
    Asked("one row top-k 500", 1, top_k=500),
    Asked("all rows top-p 0.95", ROWS, top_p=0.95),
    Asked("all rows top-k 20", ROWS, top_k=20),
    Asked("all rows top-k 20 and top-p 0.95", ROWS, top_k=20, top_p=0.95),
)


def costs(hidden_size: int, repeats: int, watch: CompileWatch) -> dict[str, Any]:
    """Let all kinds draw in turn, each turn at a position of its own; milliseconds."""
    results: dict[str, Any] = {}
    product = jax.jit(lambda x, w, turn: x @ w.T)
    draw = jax.jit(lambda logits, params, turn: sampling.draw(logits, params, turn, wants_topk=jnp.bool_(False)))
    for vocab in VOCABS:
        x, w = (jax.random.normal(jax.random.key(n), (rows, hidden_size)) for n, rows in enumerate((ROWS, vocab)))
        for shape, factor in SHARPNESS.items():
            logits = factor * hidden_size**-0.5 * product(x, w, None)
            kinds = {asked.name: partial(draw, logits, asked.params()) for asked in ASKED}
            spent = _in_turn({**kinds, "logits' product": partial(product, x, w)}, repeats, watch)
            likeliest = jax.nn.softmax(logits).max(axis=-1).mean()
            results[f"vocabulary {vocab}, {shape}"] = {"weight of the likeliest": round(float(likeliest), 3), **spent}
    return results


def _in_turn(kinds: dict[str, Callable[[jax.Array], object]], repeats: int, watch: CompileWatch) -> dict[str, Any]:
    """Time each kind behind an untimed turn of its own, so that none pays for what another left in the caches."""

    def run(work: Callable[[jax.Array], object], turn: int) -> object:
        return jax.block_until_ready(work(jnp.full(ROWS, turn, jnp.int32)))

    for work in kinds.values():
        run(work, 0)
    watch.take()
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(1, 1 + repeats):
        for name, work in kinds.items():
            run(work, turn)
            spent[name].append(1e3 * timed(partial(run, work, turn)).wall_s)
    return {
        "compiles_after_warm_up": watch.take()["compiles"],
        **{name: quartiles(each, 2) for name, each in spent.items()},
    }
