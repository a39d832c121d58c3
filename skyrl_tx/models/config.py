"""The configuration of the shared decoder, read from the `config.json` of a Hugging Face checkpoint."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_tx.layers.moe import Routing
from skyrl_tx.layers.rope import Rope

HfConfig = Mapping[str, Any]


class UnsupportedModel(ValueError):
    """The checkpoint requires an unsupported feature that changes the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixtures of experts of a model."""

    routing: Routing
    mlp_size: int  # of each expert
    layers: tuple[int, ...]  # that have one in place of the dense feed-forward, in order


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Neighbouring layers of one kind: their numbers, and their places among all layers of the kind."""

    is_sparse: bool
    layers: range
    of_kind: range


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of all decoder blocks; hashable, to be a static argument of jitted functions."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_epsilon: float
    rope: Rope
    max_context_length: int  # tokens
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return () if self.experts is None else self.experts.layers

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers that have a dense feed-forward."""
        return tuple(sorted(set(range(self.num_layers)) - set(self.sparse_layers)))

    def runs(self) -> Iterator[LayerRun]:
        """Yield the layers in as few runs as possible."""
        sparse = frozenset(self.sparse_layers)
        seen = {True: 0, False: 0}
        for is_sparse, group in itertools.groupby(range(self.num_layers), lambda layer: layer in sparse):
            layers = tuple(group)
            first, seen[is_sparse] = seen[is_sparse], seen[is_sparse] + len(layers)
            yield LayerRun(is_sparse, range(layers[0], layers[-1] + 1), range(first, seen[is_sparse]))

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModel(f"{name} must be a whole number above 0, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        if self.experts is not None and not 1 <= self.experts.routing.num_chosen <= self.experts.routing.num_experts:
            chosen, experts = self.experts.routing.num_chosen, self.experts.routing.num_experts
            raise UnsupportedModel(f"a token cannot go to {chosen!r} of {experts!r} experts")


# Keys that would change the maths, with the values under which they do not. Anything else is refused by name.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, 1.0, None),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (1, 1.0, None),
    "residual_multiplier": (1, 1.0, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, 1.0, None),
    "clip_qkv": (None,),
    "num_experts": (0, None),
    "num_local_experts": (0, None),
}

EXPERT_KEYS = frozenset({"num_experts", "num_local_experts"})

# Of a rope description: what each kind holds besides its theta and its name, as fields of `Rope`.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
}


def refuse_what_changes_the_maths(hf: HfConfig, *, has_experts: bool = False) -> None:
    """Raise UnsupportedModel for a key of `NEUTRAL` with another value, and for sliding-window attention in use."""
    for key, neutral in NEUTRAL.items():
        if has_experts and key in EXPERT_KEYS:
            continue
        if key in hf and hf[key] not in neutral:
            raise UnsupportedModel(f"config.json has {key} = {hf[key]!r}; supported: {neutral[0]!r}")
    # Qwen configs carry a window that is off unless `use_sliding_window` says otherwise; Llama knows no such key.
    if hf.get("use_sliding_window") and hf.get("sliding_window") is not None:
        raise UnsupportedModel(f"config.json has sliding_window = {hf['sliding_window']!r} in use; not supported")
    others = sorted(set(hf.get("layer_types") or ()) - {"full_attention"})
    if others:
        raise UnsupportedModel(f"config.json has layer_types with {others}; supported: 'full_attention'")


def read_rope(hf: HfConfig) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (earlier versions)."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KEYS:
        raise UnsupportedModel(f"config.json has {name} of type {kind!r}; supported: {', '.join(ROPE_KEYS)}")
    extra = set(given) - {"rope_theta", "rope_type", "type"} - ROPE_KEYS[kind]
    neutral = {key for key in extra if given[key] in NEUTRAL.get(key, (None,))}
    if extra - neutral:
        raise UnsupportedModel(f"config.json has {name} with {sorted(extra - neutral)}, unknown for type {kind!r}")
    missing = ROPE_KEYS[kind] - set(given)
    if missing:
        raise UnsupportedModel(f"config.json has {name} of type {kind!r} without {sorted(missing)}")
    theta = given.get("rope_theta", hf.get("rope_theta"))
    if theta is None:
        raise UnsupportedModel("config.json has no rope_theta")
    return Rope(theta=float(theta), kind=kind, **{key: float(given[key]) for key in ROPE_KEYS[kind]})
