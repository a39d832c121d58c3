"""The adapters of a model: which linear maps they touch, how large they are, how they begin.

Legend: L layers, E experts, I inputs and O outputs of a linear map, R rank, V vocab, D embed.
"""

import hashlib
from dataclasses import dataclass

import jax
import numpy as np

from skyrl_tx.layers.lora import Adapter, LoraPair
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.models.config import ModelConfig

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
UNEMBED_TARGETS = ("unembed",)
EXPERT_PREFIX = "expert_"
EXPERT_TARGETS = tuple(EXPERT_PREFIX + name for name in MLP_TARGETS)

ALPHA = 32.0  # not in the protocol; what hosted adapters carry, whatever their rank


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """What a client asks of a new adapter."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = ALPHA

    def targets(self, config: ModelConfig) -> tuple[str, ...]:
        """Return the linear maps that are trained; the others' pairs are zero and stay so."""
        groups = (
            (ATTENTION_TARGETS, self.train_attn),
            (MLP_TARGETS + EXPERT_TARGETS, self.train_mlp),
            (UNEMBED_TARGETS, self.train_unembed),
        )
        present = target_sizes(config)
        return tuple(name for names, trained in groups if trained for name in names if name in present)


def target_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear map that an adapter can touch."""
    D, F = config.hidden_size, config.mlp_size
    NH, KH = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q_proj": (D, NH), "k_proj": (D, KH), "v_proj": (D, KH), "o_proj": (NH, D)}
    if config.dense_layers:
        sizes |= {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
    if config.experts is not None:
        F = config.experts.mlp_size
        sizes |= {"expert_gate_proj": (D, F), "expert_up_proj": (D, F), "expert_down_proj": (F, D)}
    return sizes | {"unembed": (D, config.vocab_size)}


def adapter_axes(config: ModelConfig) -> dict[str, tuple[tuple[Axis | None, ...], tuple[Axis | None, ...]]]:
    """Return the logical axes of each pair's A and B: those of the map that it adapts, the rank whole."""
    ends: dict[str, tuple[Axis, Axis]] = {
        "q_proj": ("embed", "heads"),
        "k_proj": ("embed", "kv_heads"),
        "v_proj": ("embed", "kv_heads"),
        "o_proj": ("heads", "embed"),
        "unembed": ("embed", "vocab"),
    }
    for prefix in ("", EXPERT_PREFIX):
        ends |= {f"{prefix}gate_proj": ("embed", "mlp"), f"{prefix}up_proj": ("embed", "mlp")}
        ends |= {f"{prefix}down_proj": ("mlp", "embed")}
    found: dict[str, tuple[tuple[Axis | None, ...], tuple[Axis | None, ...]]] = {}
    for name in target_sizes(config):
        stack: tuple[Axis, ...] = () if name in UNEMBED_TARGETS else ("layers",)
        if name in EXPERT_TARGETS:
            stack = (*stack, "expert")
        inputs, outputs = ends[name]
        found[name] = ((*stack, inputs, None), (*stack, None, outputs))
    return found


def target_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the layers that have a linear map; none for the unembedding."""
    if name in UNEMBED_TARGETS:
        return ()
    if name in EXPERT_TARGETS:
        return config.sparse_layers
    return config.dense_layers if name in MLP_TARGETS else tuple(range(config.num_layers))


def adapter_shapes(config: ModelConfig, rank: int) -> Adapter:
    """Return the tree of one adapter (no slot axis), as float32 `jax.ShapeDtypeStruct`s."""

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, np.float32)

    weights: dict[str, LoraPair] = {}
    for name, (inputs, outputs) in target_sizes(config).items():
        stack = () if name in UNEMBED_TARGETS else (len(target_layers(config, name)),)
        if config.experts is not None and name in EXPERT_TARGETS:
            stack = (*stack, config.experts.routing.num_experts)
        weights[name] = LoraPair(a=shape(*stack, inputs, rank), b=shape(*stack, rank, outputs))  # type: ignore[arg-type]
    return Adapter(weights=weights, scale=shape())  # type: ignore[arg-type]


def init_adapter(config: ModelConfig, spec: AdapterSpec, max_rank: int | None = None) -> Adapter:
    """Return a new adapter as numpy arrays: A drawn from the seed, B zero, both padded with zeros to `max_rank`.

    A is uniform on ±1/sqrt(I), as PEFT's kaiming-uniform with a = sqrt(5). Each target draws from a generator of its
    own, keyed by seed and name, on the host: so it depends on nothing else, neither devices nor `max_rank` nor other
    targets.
    """
    if spec.rank < 1 or (max_rank is not None and spec.rank > max_rank):
        raise ValueError(f"rank must be between 1 and {max_rank or 'any'}, not {spec.rank}")
    shapes = adapter_shapes(config, max_rank or spec.rank)
    adapter: Adapter = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for name in spec.targets(config):
        a = adapter.weights[name].a
        bound = a.shape[-2] ** -0.5
        drawn = _generator(spec.seed, name).uniform(-bound, bound, (*a.shape[:-1], spec.rank))
        np.asarray(a)[..., : spec.rank] = drawn
    return adapter.replace(scale=np.float32(spec.alpha / spec.rank))  # type: ignore[attr-defined]


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
