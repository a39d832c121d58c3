"""The interface of model families.

A model is a frozen `ModelConfig` (static under jit) and a `DecoderParams` tree (an argument, never a captured
constant). Everything below is a pure function; `adapter` may be None (the base model), one `Adapter` for all rows, or
slots with the `RowSlots` of the rows (see `skyrl_tx.layers.lora`). Hidden states, logits and log-probabilities are
float32.

    embed(params, config, tokens)                                        -> embeddings [..., D]
    forward(params, config, inputs, adapter, slots, remat=...)           -> hidden [B, T, D]
    target_logprobs(params, hidden_BTD, targets, adapter, slots)         -> log p, [B, T] or [B, T, K] as the targets
    loss_and_gradient(params, hidden_BTD, targets, adapter, loss, inputs, total)
                                                                         -> outputs of the loss, d hidden, total and
                                                                            d unembedding pair
    logits(params, hidden, adapter, slots)                               -> [B, ..., V]
    extend(params, config, inputs, start, cache, table, adapter, slots)
                                                                         -> hidden [B, T, D], Cache
    decode_step(params, config, token_S, cache, adapter, slots)          -> hidden [S, D], DecodeSliceCache
    by_layer(params, config)                                             -> DecoderParams, each layer by itself
    describe_params(config)                                              -> DecoderParams of Parameter
    describe_adapter(config, rank), init_adapter(config, spec, max_rank)   -> Adapter of shapes, of numpy arrays

`inputs` are tokens or embeddings. Prompts and samples are in a `Cache` (see `layers.cache_state`), empty at first
(`make_empty_cache`), and a `Table` says where. Steps of decoding lie between `held.open_decode_slice(cache, table, ...)` and
`held.close_decode_slice(cache, ..., table)`.
Weights: `weights.hf.load(directory, describe_params(config), family.weights)` or `weights.hf.dummy(...)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_tx.layers.parameter import flatten
from skyrl_tx.models.config import (
    Block,
    HfConfig,
    ModelConfig,
    check_supported,
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
    """One architecture name of Hugging Face configs: its blocks, and its tensors' names."""

    architecture: str
    weights: WeightMap
    read_blocks: Callable[[HfConfig], tuple[Block, ...]]
    """Reads the layers. Raises UnsupportedModel."""
    aliases: tuple[str, ...] = ()
    """Other names of the architecture, such as that of the model with images, whose text model this is."""
    reads: frozenset[str] = frozenset()
    """The config keys of `NEUTRAL` that `read_blocks` reads with any value."""
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Config keys of this family, with the names that others give them."""
    scales_embeddings: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config keys that a checkpoint may leave out

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the architecture."""
        return self.architecture, *self.aliases

    def config_from_hf(self, hf: HfConfig) -> ModelConfig:
        """Read a `config.json`.

        Raises UnsupportedModel, naming the key and its value, when something is missing or would change the maths.
        """
        hf = {**self.defaults, **get_text_config(hf)}
        hf |= {name: hf.pop(key) for key, name in self.renamed.items() if key in hf}
        check_supported(hf, reads=self.reads)
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=read_size(hf, "vocab_size"),
            hidden_size=read_size(hf, "hidden_size"),
            norm_epsilon=read_epsilon(hf),
            max_context_length=read_size(hf, "max_position_embeddings"),
            tied_embeddings=bool(hf.get("tie_word_embeddings", False)),
            groups=group_blocks(self.read_blocks(hf)),
            scales_embeddings=self.scales_embeddings,
        )

    def bind_weights(self, config: ModelConfig) -> WeightMap:
        """Return the rules with the rows of tensors that several parameters share."""
        return bind_rows(self.weights, flatten(describe_params(config)))


def get_text_config(hf: HfConfig) -> HfConfig:
    """Return the config of the text model, which that of a model with images nests."""
    nested = hf.get("text_config")
    if not isinstance(nested, Mapping):
        return hf
    shared = {key: hf[key] for key in ("architectures", "tie_word_embeddings", "quantization_config") if key in hf}
    return {**nested, **shared}


def read_epsilon(hf: HfConfig) -> float:
    """Read the epsilon of norms."""
    if hf.get("rms_norm_eps") is None:
        raise UnsupportedModel("config.json has no rms_norm_eps")
    return float(hf["rms_norm_eps"])


def read_attention(hf: HfConfig, *, has_bias: bool = False, has_norm: bool = False, has_rope: bool = True) -> Attention:
    """Read the attention of Llama and its relatives; `has_norm` is of queries and keys."""
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


def read_window(hf: HfConfig) -> int | None:
    """Read how many positions the layers with a window attend to; None without windows."""
    return None if hf.get("sliding_window") is None else read_size(hf, "sliding_window")


def read_dense(hf: HfConfig) -> Dense:
    """Read the dense feed-forward of Llama and its relatives."""
    return Dense(hidden_size=read_size(hf, "hidden_size"), mlp_size=read_size(hf, "intermediate_size"))


def make_dense_reader(*, has_bias: bool = False, has_norm: bool = False) -> Callable[[HfConfig], tuple[Block, ...]]:
    """Return the reader of a family whose layers are all equal and dense."""

    def read(hf: HfConfig) -> tuple[Block, ...]:
        block = Block(read_attention(hf, has_bias=has_bias, has_norm=has_norm), read_dense(hf))
        return (block,) * read_size(hf, "num_hidden_layers")

    return read
