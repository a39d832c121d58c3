"""The base weights of a decoder: descriptions, stacked arrays, and separate layers for decoding.

Legend: D embed, N heads, K kv heads, H head dim, F mlp, V vocab, E experts, L layers.
"""

from dataclasses import fields, replace
from typing import Any

import jax
from flax import struct

from skyrl_tx.layers.parameter import Parameter
from skyrl_tx.layers.sharding import WHOLE, Layout
from skyrl_tx.models.config import LayerRun, ModelConfig


@struct.dataclass
class LayerParams:
    """The layers' parameters, each with a leading L, of those layers that have it; of one layer inside the loop.

    Linear maps are [in, out]. A layer has a dense feed-forward or experts.
    """

    attn_norm: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    mlp_norm: Any
    gate_proj: Any = None
    up_proj: Any = None
    down_proj: Any = None
    router: Any = None  # [E, D]
    expert_gate_proj: Any = None  # these three: [E, in, out]
    expert_up_proj: Any = None
    expert_down_proj: Any = None
    q_bias: Any = None
    k_bias: Any = None
    v_bias: Any = None
    q_norm: Any = None
    k_norm: Any = None


DENSE_FIELDS = frozenset({"gate_proj", "up_proj", "down_proj"})
SPARSE_FIELDS = frozenset({"router", "expert_gate_proj", "expert_up_proj", "expert_down_proj"})


Layers = LayerParams | tuple[LayerParams, ...]
"""All layers, stacked; or in a tuple, each by itself."""


@struct.dataclass
class DecoderParams:
    """All base weights: arrays, or `Parameter`s that describe them."""

    embed: Any  # [V, D]
    layers: Layers
    final_norm: Any  # [D]
    unembed: Any = None  # [V, D]; None when tied to `embed`
    layout: Layout = struct.field(pytree_node=False, default=WHOLE)  # of these arrays and all that is computed of them

    @property
    def unembed_VD(self) -> Any:
        """The unembedding matrix."""
        return self.embed if self.unembed is None else self.unembed


def describe_params(config: ModelConfig) -> DecoderParams:
    """Return shape, logical axes and initialisation of every parameter, as a tree of `Parameter`."""
    L, D, V, H = config.num_layers, config.hidden_size, config.vocab_size, config.head_dim
    NH, KH = config.num_heads * H, config.num_kv_heads * H

    def norm(size: int, axis: Any) -> Parameter:
        return Parameter((L, size), ("layers", axis), "ones")

    def bias(size: int, axis: Any) -> Parameter | None:
        return Parameter((L, size), ("layers", axis), "zeros") if config.qkv_bias else None

    layers = LayerParams(
        attn_norm=norm(D, "embed"),
        q_proj=Parameter((L, D, NH), ("layers", "embed", "heads")),
        k_proj=Parameter((L, D, KH), ("layers", "embed", "kv_heads")),
        v_proj=Parameter((L, D, KH), ("layers", "embed", "kv_heads")),
        o_proj=Parameter((L, NH, D), ("layers", "heads", "embed")),
        mlp_norm=norm(D, "embed"),
        q_bias=bias(NH, "heads"),
        k_bias=bias(KH, "kv_heads"),
        v_bias=bias(KH, "kv_heads"),
        q_norm=norm(H, "head_dim") if config.qk_norm else None,
        k_norm=norm(H, "head_dim") if config.qk_norm else None,
        **_describe_feed_forward(config),
    )
    return DecoderParams(
        embed=Parameter((V, D), ("vocab", "embed")),
        layers=layers,
        final_norm=Parameter((D,), ("embed",), "ones"),
        unembed=None if config.tied_embeddings else Parameter((V, D), ("vocab", "embed")),
    )


def _describe_feed_forward(config: ModelConfig) -> dict[str, Parameter]:
    D, found = config.hidden_size, {}
    if config.dense_layers:
        shape = (len(config.dense_layers), D, config.mlp_size)
        for name in ("gate_proj", "up_proj"):
            found[name] = Parameter(shape, ("layers", "embed", "mlp"), layers=config.dense_layers)
        down = (shape[0], config.mlp_size, D)
        found["down_proj"] = Parameter(down, ("layers", "mlp", "embed"), layers=config.dense_layers)
    if config.experts is not None:
        experts = config.experts
        L, E, F = len(experts.layers), experts.routing.num_experts, experts.mlp_size
        found["router"] = Parameter((L, E, D), ("layers", "expert", "embed"), layers=experts.layers)
        for name in ("expert_gate_proj", "expert_up_proj"):
            found[name] = Parameter((L, E, D, F), ("layers", "expert", "embed", "mlp"), layers=experts.layers)
        found["expert_down_proj"] = Parameter((L, E, F, D), ("layers", "expert", "mlp", "embed"), layers=experts.layers)
    return found


def layers_of(layers: Layers, run: LayerRun) -> Layers:
    """Return a run of layers of one kind, in the form that all layers have, without the fields of the other kind."""
    if isinstance(layers, tuple):
        return layers[run.layers.start : run.layers.stop]
    own, others = (SPARSE_FIELDS, DENSE_FIELDS) if run.is_sparse else (DENSE_FIELDS, SPARSE_FIELDS)
    present = {field.name: getattr(layers, field.name) for field in fields(layers) if field.name not in others}
    return LayerParams(
        **{
            name: cut(leaf, (run.of_kind if name in own else run.layers).start, len(run.layers))
            for name, leaf in present.items()
        }
    )


def cut(tree: Any, first: int, num: int) -> Any:
    """Return `num` layers of a tree whose leaves have a leading L; without a copy if those are all."""
    return jax.tree.map(lambda leaf: leaf if leaf.shape[0] == num else leaf[first : first + num], tree)


def by_layer(params: DecoderParams, config: ModelConfig) -> DecoderParams:
    """Return the parameters with the layers out of their stacks: copies, for a loop that would copy them each time."""
    layers = [
        jax.tree.map(lambda leaf, place=place: leaf[place], layers_of(params.layers, run))
        for run in config.runs()
        for place in range(len(run.layers))
    ]
    return replace(params, layers=tuple(layers))
