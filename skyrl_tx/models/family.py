"""Model families, and the interface of the functions that run a model.

A model is a frozen `ModelConfig`, which is static under jit, and a tree `DecoderParams`, which is
an argument. All functions are pure. `adapter` is None (the base model), one `Adapter` for all rows,
or a pool of adapters together with `slots`, the adapter slot of each row (see
`skyrl_tx.layers.lora`). Hidden states, logits and log-probabilities are float32.

    embed(params, config, tokens)                                        -> embeddings [..., D]
    forward(params, config, inputs, adapter, slots, remat=...)           -> hidden [B, T, D]
    target_logprobs(params, hidden_BTD, targets, adapter, slots)         -> log p, [B, T] or [B, T, K] as the targets
    loss_and_gradient(params, hidden_BTD, targets, adapter, loss, inputs, total)
                                                                         -> outputs of the loss, d hidden, total and
                                                                            d unembedding pair
    logits(params, hidden, adapter, slots)                               -> [B, ..., V]
    prefill(params, config, inputs, start, cache, table, adapter, slots) -> hidden [B, T, D], Cache
    decode_step(params, config, token_S, cache, adapter, slots)          -> hidden [S, D], DecodeSliceCache
    unstack_params(params, config)                                       -> DecoderParams with separate layers
    describe_params(config)                                              -> DecoderParams of Parameter
    describe_adapter(config, rank)                                       -> Adapter of shapes
    init_adapter(config, lora, max_rank)                                 -> Adapter of numpy arrays

`inputs` are tokens or embeddings. Keys, values and states of all prompts and samples are in a
`Cache` (see `layers.cache_state`), which `make_empty_cache` creates. A `BlockTable` says which
pages of the cache each row uses. A decode slice begins with `cache_state.open_decode_slice`, runs
`decode_step` multiple times, and ends with `cache_state.close_decode_slice`.

Weights come from `weights.hf.load(directory, describe_params(config), family.weights)`, or from
`weights.hf.make_dummy`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models.config import (
    Block,
    HfConfig,
    ModelConfig,
    check_number,
    check_supported,
    get_rope,
    group_blocks,
    read_rope,
    read_size,
)
from skyrl_tx.models.params import describe_params
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.base import UnsupportedModel
from skyrl_tx.models.parts.feed_forward import Dense
from skyrl_tx.weights.weight_map import WeightMap, bind_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """The models of one architecture: how to read their blocks, and the names of their tensors."""

    architecture: str
    weights: WeightMap
    read_blocks: Callable[[HfConfig], tuple[Block, ...]]
    """Returns the block of every layer. Raises UnsupportedModel."""
    aliases: tuple[str, ...] = ()
    """Other names of the architecture, for example of a model that adds images to this text model."""
    reads: frozenset[str] = frozenset()
    """Config keys that `read_blocks` reads itself, so that `check_supported` does not check them."""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Config keys that this family names differently, with the usual name of each."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    extends_context: bool = True
    """Whether RoPE scaling may make the context longer than `max_position_embeddings`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of keys that a checkpoint may omit

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the architecture."""
        return self.architecture, *self.aliases

    def config_from_hf(self, hf: HfConfig) -> ModelConfig:
        """Read a `config.json`.

        Raises UnsupportedModel, naming the key and its value, if a key is missing or would change
        the maths.
        """
        hf = {**self.defaults, **get_text_config(hf)}
        hf |= {name: hf.pop(key) for key, name in self.renamed.items() if key in hf}
        check_supported(hf, reads=self.reads)
        blocks, length = self.read_blocks(hf), read_size(hf, "max_position_embeddings")
        extended = _extend_context(blocks, length)
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=read_size(hf, "vocab_size"),
            hidden_size=read_size(hf, "hidden_size"),
            norm_epsilon=read_epsilon(hf),
            max_context_length=extended if self.extends_context else min(extended, length),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            groups=group_blocks(blocks),
            scales_embeddings=self.scales_embeddings,
        )

    def bind_weights(self, config: ModelConfig) -> WeightMap:
        """Return the weight rules. If parameters share a tensor, the rules say which rows each has."""
        return bind_rows(self.weights, flatten(describe_params(config)))


def _extend_context(blocks: Iterable[Block], length: int) -> int:
    """Return the context length of layers, given `max_position_embeddings`."""
    rotations = {block.mixer.rotation for block in blocks if block.mixer is not None} - {None}
    for rope, num_dims in filter(None, rotations):
        if rope.short_factor and len(rope.short_factor) != num_dims // 2:
            raise UnsupportedModel(
                f"config.json has {len(rope.short_factor)} numbers in short_factor; there must be {num_dims // 2}"
            )
    return min((rope.extend_context(length) for rope, _ in filter(None, rotations)), default=length)


def get_text_config(hf: HfConfig) -> HfConfig:
    """Return the config of the text model. Models with images nest it under `text_config`."""
    nested = hf.get("text_config")
    if not isinstance(nested, Mapping):
        return hf
    shared = {key: hf[key] for key in ("architectures", "tie_word_embeddings", "quantization_config") if key in hf}
    return {**nested, **shared}


def read_epsilon(hf: HfConfig) -> float:
    """Read the epsilon of norms."""
    if hf.get("rms_norm_eps") is None:
        raise UnsupportedModel("config.json has no rms_norm_eps")
    return check_number("rms_norm_eps", hf["rms_norm_eps"])


def read_attention(hf: HfConfig, *, has_bias: bool = False, has_norm: bool = False, has_rope: bool = True) -> Attention:
    """Read the attention of Llama and similar models.

    `has_norm` says whether queries and keys are normalised.
    """
    hidden_size, num_heads = read_size(hf, "hidden_size"), read_size(hf, "num_attention_heads")
    return Attention(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=read_size(hf, "num_key_value_heads") if hf.get("num_key_value_heads") is not None else num_heads,
        head_dim=read_size(hf, "head_dim") if hf.get("head_dim") is not None else hidden_size // num_heads,
        rope=read_rope(hf) if has_rope else None,
        has_bias=has_bias,
        norm_epsilon=read_epsilon(hf) if has_norm else None,
    )


def read_partial_rope_attention(hf: HfConfig, *, has_bias: bool = False, has_norm: bool = False) -> Attention:
    """Read attention that rotates only a part of each head, the `partial_rotary_factor`."""
    name, given = get_rope(hf)
    rope = dict(given)
    share = rope.pop("partial_rotary_factor", None) or hf["partial_rotary_factor"]
    check_number("partial_rotary_factor", share)
    attention = read_attention({**hf, name: rope}, has_bias=has_bias, has_norm=has_norm)
    return replace(attention, rotary_dims=int(attention.head_dim * share))


def read_layer_types(
    hf: HfConfig, default: Callable[[int], Iterable[str]], supported: Collection[str], key: str = "layer_types"
) -> tuple[str, ...]:
    """Return the type of each layer, from a list in config.json or from `default`.

    `default` receives the number of layers.
    """
    num_layers = read_size(hf, "num_hidden_layers")
    types = tuple(hf.get(key) or default(num_layers))
    if len(types) != num_layers or not set(types) <= set(supported):
        raise UnsupportedModel(f"config.json has {key} = {types}; supported: {num_layers} of {tuple(supported)}")
    return types


def read_window(hf: HfConfig) -> int | None:
    """Read the size of sliding windows in positions, or None if the model has none."""
    return None if hf.get("sliding_window") is None else read_size(hf, "sliding_window")


def read_dense(hf: HfConfig) -> Dense:
    """Read the dense feed-forward of Llama and similar models."""
    return Dense(hidden_size=read_size(hf, "hidden_size"), mlp_size=read_size(hf, "intermediate_size"))


def make_dense_reader(*, has_bias: bool = False, has_norm: bool = False) -> Callable[[HfConfig], tuple[Block, ...]]:
    """Return a `read_blocks` for a family whose layers are all equal and dense."""

    def read(hf: HfConfig) -> tuple[Block, ...]:
        block = Block(read_attention(hf, has_bias=has_bias, has_norm=has_norm), read_dense(hf))
        return (block,) * read_size(hf, "num_hidden_layers")

    return read
