"""One block applied once per layer, by a loop that is compiled once however many layers there are."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from skyrl_tx.layers.kept import Kept, keeping
from skyrl_tx.layers.lora import Adapter, LoraPair, RowAdapter, RowAdapters, select_rows

Output = TypeVar("Output")
Block = Callable[[jax.Array, Any, RowAdapters, Any], tuple[jax.Array, Output]]
"""(x, one layer's parameters, one layer's adapters, its number) -> (x, what the layer gives besides)."""


def apply_stack(
    block: Block[Output],
    x: jax.Array,
    layers: Any,
    adapter: Adapter | None,
    adapter_B: jax.Array | None,
    targets: Mapping[str, int],
    *,
    kept: Kept = Kept.ALL,
) -> tuple[jax.Array, Any]:
    """Run `x` through all layers; return it and each layer's other output, stacked over L.

    `layers` is a tree whose leaves have a leading L, numbered from 0. `targets` are the adapter's maps in them, with
    the place of the first of these layers in the map's own stack. A shared adapter is sliced layer by layer like the
    parameters, so its gradient comes back stacked; of slots each layer gathers its rows' own. `kept` says what the
    backward pass keeps of each layer.

    Of layers in a tuple, each with parameters of its own, one is computed after the other without a loop, and the
    other outputs are a tuple too: a larger program, that copies nothing out of a stack.
    """
    num_layers = len(layers) if isinstance(layers, tuple) else jax.tree.leaves(layers)[0].shape[0]
    shared = adapter is not None and adapter.scale.ndim == 0
    pairs: dict[str, LoraPair] = {}
    if adapter is not None and shared:
        pairs = {name: cut(adapter.weights[name], first, num_layers) for name, first in targets.items()}

    def step(x: jax.Array, sliced: tuple[Any, dict[str, LoraPair], Any]) -> tuple[jax.Array, Output]:
        parameters, layer_pairs, layer = sliced
        if adapter is None:
            rows: RowAdapters = {}
        elif shared:
            rows = {name: RowAdapter(pair=pair, scale=adapter.scale) for name, pair in layer_pairs.items()}
        else:
            rows = {name: select_rows(adapter, name, adapter_B, first + layer) for name, first in targets.items()}
        return block(x, parameters, rows, layer)

    step = keeping(kept, step)
    if isinstance(layers, tuple):
        outputs: list[Output] = []
        for layer, parameters in enumerate(layers):
            layer_pairs = jax.tree.map(lambda leaf, layer=layer: leaf[layer], pairs)
            x, output = step(x, (parameters, layer_pairs, layer))
            outputs.append(output)
        return x, tuple(outputs)
    return jax.lax.scan(step, x, (layers, pairs, jnp.arange(num_layers, dtype=jnp.int32)))


def cut(tree: Any, first: int, num: int) -> Any:
    """Return so many layers of a tree whose leaves have a leading L; all of them as they are."""
    return jax.tree.map(lambda leaf: leaf if leaf.shape[0] == num else leaf[first : first + num], tree)
