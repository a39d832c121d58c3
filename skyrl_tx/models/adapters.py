"""The adapters of a model: the linear maps they change, their shapes, and their initial values.

A *target* is a linear map that adapters can change, by our name of it.

Legend: L layers, E experts, I inputs and O outputs of a linear map, R rank, V vocab, D embed.
"""

import hashlib

import jax
import numpy as np

from skyrl_tx.contract.requests import LoraSpec
from skyrl_tx.layers.lora import Adapter, AdapterWeights, LoraPair
from skyrl_tx.layers.parameter import Axis
from skyrl_tx.models.config import ModelConfig
from skyrl_tx.weights.peft import AdapterFiles, AdapterFormat, TargetModule, stack_of
from skyrl_tx.weights.weight_map import TIED_UNEMBED_MODULE, WeightMap, adapter_modules

ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
UNEMBED_TARGETS = ("unembed",)
EXPERT_PREFIX = "expert_"
EXPERT_TARGETS = tuple(EXPERT_PREFIX + name for name in MLP_TARGETS)

ALPHA = 32.0
"""LoRA's alpha. It is not part of the protocol; hosted adapters have 32 for every rank."""


def trained_targets(config: ModelConfig, lora: LoraSpec) -> tuple[str, ...]:
    """Return the targets that are trained. The pairs of others are zero and stay zero."""
    groups = (
        (ATTENTION_TARGETS, lora.train_attn),
        (MLP_TARGETS + EXPERT_TARGETS, lora.train_mlp),
        (UNEMBED_TARGETS, lora.train_unembed),
    )
    present = target_sizes(config)
    return tuple(name for names, trained in groups if trained for name in names if name in present)


def target_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the inputs and outputs of each target."""
    D, F = config.hidden_size, config.mlp_size
    NH, KH = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"q_proj": (D, NH), "k_proj": (D, KH), "v_proj": (D, KH), "o_proj": (NH, D)}
    if config.dense_layers:
        sizes |= {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}
    if config.experts is not None:
        width = config.experts.mlp_size
        sizes |= {"expert_gate_proj": (D, width), "expert_up_proj": (D, width), "expert_down_proj": (width, D)}
    return sizes | {"unembed": (D, config.vocab_size)}


def adapter_axes(config: ModelConfig) -> dict[str, tuple[tuple[Axis | None, ...], tuple[Axis | None, ...]]]:
    """Return the logical axes of A and B of each target: those of the map that it changes; ranks are not sharded."""
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
    stacks: tuple[Axis, ...] = ("layers", "expert")
    return {
        name: ((*stack, ends[name][0], None), (*stack, None, ends[name][1]))
        for name in target_sizes(config)
        for stack in [stacks[: len(target_stack(config, name))]]
    }


def target_layers(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the layers that have a target; none for the unembedding."""
    if name in UNEMBED_TARGETS:
        return ()
    if name in EXPERT_TARGETS:
        return config.sparse_layers
    return config.dense_layers if name in MLP_TARGETS else tuple(range(config.num_layers))


def target_stack(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the leading dimensions of a target's factors: [L], [L, E] for experts, none for the unembedding."""
    stack = () if name in UNEMBED_TARGETS else (len(target_layers(config, name)),)
    if config.experts is not None and name in EXPERT_TARGETS:
        stack = (*stack, config.experts.routing.num_experts)
    return stack


def adapter_shapes(config: ModelConfig, rank: int) -> Adapter:
    """Return the tree of one adapter, without a slot axis, as float32 `jax.ShapeDtypeStruct`s."""

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, np.float32)

    weights: dict[str, LoraPair] = {}
    for name, (inputs, outputs) in target_sizes(config).items():
        stack = target_stack(config, name)
        weights[name] = LoraPair(a=shape(*stack, inputs, rank), b=shape(*stack, rank, outputs))  # type: ignore[arg-type]
    return Adapter(weights=weights, scale=shape())  # type: ignore[arg-type]


def init_adapter(config: ModelConfig, lora: LoraSpec, max_rank: int | None = None) -> Adapter:
    """Return a new adapter as numpy arrays: A drawn from the seed, B zero, both padded with zeros to `max_rank`.

    A is uniform on ±1/sqrt(I), as PEFT's kaiming-uniform with a = sqrt(5). Each target draws on the host from its own
    generator, keyed by seed and name. So its values do not depend on devices, `max_rank` or other targets.
    """
    assert 1 <= lora.rank <= (max_rank or lora.rank), f"rank {lora.rank}, padded to {max_rank}"
    shapes = adapter_shapes(config, max_rank or lora.rank)
    adapter: Adapter = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    for name in trained_targets(config, lora):
        a = adapter.weights[name].a
        bound = a.shape[-2] ** -0.5
        key = hashlib.sha256(f"{lora.seed}:{name}".encode()).digest()[:16]
        draw = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        np.asarray(a)[..., : lora.rank] = draw.uniform(-bound, bound, (*a.shape[:-1], lora.rank))
    return adapter.replace(scale=np.float32(ALPHA / lora.rank))  # type: ignore[attr-defined]


def adapter_format(config: ModelConfig, weights: WeightMap, base_model: str) -> AdapterFormat:
    """Return the format of this model's adapter files."""
    names = adapter_modules(weights, tied_embeddings=config.tied_embeddings)
    modules = {
        name: TargetModule(
            module=names[name],
            stack=target_stack(config, name),
            layers=target_layers(config, name) or None,
            inputs=inputs,
            outputs=outputs,
        )
        for name, (inputs, outputs) in target_sizes(config).items()
    }
    return AdapterFormat(base_model=base_model, modules=modules)


def fit_adapter(config: ModelConfig, format: AdapterFormat, adapter: AdapterFiles) -> tuple[LoraSpec, AdapterWeights]:
    """Return an adapter as one that this server trains: whole groups of modules, with our alpha.

    The update of each module stays the same. Modules of a trained group that the adapter lacks get the values of a
    fresh model, whose update is zero. Raises AdapterError if the adapter does not fit the model.
    """
    factors = dict(adapter.factors)
    if config.tied_embeddings and "lm_head" in factors:
        factors[TIED_UNEMBED_MODULE] = factors.pop("lm_head")
    leaves = {stack_of(module)[0].rpartition(".")[2] for module in factors}
    changed = {name for name, module in format.modules.items() if module.leaf in leaves}
    lora = LoraSpec(
        rank=adapter.rank,
        seed=0,
        train_attn=not changed.isdisjoint(ATTENTION_TARGETS),
        train_mlp=not changed.isdisjoint(MLP_TARGETS + EXPERT_TARGETS),
        train_unembed=not changed.isdisjoint(UNEMBED_TARGETS),
    )
    fresh = init_adapter(config, lora).weights
    trained: AdapterWeights = {name: fresh[name] for name in trained_targets(config, lora)}
    return lora, format.with_factors(trained, factors, adapter.scale * lora.rank / ALPHA)
