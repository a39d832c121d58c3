"""Model families, readers for `config.json`, and the interface of the functions that run a model.

The readers refuse every key that would change the maths, instead of ignoring it. This includes
quantization configs, except for the packed formats that the server can read.

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
from skyrl_tx.layers.rope import Rope
from skyrl_tx.models.config import Block, ModelConfig, describe_params, group_blocks
from skyrl_tx.models.parts.attention import Attention
from skyrl_tx.models.parts.base import UnsupportedModel
from skyrl_tx.models.parts.feed_forward import Dense
from skyrl_tx.weights.tensor_file import FP8_BLOCK, INT4_GROUP
from skyrl_tx.weights.weight_map import WeightMap, bind_rows

# Keys that would change the maths, with the values that have no effect. Any other value is refused.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
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

# The keys that a RoPE description must have besides its theta and its type. They are fields of
# `Rope`.
ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"factor", "original_max_position_embeddings", "short_factor"}),
}
OPTIONAL_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "yarn": frozenset({"beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"}),
    "longrope": frozenset({"attention_factor", "long_factor"}),
}
_ABSENT_IF_ZERO = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
"""Keys that transformers treats as absent if they are 0."""
_ORIGINAL = "original_max_position_embeddings"


class HfConfig(dict[str, Any]):
    """A `config.json` of Hugging Face, with methods to read and check its values.

    All raise UnsupportedModel with the key and its value.
    """

    def read_required(self, key: str) -> Any:
        """Return a value of `config.json`. Raises UnsupportedModel if the key is absent or null."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"config.json of a {(self.get('architectures') or ['model'])[0]} lacks {key!r}")
        return value

    def read_size(self, key: str) -> int:
        """Return a positive whole number of `config.json`.

        Raises UnsupportedModel for anything else.
        """
        value = self.read_required(key)
        if not isinstance(value, int) or value < 1:
            raise UnsupportedModel(f"config.json has {key} = {value!r}; it must be a whole number above 0")
        return value

    def read_optional_size(self, key: str) -> int | None:
        """Return a positive whole number, or None if the key is absent or null."""
        return None if self.get(key) is None else self.read_size(key)

    def read_number(self, key: str) -> float:
        """Return a finite number above 0."""
        return check_number(key, self.read_required(key))

    def check_values(self, accepted: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise UnsupportedModel if a key has a value that is neither null nor in `accepted`."""
        for key, values in accepted.items():
            if self.get(key) not in (None, *values):
                raise UnsupportedModel(f"config.json has {key} = {self[key]!r}; supported: {values[0]!r}")

    def check_supported(self, *, reads: frozenset[str]) -> None:
        """Raise UnsupportedModel if the config needs a feature that is not supported.

        The function checks the keys of `NEUTRAL`, sliding windows and quantization. Keys in `reads` are
        not checked, because the family reads them.
        """
        for key, neutral in NEUTRAL.items():
            if key in self and key not in reads and self[key] not in neutral:
                raise UnsupportedModel(f"config.json has {key} = {self[key]!r}; supported: {neutral[0]!r}")
        if "quantization_config" not in reads:
            check_quantization(self.get("quantization_config"))
        # Configs of Qwen contain a window, which has no effect unless `use_sliding_window` is true.
        if self.get("use_sliding_window") and self.get("sliding_window") is not None:
            window = self["sliding_window"]
            raise UnsupportedModel(
                f"config.json has sliding_window = {window!r} and use_sliding_window = true; not supported"
            )
        unsupported = sorted(set(self.get("layer_types") or ()) - {"full_attention"})
        if unsupported and "layer_types" not in reads:
            raise UnsupportedModel(f"config.json has layer_types with {unsupported}; supported: 'full_attention'")

    def get_rope(self) -> tuple[str, Mapping[str, Any]]:
        """Return the RoPE description of a `config.json`, and its key.

        The key is `rope_parameters` (transformers 5) or `rope_scaling` (before). Raises
        UnsupportedModel if the config has two different descriptions.
        """
        given = {name: self[name] for name in ("rope_parameters", "rope_scaling") if self.get(name)}
        if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
            raise UnsupportedModel(
                f"config.json has rope_parameters and rope_scaling, which differ: {given}; remove one"
            )
        name, rope = next(iter(given.items()), ("rope_parameters", {}))
        if not isinstance(rope, Mapping):
            raise UnsupportedModel(f"config.json has {name} = {rope!r}; it must be an object")
        return name, rope

    def read_rope(self) -> Rope:
        """Read the RoPE description of a `config.json`, with the defaults of transformers."""
        name, given = self.get_rope()
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ROPE_KEYS:
            raise UnsupportedModel(f"config.json has {name} of type {kind!r}; supported: {', '.join(ROPE_KEYS)}")

        # Refuse unknown keys, unless their value has no effect.
        optional = OPTIONAL_ROPE_KEYS.get(kind, frozenset())
        extra = set(given) - {"rope_theta", "rope_type", "type"} - ROPE_KEYS[kind] - optional
        neutral = {key for key in extra if given[key] in NEUTRAL.get(key, (None,))}
        if extra - neutral:
            raise UnsupportedModel(
                f"config.json has {name} with {sorted(extra - neutral)}, which type {kind!r} does not support"
            )

        # Fill in the defaults, and check the required keys.
        values = {
            key: value for key, value in given.items() if value or (value is not None and key not in _ABSENT_IF_ZERO)
        }
        if _ORIGINAL in ROPE_KEYS[kind]:
            length = self.get("max_position_embeddings")
            values[_ORIGINAL] = original = self.get(_ORIGINAL) or values.get(_ORIGINAL) or length
            if kind in ("yarn", "longrope") and "factor" not in values and length and original:
                values["factor"] = length / original
        missing = ROPE_KEYS[kind] - set(values)
        if missing:
            raise UnsupportedModel(f"config.json has {name} of type {kind!r} without {sorted(missing)}")

        # Check the values.
        theta = values.get("rope_theta", self.get("rope_theta"))
        if theta is None:
            raise UnsupportedModel("config.json has no rope_theta")
        fields: dict[str, Any] = {"theta": check_number("rope_theta", theta)}
        for key in sorted((ROPE_KEYS[kind] | optional) & set(values) - {"long_factor"}):
            value, path = values[key], f"{name}.{key}"
            if key == "short_factor":
                fields[key] = tuple(
                    check_number(path, number) for number in (value if isinstance(value, list) else [value])
                )
            else:
                fields[key] = bool(value) if key == "truncate" else check_number(path, value)
        return Rope(kind=kind, **fields)

    def read_epsilon(self) -> float:
        """Read the epsilon of norms."""
        if self.get("rms_norm_eps") is None:
            raise UnsupportedModel("config.json has no rms_norm_eps")
        return check_number("rms_norm_eps", self["rms_norm_eps"])

    def read_attention(self, *, has_bias: bool = False, has_norm: bool = False, has_rope: bool = True) -> Attention:
        """Read the attention of Llama and similar models.

        `has_norm` says whether queries and keys are normalised.
        """
        hidden_size, num_heads = self.read_size("hidden_size"), self.read_size("num_attention_heads")
        return Attention(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self.read_optional_size("num_key_value_heads") or num_heads,
            head_dim=self.read_optional_size("head_dim") or hidden_size // num_heads,
            rope=self.read_rope() if has_rope else None,
            has_bias=has_bias,
            norm_epsilon=self.read_epsilon() if has_norm else None,
        )

    def read_partial_rope_attention(self, *, has_bias: bool = False, has_norm: bool = False) -> Attention:
        """Read attention that rotates only a part of each head, the `partial_rotary_factor`."""
        name, given = self.get_rope()
        rope = dict(given)
        share = rope.pop("partial_rotary_factor", None) or self["partial_rotary_factor"]
        check_number("partial_rotary_factor", share)
        attention = HfConfig({**self, name: rope}).read_attention(has_bias=has_bias, has_norm=has_norm)
        return replace(attention, rotary_dims=int(attention.head_dim * share))

    def read_layer_types(
        self, default: Callable[[int], Iterable[str]], supported: Collection[str], key: str = "layer_types"
    ) -> tuple[str, ...]:
        """Return the type of each layer, from a list in config.json or from `default`.

        `default` receives the number of layers.
        """
        num_layers = self.read_size("num_hidden_layers")
        types = tuple(self.get(key) or default(num_layers))
        if len(types) != num_layers or not set(types) <= set(supported):
            raise UnsupportedModel(f"config.json has {key} = {types}; supported: {num_layers} of {tuple(supported)}")
        return types

    def read_dense(self) -> Dense:
        """Read the dense feed-forward of Llama and similar models."""
        return Dense(hidden_size=self.read_size("hidden_size"), mlp_size=self.read_size("intermediate_size"))


def alternate_types(types: tuple[str, str], interval: int, num_layers: int) -> list[str]:
    """Return the types of layers, where every `interval`-th layer has the second type."""
    return [types[(layer + 1) % interval == 0] for layer in range(num_layers)]


def check_number(path: str, value: Any) -> float:
    """Return a value of `config.json` as a float.

    Raises UnsupportedModel unless it is a finite number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UnsupportedModel(f"config.json has {path} = {value!r}; it must be a number above 0")
    return float(value)


_QUANTIZATION_KEY = "quantization_config"
_Accepted = Mapping[str, tuple[Any, ...]]

_FP8: _Accepted = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),  # has no effect, because activations are not quantized here
    "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
}
_INT4: _Accepted = {
    "format": ("pack-quantized",),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_INT4_GROUP: _Accepted = {"format": (None, "pack-quantized")}
_INT4_WEIGHTS: _Accepted = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (INT4_GROUP,),
    "dynamic": (False, None),
}
_WITHOUT_EFFECT = frozenset(
    {
        *("quant_method", "scale_fmt", "modules_to_not_convert"),  # packed tensors are recognised by their names
        *("config_groups", "global_compression_ratio", "ignore", "quantization_status", "version"),
        *("targets", "weights", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"),
    }
)


def check_quantization(given: Mapping[str, Any] | None) -> None:
    """Raise UnsupportedModel if a checkpoint is quantized in a format that the server cannot read.

    Supported are FP8 blocks, INT4 groups, and no quantization. The message names the key and its
    value.
    """
    if given is None:
        return
    method = given.get("quant_method")
    if method == "fp8":
        _check_quantization_values(_QUANTIZATION_KEY, given, _FP8)
    elif method == "compressed-tensors":
        _check_quantization_values(_QUANTIZATION_KEY, given, _INT4)
        for name, group in (given.get("config_groups") or {}).items():
            path = f"{_QUANTIZATION_KEY}.config_groups.{name}"
            _check_quantization_values(path, group, _INT4_GROUP)
            _check_quantization_values(f"{path}.weights", group.get("weights") or {}, _INT4_WEIGHTS)
    else:
        raise UnsupportedModel(
            f"config.json has {_QUANTIZATION_KEY}.quant_method = {method!r}; supported: 'fp8', 'compressed-tensors'"
        )


def _check_quantization_values(path: str, given: Mapping[str, Any], accepted: _Accepted) -> None:
    """Raise UnsupportedModel if a key of `given` has a value that is not in `accepted`.

    Keys that are not in `accepted` must be null, unless they have no effect.
    """
    for key in sorted({*given, *accepted} - _WITHOUT_EFFECT):
        values = accepted.get(key, (None,))
        if given.get(key) not in values:
            raise UnsupportedModel(f"config.json has {path}.{key} = {given.get(key)!r}; supported: {values[0]!r}")


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

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a `config.json`.

        Raises UnsupportedModel, naming the key and its value, if a key is missing or would change
        the maths.
        """
        hf = HfConfig({**self.defaults, **get_text_config(hf)})
        hf.update({name: hf.pop(key) for key, name in self.renamed.items() if key in hf})
        hf.check_supported(reads=self.reads)
        blocks, length = self.read_blocks(hf), hf.read_size("max_position_embeddings")
        extended = _extend_context(blocks, length)
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=hf.read_size("vocab_size"),
            hidden_size=hf.read_size("hidden_size"),
            norm_epsilon=hf.read_epsilon(),
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


def get_text_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model. Models with images nest it under `text_config`."""
    nested = hf.get("text_config")
    if not isinstance(nested, Mapping):
        return hf
    shared = {key: hf[key] for key in ("architectures", "tie_word_embeddings", "quantization_config") if key in hf}
    return {**nested, **shared}


def make_dense_reader(*, has_bias: bool = False, has_norm: bool = False) -> Callable[[HfConfig], tuple[Block, ...]]:
    """Return a `read_blocks` for a family whose layers are all equal and dense."""

    def read(hf: HfConfig) -> tuple[Block, ...]:
        block = Block(hf.read_attention(has_bias=has_bias, has_norm=has_norm), hf.read_dense())
        return (block,) * hf.read_size("num_hidden_layers")

    return read
